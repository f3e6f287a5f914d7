"use strict";
// The live page: an address names a view, a view asks the server for its data and says what it shows; when the ledger has changed,
// the same is done again and patched into the page.

// ---------------------------------------------------------------------------------------------------------- the views
// load(place) asks the server, draw(data, place) gives the tree; keys: of the address's query, those that the server must be asked
// about again. A place is where one is: {path, view, id, image, state}.

const VIEWS = [
  { path: /^\/$/, name: "Runs", keys: [], load: () => ask("/api/runs"), draw: runsView },
  { path: /^\/run\/(?<id>[^/]+)$/, name: "Overview", keys: [], load: p => ask(`${api(p)}/overview`), draw: overviewView },
  {
    path: /^\/run\/(?<id>[^/]+)\/gallery$/, name: "Gallery", keys: ["round", "client", "attack", "label", "sort", "offset"],
    load: p => ask(`${api(p)}/gallery`, asked(p)), draw: galleryView,
  },
  {
    path: /^\/run\/(?<id>[^/]+)\/clients$/, name: "Clients", keys: ["metric", "attack", "client"], load: loadClients,
    draw: clientsView,
  },
  {
    path: /^\/run\/(?<id>[^/]+)\/image\/(?<image>\d+)$/, name: "Image", keys: ["client", "round", "example", "attack"],
    load: loadImage, draw: imageView,
  },
  { path: /^\/compare$/, name: "Compare", keys: ["runs", "metric"], load: loadCompare, draw: compareView },
];
const TABS = [["Overview", ""], ["Gallery", "/gallery"], ["Clients", "/clients"]];
const LIVE = new Set(["training", "attacking"]);

const address = (id, rest = "") => `/run/${encodeURIComponent(id)}${rest}`;
const api = place => `/api/runs/${encodeURIComponent(place.id)}`;

/** The part of the address's query that the view's data depends on. */
function asked(place, keys = place.view.keys) {
  return new URLSearchParams([...place.state].filter(([key, value]) => keys.includes(key) && value));
}

function here() {
  const view = VIEWS.find(v => v.path.test(location.pathname)), state = new URLSearchParams(location.search);
  if (!view) return { path: location.pathname, state, view: null };
  const named = Object.entries(view.path.exec(location.pathname).groups || {});
  const parts = named.map(([key, text]) => [key, decodeURIComponent(text)]);
  return { path: location.pathname, state, view, ...Object.fromEntries(parts) };
}

/** The server's refusal; status 0: it does not answer. */
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

async function loadClients(place) {
  const client = place.state.get("client");
  const all = await ask(`${api(place)}/clients`, asked(place, ["metric", "attack"]));
  return { ...all, opened: client && await ask(`${api(place)}/clients/${client}`) };
}

async function loadImage(place) {
  const found = await ask(`${api(place)}/image/${place.image}`, asked(place, ["client"]));
  return { ...found, trace: place.state.get("attack") && await ask(`${api(place)}/trace`, asked(place)) };
}

const MOST = 24; // runs that the server compares at once

async function loadCompare(place) {
  const { runs: all } = await ask("/api/runs"), readable = all.filter(run => !run.error).map(run => run.id);
  const wanted = place.state.get("runs")?.split(",") || readable, known = readable.filter(id => wanted.includes(id));
  const left = wanted.filter(id => id !== "none" && !readable.includes(id)).map(id => `${id} is not here, or cannot be read.`);
  if (known.length > MOST) left.push(`${known.length} runs are too many at once: the newest ${MOST} are shown.`);
  if (!known.length) return { all, readable, left, runs: [], points: [], metrics: [] };
  const query = new URLSearchParams([...asked(place, ["metric"]), ["runs", known.slice(0, MOST).join(",")]]);
  const compare = await ask("/api/compare", query);
  const runs = compare.runs.map(run => ({ ...run, colour_index: readable.indexOf(run.id) })); // whichever others are chosen
  return { ...compare, all, readable, left, runs };
}

// ------------------------------------------------------------------------------------------- going about, and staying live

const main = document.getElementById("main");
let place = null, data = null, loading = false, again = false, last = 0, events = null, timer = null;

/** Show the data that one has, as the address's query says. */
function render() {
  document.title = [place.view.name, place.id, "fedgauge"].filter(Boolean).join(" · ");
  const look = LIVE.has(data.state) ? "view moving" : "view";
  show(main, el("div", { "data-key": place.path, class: look }, place.view.draw(data, place)));
  show(document.getElementById("views"), tabs());
}

