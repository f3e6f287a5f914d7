"use strict";
// The live page. The address selects a view; the view asks the server for its data and draws a tree. When the ledger changes, it
// asks again and patches the page.

// ---------------------------------------------------------------------------------------------------------- the views
// load(route) asks the server, draw(data, route) gives the tree. keys: the parts of the address's query that need a new question to
// the server. A route is the address taken apart: {path, view, id, state}.

const VIEWS = [
  { path: /^\/$/, name: "Runs", keys: [], load: () => ask("/api/runs"), draw: runsView },
  { path: /^\/run\/(?<id>[^/]+)$/, name: "Overview", keys: [], load: p => ask(`${api(p)}/overview`), draw: overviewView },
  {
    path: /^\/run\/(?<id>[^/]+)\/gallery$/, name: "Gallery", keys: ["round", "client", "offset"],
    load: p => ask(`${api(p)}/gallery`, asked(p)), draw: galleryView,
  },
  {
    path: /^\/run\/(?<id>[^/]+)\/clients$/, name: "Clients", keys: [],
    load: p => ask(`${api(p)}/clients`), draw: clientsView,
  },
  { path: /^\/compare$/, name: "Compare", keys: ["runs", "metric"], load: loadCompare, draw: compareView },
];
const TABS = [["Overview", ""], ["Gallery", "/gallery"], ["Clients", "/clients"]];
const LIVE = new Set(["training", "attacking"]);

const address = (id, rest = "") => `/run/${encodeURIComponent(id)}${rest}`;
const api = route => `/api/runs/${encodeURIComponent(route.id)}`;

/** The part of the address's query that the view's data depend on. */
function asked(route, keys = route.view.keys) {
  return new URLSearchParams([...route.state].filter(([key, value]) => keys.includes(key) && value));
}

function here() {
  const view = VIEWS.find(v => v.path.test(location.pathname)), state = new URLSearchParams(location.search);
  if (!view) return { path: location.pathname, state, view: null };
  const named = Object.entries(view.path.exec(location.pathname).groups || {});
  const parts = named.map(([key, text]) => [key, decodeURIComponent(text)]);
  return { path: location.pathname, state, view, ...Object.fromEntries(parts) };
}

/** The server's refusal; status 0: no answer. */
class Refused extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }
}

async function ask(path, query = "") {
  const silent = () => { throw new Refused(0, "The server does not answer."); };
  const reply = await fetch(`${path}${String(query) && "?"}${query}`).catch(silent);
  const body = await reply.json().catch(() => ({ error: "The server's answer cannot be read; its terminal may say why." }));
  if (!reply.ok) throw new Refused(reply.status, body.error);
  return body;
}

const MOST = 24; // the most runs that the server compares at once

async function loadCompare(route) {
  const { runs: all } = await ask("/api/runs"), readable = all.filter(run => !run.error).map(run => run.id);
  const wanted = route.state.get("runs")?.split(",") || readable, known = readable.filter(id => wanted.includes(id));
  const left = wanted.filter(id => id !== "none" && !readable.includes(id)).map(id => `${id} is not here, or cannot be read.`);
  if (known.length > MOST) left.push(`${known.length} runs are too many at once: the newest ${MOST} are shown.`);
  if (!known.length) return { all, readable, left, runs: [], metrics: [] };
  const query = new URLSearchParams([...asked(route, ["metric"]), ["runs", known.slice(0, MOST).join(",")]]);
  return { ...await ask("/api/compare", query), all, readable, left };
}

// ------------------------------------------------------------------------------------------- going about, and staying live

const main = document.getElementById("main");
let route = null, data = null, loading = false, again = false, last = 0, version = null, polling = null, timer = null;

/** Show the current data as the address's query says. */
function render() {
  document.title = [route.view.name, route.id, "fedgauge"].filter(Boolean).join(" · ");
  const kind = LIVE.has(data.state) ? "view moving" : "view";
  show(main, el("div", { "data-key": route.path, class: kind }, route.view.draw(data, route)));
  show(document.getElementById("views"), tabs());
}

function tabs() {
  const tab = (name, href) => el("a", { href, "data-key": name, "aria-current": route.view.name === name && "page" }, name);
  const own = route.id ? TABS.map(([name, rest]) => tab(name, address(route.id, rest))) : [tab("Runs", "/")];
  return [own, tab("Compare", "/compare")];
}

