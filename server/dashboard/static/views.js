"use strict";
// The live page's views: each turns the server's data into a tree.

// --------------------------------------------------------------------------------------------------------------- runs

const empty = (...words) => el("p.empty", words);
const link = (href, words) => el("a", { href }, words);

function runsView(folder, { state }) {
  const start = el("code", "fedgauge run simulations/quickstart.toml");
  const none = empty("There is no run in this folder yet. Start one with ", start, "; it appears here.");
  const one = run => el("li.run", { "data-key": run.id }, run.error ? brokenRun(run) : runLine(run));
  const shown = folder.runs.filter(run => matches(run, state));
  const count = el("p.small", { role: "status" }, `${shown.length} of ${many(folder.runs.length, "run")}.`);
  const all = [runFilter(state), count, el("ul.runs", shown.map(one))];
  return [el("h1", `Runs in ${folder.folder}/`), folder.runs.length ? all : none];
}

const trouble = run => run.error || run.failed > 0 || ["failed", "interrupted"].includes(run.state);

/** Check a run against the filter: words of its name, data, network, chain, attacks or state, and trouble. */
function matches(run, state) {
  const words = [run.id, run.state, run.data, run.model, run.chain, ...(run.attacks || []), run.error].join(" ").toLowerCase();
  const sought = (state.get("find") || "").toLowerCase().split(/\s+/);
  return sought.every(word => words.includes(word)) && (!state.has("trouble") || trouble(run));
}

function runFilter(state) {
  const seek = event => change({ find: event.target.value });
  const field = el("input", { type: "search", "aria-label": "Find", oninput: seek, value: state.get("find") || "" });
  return el("div.controls",
    el("label.choice", "Find", field),
    check("failed only", state.has("trouble"), () => change({ trouble: state.has("trouble") ? null : "1" })));
}

const brokenRun = run => [el("h2", run.id), el("p.notice", run.error)];

function runLine(run) {
  const fact = (name, value) => el("div", el("dt", name), el("dd", value));
  const views = ["gallery", "clients"].map(view => link(address(run.id, `/${view}`), view));
  const failed = run.failed > 0 && badge(`${many(run.failed, "attack")} failed`, "leaks");
  return [
    el("div.head", el("h2", link(address(run.id), run.id)), [badge(run.state, LIVE.has(run.state) ? "live" : ""), failed], views),
    el("p.small", `${run.data}; ${run.model}; ${run.chain}`),
    el("dl.numbers",
      fact("round", `${run.round} of ${run.rounds}`), fact(run.utility, percent(run.accuracy)),
      fact(`best ${run.measure.name}`, inMetric(run.measure, run.best)), fact("attacks", run.attacks.join(", ") || NONE)),
    progressBar(run, run.total),
  ];
}

const VERDICTS = { leaks: "leaks", "not shown to leak": "shown" };
const badge = (text, kind) => el("span", { class: `badge ${kind || ""}` }, text);

// ----------------------------------------------------------------------------------------------------------- overview

const opening = (title, text) => el("details", el("summary", title), el("pre", { tabindex: 0 }, text));

function overviewView(overview, { state }) {
  const notice = ({ words, command }) => el("li", words, command && [" ", el("code", command)]);
  const replay = overview.replay && [el("strong", overview.replay), `: ${overview.replay_words}`];
  const nothing = words => empty(overview.ungraded ? "Unknown: nothing has been graded." : words);
  const effects = Object.entries(overview.server_attacks).map(([name, words]) => [el("dt", name), el("dd", words)]);
  const shown = (spec, ...before) => spec.rows.length > 0 && [before, table(spec)];
  const numbers = table(overview.summary, { sorts: "summary", state, change });
  return [
    el("h1", overview.name), el("p.facts", overview.facts),
    el("div", { class: `verdict ${VERDICTS[overview.word] || ""}` }, overview.sentences.map(words => el("p", words))),
    worstCases(overview),
    el("ul.notices", overview.notices.map(notice)),
    progressStrip(overview.progress, overview.state),
    effects.length > 0 && section("The malicious server", el("dl", effects)),
    section("Leakage and accuracy over rounds", overRounds(overview, state, change), el("p.small", lines(overview)), el("p.small", overview.privacy.words)),
    section("Numbers", overview.summary.rows.length > 0 ? numbers : nothing("There are no scores yet; they will appear here."), shown(overview.reasons)),
    overview.kind === "image" && section("Success over thresholds", overview.success ? specified(overview.success) : nothing("It is drawn once an attack has a grade.")),
    section("Batch membership", overview.membership_figure && specified(overview.membership_figure), shown(overview.membership_table) || empty("It was not tested.")),
    overview.canaries && section("What canaries show", el("p", overview.canaries)),
    section("What each attacker knew", knowledge(overview)),
    section("Participation", el("p", overview.participation || "No client has answered yet."), shown(overview.clients)),
    section("Replay check", el("p", replay || "Not done yet: it runs before the first attack.")),
    section("Scenario and environment",
      overview.attacked_on !== "" && el("p.small", overview.attacked_on),
      opening("Scenario", overview.scenario), overview.environment && opening("Environment", JSON.stringify(overview.environment, null, 2))),
  ];
}