function tabs() {
  const tab = (name, href) => el("a", { href, "data-key": name, "aria-current": place.view.name === name && "page" }, name);
  const own = place.id ? TABS.map(([name, rest]) => tab(name, address(place.id, rest))) : [tab("Runs", "/")];
  return [own, tab("Compare", "/compare")];
}

/** Ask for the view's data and show them. One question at a time: the newest address is asked about next. */
async function load() {
  clearTimeout(timer);
  timer = null;
  if (loading) {
    again = true;
    return;
  }
  const asked = place;
  loading = true;
  again = false;
  try {
    if (!place.view) throw new Refused(404, `There is no page at ${place.path}.`);
    const found = await place.view.load(place);
    if (asked === place) take(found);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    if (asked === place) refuse(error);
  } finally {
    loading = false;
    last = Date.now();
    if (again) load();
  }
}

function take(found) {
  data = found;
  render();
  settle();
  tell(standing(data));
  follow();
}

/** Once one has arrived somewhere: to where one was, or to the top. */
function settle() {
  if (place.scroll === null) return;
  scrollTo(0, place.scroll);
  if (place.moved) main.focus({ preventScroll: true });
  place.scroll = null;
}

const REFUSALS = {
  0: ["No answer", "Is fedgauge watch still running? Trying again."],
  401: ["Not allowed", "Open the address that fedgauge watch printed: it ends with ?token=…"],
  404: ["Not found", "It may have been deleted or moved; the list shows what is there."],
  503: ["Not readable", "This page looks again when the file changes."],
};

/** Say why there is nothing, and what to do; where only the server is silent, what is shown stays. */
function refuse({ status, message }) {
  const [title, help] = REFUSALS[status] || ["Not possible", "The list shows what is there."];
  if (status) data = null;
  const list = status !== 401 && el("p", link("/", "All runs"));
  if (!data) show(main, el("div.view", { "data-key": "refused" }, el("h1", title), el("p", message), el("p", help), list));
  if (!status) setTimeout(refresh, 2000);
  if (status === 503) follow();
  tell(status ? "stopped" : "lost", status ? title.toLowerCase() : undefined);
}

/** Load again, at most once a second. */
function refresh() {
  timer ??= setTimeout(load, Math.max(0, last + 1000 - Date.now()));
}

/** How what is shown stands: a run, or those of the folder. */
function standing(found) {
  const all = found.state ? [found.state] : (found.all || found.runs).filter(run => !run.error).map(run => run.state);
  return all.some(state => LIVE.has(state)) ? "live" : all.every(state => state === "complete") ? "finished" : "stopped";
}

const WORDS = { live: "live", finished: "finished", stopped: "not running", lost: "connection lost, trying again" };

/** The dot and its words. */
function tell(state, words = WORDS[state]) {
  const live = document.getElementById("live");
  live.dataset.state = state;
  live.querySelector(".words").textContent = words;
}

/** Follow the changes of this run, or of all; the browser takes up a broken stream by itself, where the server had it. */
function follow() {
  const path = place.id ? `/api/events?run=${encodeURIComponent(place.id)}` : "/api/events";
  if (events?.path === path) return;
  events?.close();
  const stream = events = Object.assign(new EventSource(path), { path });
  stream.addEventListener("change", event => {
    if (JSON.parse(event.data).version !== data?.version) refresh();
  });
  stream.addEventListener("gone", () => {
    stream.close();
    refresh();
  });
  stream.onopen = () => {
    if (stream.failed) refresh(); // what has changed in between
    stream.failed = false;
  };
  stream.onerror = () => {
    stream.failed = true;
    tell("lost");
    if (stream.readyState === EventSource.CLOSED && events === stream) setTimeout(retry, 3000, stream);
  };
}

/** A stream that the server refused is given up by the browser. */
function retry(stream) {
  if (events !== stream) return;
  events = null;
  refresh();
}

/** Change the address's query; the server is asked again where the data depend on it. */
function change(values) {
  assign(place.state, values);
  const query = place.state.toString();
  history.replaceState(history.state, "", query ? `?${query}` : location.pathname);
  if (Object.keys(values).some(key => place.view.keys.includes(key))) load();
  else render();
}

function go(href) {
  history.replaceState({ scroll: scrollY }, "");
  history.pushState(null, "", href);
  arrive(0, true);
}