/** Ask for the view's data and show them. One question at a time; the newest address comes next. */
async function load() {
  clearTimeout(timer);
  timer = null;
  if (loading) {
    again = true;
    return;
  }
  const asked = route;
  loading = true;
  again = false;
  try {
    if (!route.view) throw new Refused(404, `There is no page at ${route.path}.`);
    const now = await versionNow(), found = await route.view.load(route);
    if (asked !== route) return;
    version = now;
    take(found);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    if (asked === route) refuse(error);
  } finally {
    loading = false;
    last = Date.now();
    if (again) load();
  }
}

function take(found) {
  data = found;
  render();
  restoreScroll();
  showStatus(statusOf(data));
  follow();
}

/** After a change of address: scroll to where the reader was, or to the top. */
function restoreScroll() {
  if (route.scroll === null) return;
  scrollTo(0, route.scroll);
  if (route.moved) main.focus({ preventScroll: true });
  route.scroll = null;
}

const REFUSALS = {
  0: ["No answer", "Is fedgauge watch still running? Trying again."],
  401: ["Not allowed", "Open the address that fedgauge watch printed: it ends with ?token=…"],
  404: ["Not found", "It may have been deleted or moved; the list shows what is there."],
  503: ["Not readable", "This page tries again when the file changes."],
};

/** Show the reason and the remedy; if only the server is silent, the page stays. */
function refuse({ status, message }) {
  const [title, help] = REFUSALS[status] || ["Not possible", "The list shows what is there."];
  if (status) data = null;
  const list = status !== 401 && el("p", link("/", "All runs"));
  if (!data) show(main, el("div.view", { "data-key": "refused" }, el("h1", title), el("p", message), el("p", help), list));
  if (!status) setTimeout(refresh, 2000);
  if (status === 503) follow();
  showStatus(status ? "stopped" : "lost", status ? title.toLowerCase() : undefined);
}

/** Load again, at most once a second. */
function refresh() {
  timer ??= setTimeout(load, Math.max(0, last + 1000 - Date.now()));
}

/** The status of the shown run, or of all runs in the folder. */
function statusOf(found) {
  const all = found.state ? [found.state] : (found.all || found.runs).filter(run => !run.error).map(run => run.state);
  return all.some(state => LIVE.has(state)) ? "live" : all.every(state => state === "complete") ? "finished" : "stopped";
}

const WORDS = { live: "live", finished: "finished", stopped: "not running", lost: "connection lost, trying again" };

/** Show a status next to the dot. */
function showStatus(state, words = WORDS[state]) {
  const live = document.getElementById("live");
  live.dataset.state = state;
  live.querySelector(".words").textContent = words;
}

/** The version of this run's files, or of all runs'. */
async function versionNow() {
  return (await ask("/api/version", new URLSearchParams(route.id ? [["run", route.id]] : []))).version;
}

/** Follow the changes of this run, or of all runs: ask for the version once a second. */
function follow() {
  clearTimeout(polling);
  polling = setTimeout(poll, 1000, route);
}

async function poll(asked) {
  if (asked !== route) return;
  try {
    if (await versionNow() !== version) refresh();
    else follow();
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    if (asked === route) refuse(error);
  }
}

/** Change the address's query; ask the server again if the data depend on it. */
function change(values) {
  assign(route.state, values);
  const query = route.state.toString();
  history.replaceState(history.state, "", query ? `?${query}` : location.pathname);
  if (Object.keys(values).some(key => route.view.keys.includes(key))) load();
  else render();
}

function go(href) {
  history.replaceState({ scroll: scrollY }, "");
  history.pushState(null, "", href);
  arrive(0, true);
}

function arrive(scroll, moved) {
  route = { ...here(), scroll, moved };
  load();
}

document.addEventListener("click", event => {
  const link = event.target.closest?.("a[href^='/']");
  if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  go(link.getAttribute("href"));
});
window.addEventListener("popstate", event => arrive(event.state?.scroll || 0, true));
document.getElementById("plotly").addEventListener("load", redraw);
narrow.addEventListener("change", () => data && render());
history.scrollRestoration = "manual";
arrive(0, false);