/** The best-reconstructed private examples, with a way to all of them. */
function worstCases({ worst, kind, name, measure }) {
  const all = link(address(name, "/gallery?round=all"), "All in the gallery");
  return bestBack(worst, kind, measure.private, all);
}

const lines = ({ measure: { name, unit, cap } }) => "Solid: means over examples with their 95 % band (clustered by client). "
  + "Dotted: the worst case for a client. "
  + `Grey: guesses that do not read the update. ${cap === null ? "" : `${name} above ${cap} ${unit} is drawn at ${cap}. `}`
  + "For MSE, a limit is drawn if the density of the chain's noise is known.";

function progressBar({ done, failed }, all) {
  return el("progress", { max: Math.max(1, all), value: done + failed, "aria-label": "jobs done" });
}

/** Progress of training and attacks, in a strip of constant height. */
function progressStrip(progress, state) {
  const model = ` · round ${progress.round} of ${progress.rounds}` + (progress.accuracy === null ? "" : ` · ${progress.utility} ${percent(progress.accuracy)}`);
  return el("div.strip", { role: "group", "aria-label": "Progress" },
    el("p", el("b", state), model), progressBar(progress, progress.expected), el("p.small", progress.words));
}

function knowledge({ cards: all, measure }) {
  if (!all.length) return empty("No attack is planned.");
  const part = words => el("li", words);
  const how = attacker => el("p.small", el("code", attacker.component), `; attacker's seed ${attacker.seed}`);
  const one = attacker => el("li.card", el("h3", attacker.name), how(attacker), el("ul.parts", attacker.parts.map(part)));
  const others = all.filter(attacker => attacker.kind !== "attack").map(attacker => `${attacker.name} (${attacker.parts.join(", ")}); `);
  const wrong = `wrong_client(ATTACK), which grades each reconstruction against another client's ${measure.private}s.`;
  return [
    el("ul.cards.attackers", all.filter(attacker => attacker.kind === "attack").map(one)),
    el("p.small", "Limits and baselines, which do not read the update they are graded against: ", others, wrong),
  ];
}

// ------------------------------------------------------------------------------------------------------------ gallery

function galleryView(found, { id, state }) {
  const title = [el("h1", `Private ${found.noun}s and their reconstructions`), el("p.facts", id), el("h2.hidden", "Examples")];
  return [title, gallery(found, state, change)];
}

// ------------------------------------------------------------------------------------------------------------ clients

function clientsView(clients, { id, state }) {
  const cells = { client: record => link(address(id, `/gallery?client=${record.client}&round=all`), `client ${record.client}`) };
  return [
    el("h1", "Who leaks most"), el("p.facts", id),
    table(clients, { sorts: "clients", state, change, cells }),
  ];
}

// ------------------------------------------------------------------------------------------------------------ compare

function compareView(compared, { state }) {
  const metric = compared.metrics.length > 0 && choice("Leakage as", compared.metric, compared.metrics, value => change({ metric: value }));
  const left = compared.left.map(words => el("p.notice", words));
  const title = [el("h1", "Compare runs"), el("div.controls", metric, runPicker(compared)), left];
  const none = empty("None of these runs has a score yet: choose others, or wait: scores will appear here.");
  if (!compared.points?.rows.length) return [title, none];
  return [title, ...sideBySide(compared, state, change, { run: record => link(address(record.run), record.run) })];
}

function runPicker({ runs, readable }) {
  const chosen = new Set(runs);
  const toggle = id => change({ runs: readable.filter(other => chosen.has(other) !== (other === id)).join(",") || "none" });
  return el("fieldset.switches", el("legend", "Runs"), readable.map(id => check(id, chosen.has(id), () => toggle(id))));
}