function arrive(scroll, moved) {
  place = { ...here(), scroll, moved };
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
history.scrollRestoration = "manual";
arrive(0, false);

// --------------------------------------------------------------------------------------------------------------- runs

const empty = (...words) => el("p.empty", words);
const link = (href, words) => el("a", { href }, words);

function runsView(folder) {
  const start = el("code", "fedgauge run simulations/quickstart.toml");
  const none = empty("There is no run in this folder yet. Start one with ", start, "; it appears here.");
  const one = run => el("li.run", { "data-key": run.id }, run.error ? brokenRun(run) : runLine(run));
  return [el("h1", `Runs in ${folder.folder}`), folder.runs.length ? el("ul.runs", folder.runs.map(one)) : none];
}

const brokenRun = run => [el("h2", run.id), el("p.notice", run.error)];

function runLine(run) {
  const fact = (name, value) => el("div", el("dt", name), el("dd", value));
  const views = ["gallery", "clients"].map(view => link(address(run.id, `/${view}`), view));
  const badges = [badge(run.state, LIVE.has(run.state) ? "live" : "")];
  return [
    el("div.head", el("h2", link(address(run.id), run.id)), badges, views),
    el("p.small", `${run.data}; ${run.model}; ${run.chain}`),
    el("dl.numbers",
      fact("round", `${run.round} of ${run.rounds}`), fact("accuracy", percent(run.accuracy)),
      fact(`best ${run.measure === "psnr" ? "PSNR" : "ROUGE-1"}`, run.exact ? "∞" : inMetric(run.measure, run.best)), fact("attacks", run.attacks.join(", ") || NONE)),
    progressBar(run.progress, run.progress.total),
  ];
}

const VERDICTS = { leaks: "leaks", "not shown to leak": "shown" };
const badge = (words, look) => el("span", { class: `badge ${look || ""}` }, words);

// ----------------------------------------------------------------------------------------------------------- overview

const opening = (title, text) => el("details", el("summary", title), el("pre", { tabindex: 0 }, text));

function overviewView(o, { state }) {
  const notice = ({ words, command }) => el("li", words, command && [" ", el("code", command)]);
  const replay = o.replay.verdict && [el("strong", o.replay.verdict), `: ${o.replay.words}`];
  const numbers = o.summary.length > 0 && summaryTable(o.summary, state, change, o.measure);
  return [
    el("h1", o.name), el("p.facts", o.facts),
    el("p", { class: `verdict ${VERDICTS[o.verdict.word] || ""}` }, o.verdict.sentence),
    el("ul.notices", o.notices.map(notice)),
    progressStrip(o),
    o.misdeeds.length > 0 && section("The malicious server", misdeeds(o.misdeeds)),
    section("Leakage and accuracy over rounds", overRounds(o, state, change), el("p.small", lines(o)), el("p.small", o.privacy.words)),
    section("Numbers", numbers || empty("No attack has given a score yet; they appear here by themselves.")),
    section("Success over thresholds", o.success.length ? successFigure(o) : empty(noScore(o.ungraded))),
    section("What each attacker knew", knowledge(o.knowledge)),
    section("Participation", participation(o.participation)),
    section("Replay check", el("p", replay || "Not done yet: it is done before the first attack.")),
    section("Scenario and environment",
      opening("Scenario", o.scenario), o.environment && opening("Environment", JSON.stringify(o.environment, null, 2))),
  ];
}

const misdeeds = all => el("dl", all.map(({ name, words }) => [el("dt", name), el("dd", words)]));

const lines = ({ cap, limit }) => "Solid: means over examples with their 95 % band (clustered by client). "
  + "Dotted: the worst case for a client. "
  + `Grey: guesses that do not read the update. PSNR above ${cap} dB is drawn at ${cap}. ${LIMITS[limit.state]}`;

function progressBar({ done, failed }, all) {
  return el("progress", { max: Math.max(1, all), value: done + failed, "aria-label": "attacks done" });
}

/** How training and attacks stand, in a strip that keeps its height. */
function progressStrip({ training, progress, state }) {
  const { queued, leased, done, failed, expected, per_minute, seconds_left, workers } = progress;
  const waiting = [failed && `${failed} failed`, leased && `${leased} being done`, queued && `${queued} waiting`];
  const rate = per_minute && `${per_minute.toFixed(0)} attacks a minute`;
  const left = seconds_left !== null && `about ${duration(seconds_left)} left`;
  const pace = LIVE.has(state) ? [many(workers, "worker"), rate, left] : [];
  const jobs = [`${done} of ${expected} attacks done`, ...waiting, ...pace].filter(Boolean).join(" · ");
  const model = ` · round ${training.round} of ${training.rounds} · accuracy ${percent(training.accuracy)}`;
  return el("div.strip", { role: "group", "aria-label": "Progress" },
    el("p", el("b", state), model), progressBar(progress, expected), el("p.small", jobs));
}

function knowledge({ shared, cards: all }) {
  if (!all.length) return empty("No attack is planned.");
  const part = words => el("li", { class: shared.includes(words) ? "" : "own" }, words);
  const how = card => el("p.small", el("code", card.component), `; attacker's seed ${card.seed}`);
  const one = card => el("li.card", el("h3", card.name), how(card), el("ul.parts", card.parts.map(part)));
  const others = all.filter(card => card.kind !== "attack").map(card => `${card.name} (${card.parts.join(", ")}); `);
  const wrong = "wrong_client(ATTACK), which grades each reconstruction against another client's images.";
  return [
    el("ul.cards.attackers", all.filter(card => card.kind === "attack").map(one)),
    el("p.small", "Limits and baselines, which do not read the update they are graded against: ", others, wrong),
  ];
}

function participation({ accepted, rejected, missing, reasons }) {
  const words = `${many(accepted, "update")} accepted, ${rejected} rejected, ${missing} missing.`;
  const rows = reasons.map(r => [r.status, String(r.count), r.reason || "no reason given"]);
  return [
    el("p", accepted + rejected + missing ? words : "No client has answered yet."),
    rows.length > 0 && list("Why replies were not accepted", ["status", "times", "reason"], rows),
  ];
}

// ------------------------------------------------------------------------------------------------- gallery and images

const imageAddress = id => card => card.image !== null && address(id, `/image/${card.image}?client=${card.client}`);

function galleryView(found, { id, state }) {
  const opens = found.kind === "image" ? imageAddress(id) : null;
  const title = [el("h1", `Private ${found.kind}s and their reconstructions`), el("p.facts", id), el("h2.hidden", "Examples")];
  return [title, gallery(found, state, change, opens)];
}

function imageView(found, { id, state }) {
  const { image, client, label, rounds, others, total_others: total } = found;
  const attacks = [...new Set(rounds.flatMap(card => card.tiles.map(tile => tile.attack)))];
  const all = link(address(id, `/gallery?client=${client}&round=all`), "All images of this client");
  const part = others.length < total && el("p.small", `${others.length} of ${total} rounds, one example of each.`);
  const elsewhere = others.length > 0 && [cards(others, "image", imageAddress(id)), part];
  return [
    el("h1", `Image ${image} of client ${client}`),
    el("p.facts", id, label !== null && `; label ${label}`, `; trained on in ${many(rounds.length, "attacked round")}. `, all),
    section("Through all rounds",
      el("p.meaning", "The same private image each time it was trained on, in time order. PSNR below each: higher leaks more."),
      attacks.map(attack => imageStrip(found, attack, state))),
    found.trace && section("How the attack came there", tracePanel(found.trace, state)),
    section(`Client ${client} in other rounds`, elsewhere || empty("This client was attacked in no other round.")),
  ];
}

const film = (name, ...pictures) => el("ol.film", { tabindex: 0, role: "region", "aria-label": name }, pictures);

/** Truth, then one attack's image of it in each round. */
function imageStrip({ truth, rounds }, attack, state) {
  const steps = rounds.flatMap(card => card.tiles.filter(tile => tile.attack === attack).map(tile => [card, tile]));
  const words = (card, tile) => el("p", `round ${card.round}`, el("br"), el("b", tile.note), el("br"), tile.label);
  const one = ([card, tile]) => el("li", { "data-key": cardKey(card) },
    picture(tile.image, `reconstruction in round ${card.round}`), words(card, tile), tile.trace && traceButton(card, attack, state));
  const first = el("li", picture(truth, "the private image", "no truth here"), el("p", el("b", "truth")));
  return el("div", { "data-key": attack }, el("h3", attack), film(`${attack} through all rounds`, first, steps.map(one)));
}

function traceButton(card, attack, state) {
  const wanted = { round: String(card.round), example: String(card.example), attack };
  const open = Object.entries(wanted).every(([key, value]) => state.get(key) === value);
  const press = () => change(open ? { round: null, example: null, attack: null, step: null } : { ...wanted, step: null });
  return el("button", { type: "button", "aria-pressed": String(open), onclick: press }, "iterations");
}

function tracePanel({ truth, iterations, images, ...trace }, state) {
  const attack = state.get("attack"), end = iterations.length - 1, step = Math.min(end, Number(state.get("step") ?? end));
  const frame = (image, i) => el("li", { class: i === step ? "chosen" : "" },
    picture(image, `after iteration ${iterations[i]}`), el("p", String(iterations[i])));
  const pictures = [picture(truth, "the private image", "no truth here"), picture(images[step], "the attack's image")];
  return [
    el("h3", `${attack}, round ${state.get("round")}`),
    slider("Iteration", step, iterations.length, i => `iteration ${iterations[i]}`, i => change({ step: String(i) })),
    el("div.tiles.trace", pictures, truth && difference(truth, images[step])),
    el("p.meaning", "Truth, the attack's image after ", el("b", `${iterations[step]} iterations`), ", and their difference."),
    traceFigure({ iterations, ...trace }, attack, step),
    film("Images over the iterations", images.map(frame)),
  ];
}

// ------------------------------------------------------------------------------------------------------------ clients

function clientsView(clients, { id, state }) {
  const open = client => change({ client: String(client) === state.get("client") ? null : client });
  const metrics = clients.metrics.map(m => [m.name, m.label]);
  const attacks = [["", "the worst of all"], ...clients.attacks.map(a => [a, a])];
  const controls = el("div.controls",
    choice("Leakage as", clients.metric, metrics, value => change({ metric: value })),
    choice("Attack", clients.attack, attacks, value => change({ attack: value })));
  const none = empty("No attack has given a score yet: the map of clients and rounds appears here by itself.");
  return [
    el("h1", "Who leaks most"), el("p.facts", id), clients.rounds.length ? [controls, heatFigure(clients, open)] : none,
    clientsTable(clients, state, open), clients.opened && openedClient(clients.opened, clients.attacks),
  ];
}

function clientsTable(clients, state, open) {
  const isOpen = r => String(r.client) === state.get("client");
  const pressed = r => ({ type: "button", "aria-expanded": String(isOpen(r)), onclick: () => open(r.client) });
  const button = r => el("button.link", pressed(r), `client ${r.client}`);
  const { mean, worst } = leakageColumns(clients.metric, clients.lower_is_worse);
  const count = key => ({ key, head: key, value: r => r[key], cell: r => String(r[key]) });
  const columns = [
    { key: "client", head: "client", text: true, value: r => r.client, cell: button },
    worst, mean, HITS, LABELS, EXAMPLES, count("accepted"), count("rejected"), count("missing"),
  ];
  const caption = `Clients, ${clients.label}`, mark = r => isOpen(r) ? "chosen" : "";
  return table({ id: "clients", caption, columns, rows: clients.table, key: r => r.client, mark, state, change });
}

function openedClient({ client, reasons, ...counts }, attacks) {
  const rows = reasons.map(r => [String(r.round), r.status, r.reason || "no reason given"]);
  const told = list(`Replies of client ${client} that were not accepted`, ["round", "status", "reason"], rows);
  const none = el("p.small", "No reply of this client was rejected or missing.");
  return section(`Client ${client}`, labelsFigure(counts, attacks), rows.length ? told : none);
}

// ------------------------------------------------------------------------------------------------------------ compare

function compareView(compare, { state }) {
  const metrics = compare.metrics.map(m => [m.name, m.label]);
  const metric = metrics.length > 0 && choice("Leakage as", compare.metric, metrics, value => change({ metric: value }));
  const left = compare.left.map(words => el("p.notice", words));
  const title = [el("h1", "Compare runs"), el("div.controls", metric, runPicker(compare)), left];
  const none = empty("None of these runs has a score yet: choose others, or wait; scores appear here by themselves.");
  if (!compare.points.length) return [title, none];
  return [title, ...sideBySide(compare, state, change, run => link(address(run), run))];
}

function runPicker({ runs, readable }) {
  const chosen = new Set(runs.map(run => run.id));
  const toggle = id => change({ runs: readable.filter(other => chosen.has(other) !== (other === id)).join(",") || "none" });
  return el("fieldset.switches", el("legend", "Runs"), readable.map(id => check(id, chosen.has(id), () => toggle(id))));
}
