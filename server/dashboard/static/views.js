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
  const all = [runFilter(folder.runs, state), count, el("ul.runs", shown.map(one))];
  return [el("h1", `Runs in ${folder.folder}`), folder.runs.length ? all : none];
}

const trouble = run => run.error || run.progress.failed > 0 || ["failed", "interrupted"].includes(run.state);

/** Whether a run passes the filter: by words of its name, data, network, chain, attacks or state; by verdict; by trouble. */
function matches(run, state) {
  const words = [run.id, run.state, run.data, run.model, run.chain, ...(run.attacks || []), run.error].join(" ").toLowerCase();
  const sought = (state.get("find") || "").toLowerCase().split(/\s+/);
  const verdict = state.get("verdict");
  return sought.every(word => words.includes(word)) && (!verdict || run.verdict === verdict) && (!state.has("trouble") || trouble(run));
}

function runFilter(runs, state) {
  const found = [...new Set(runs.map(run => run.verdict).filter(Boolean))].sort();
  const seek = event => change({ find: event.target.value });
  const field = el("input", { type: "search", "aria-label": "Find", oninput: seek, value: state.get("find") || "" });
  return el("div.controls",
    el("label.choice", "Find", field),
    choice("Verdict", state.get("verdict") || "", [["", "all"], ...found.map(word => [word, word])], value => change({ verdict: value })),
    check("failed only", state.has("trouble"), () => change({ trouble: state.has("trouble") ? null : "1" })));
}

const brokenRun = run => [el("h2", run.id), el("p.notice", run.error)];

function runLine(run) {
  const fact = (name, value) => el("div", el("dt", name), el("dd", value));
  const views = ["gallery", "clients"].map(view => link(address(run.id, `/${view}`), view));
  const { failed } = run.progress, told = run.verdict ? badge(run.verdict, VERDICTS[run.verdict]) : badge("verdict being read");
  const badges = [told, badge(run.state, LIVE.has(run.state) ? "live" : ""), failed > 0 && badge(`${many(failed, "attack")} failed`, "leaks")];
  return [
    el("div.head", el("h2", link(address(run.id), run.id)), badges, views),
    el("p.small", `${run.data}; ${run.model}; ${run.chain}`),
    el("dl.numbers",
      fact("round", `${run.round} of ${run.rounds}`), fact("accuracy", percent(run.accuracy)),
      fact(`best ${run.measure.name}`, run.exact ? "∞" : inMetric(run.measure, run.best)), fact("attacks", run.attacks.join(", ") || NONE)),
    progressBar(run.progress, run.expected ?? run.progress.total),
  ];
}

const VERDICTS = { leaks: "leaks", "not shown to leak": "shown" };
const badge = (text, kind) => el("span", { class: `badge ${kind || ""}` }, text);

// ----------------------------------------------------------------------------------------------------------- overview

const opening = (title, text) => el("details", el("summary", title), el("pre", { tabindex: 0 }, text));

function overviewView(o, { state }) {
  const notice = ({ words, command }) => el("li", words, command && [" ", el("code", command)]);
  const replay = o.replay.verdict && [el("strong", o.replay.verdict), `: ${o.replay.words}`];
  const numbers = o.summary.some(row => row.n || (row.failed && !o.ungraded.table.rows.length)) && summaryTable(o.summary, state, change, o.measure);
  return [
    el("h1", o.name), el("p.facts", o.facts),
    el("div", { class: `verdict ${VERDICTS[o.verdict.word] || ""}` }, o.verdict.sentences.map(words => el("p", words))),
    worstCases(o),
    el("ul.notices", o.notices.map(notice)),
    progressStrip(o),
    o.server_attacks.length > 0 && section("The malicious server", serverAttacks(o.server_attacks)),
    section("Leakage and accuracy over rounds", overRounds(o, state, change), el("p.small", lines(o)), el("p.small", o.privacy.words)),
    o.ungraded.table.rows.length > 0 && section("Reconstructions without a truth", withoutTruth(o)),
    o.app_rounds.rows.length > 0 && section("What the app returned", printed(o.app_rounds)),
    (numbers || !o.ungraded.table.rows.length) && section("Numbers", numbers || empty("No attack has given a score yet; they appear here by themselves.")),
    section("Success over thresholds", o.figures.success ? specified(o.figures.success) : empty(o.ungraded.count ? "Unknown, as nothing is graded." : noScore(o.ungraded))),
    section("Who was in a batch", el("p", o.membership.words), o.membership.table.rows.length > 0 && [o.figures.membership && specified(o.figures.membership), printed(o.membership.table)]),
    o.canaries.table.rows.length > 0 && section("What canaries show", el("p", o.canaries.words), specified(o.figures.canaries), printed(o.canaries.table)),
    section("What each attacker knew", knowledge(o.knowledge)),
    section("Participation", participation(o.participation)),
    section("Replay check", el("p", replay || "Not done yet: it runs before the first attack.")),
    section("Scenario and environment",
      o.attacked_on !== "" && el("p.small", o.attacked_on),
      opening("Scenario", o.scenario), o.environment && opening("Environment", JSON.stringify(o.environment, null, 2))),
  ];
}

/** What came back though nobody can grade it. */
function withoutTruth({ name, ungraded }) {
  const words = " A lower objective fits the update better; it compares updates under one attack, never two attacks.";
  return [
    el("p", noScore(ungraded), " What came back is in the ", link(address(name, "/gallery"), "gallery"), ".", words),
    printed(ungraded.table),
  ];
}

/** The private examples that came back best, with a way to all of them. */
function worstCases({ worst, kind, name, measure }) {
  const all = link(address(name, "/gallery?round=all"), "All in the gallery");
  return bestBack(worst, kind, measure.private, all, kind === "image" ? imageAddress(name) : null);
}

const serverAttacks = all => el("dl", all.map(({ name, words }) => [el("dt", name), el("dd", words)]));

const lines = ({ limit, measure: { name, unit, cap } }) => "Solid: means over examples with their 95 % band (clustered by client). "
  + "Dotted: the worst case for a client. "
  + `Grey: guesses that do not read the update. ${cap === null ? "" : `${name} above ${cap} ${unit} is drawn at ${cap}. `}${limit.words}`;

function progressBar({ done, failed }, all) {
  return el("progress", { max: Math.max(1, all), value: done + failed, "aria-label": "attacks done" });
}

/** Progress of training and attacks, in a strip of constant height. */
function progressStrip({ training, progress, plan, state }) {
  const { queued, leased, expected, words, per_minute, seconds_left, workers, devices } = progress;
  const waiting = [leased && `${leased} running`, queued && `${queued} waiting`];
  const rate = per_minute && `${per_minute.toFixed(0)} attacks a minute`;
  const left = seconds_left !== null && `about ${duration(seconds_left)} left`;
  const pace = LIVE.has(state) ? [many(workers, "worker"), devices, rate, left] : [];
  const updates = plan.updates && `${plan.attacked} of ${plan.updates} planned updates attacked`;
  const jobs = [words, updates, ...waiting, ...pace].filter(Boolean).join(" · ");
  const model = ` · round ${training.round} of ${training.rounds}` + (training.accuracy === null ? "" : ` · accuracy ${percent(training.accuracy)}`);
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

function participation({ accepted, rejected, missing, reasons, clients }) {
  const words = `${many(accepted, "update")} accepted, ${rejected} rejected, ${missing} missing.`;
  const rows = reasons.map(r => [r.status, String(r.count), r.reason || "no reason given"]);
  const nodes = clients.map(c => [`client ${c.client}`, c.node || NONE, c.examples]);
  return [
    el("p", accepted + rejected + missing ? words : "No client has answered yet."),
    nodes.length > 0 && list("Clients, numbered as Flower's nodes came, not by partition", ["client", "Flower's node", "examples that it reported"], nodes),
    rows.length > 0 && list("Why replies were not accepted", ["status", "times", "reason"], rows),
  ];
}

// ------------------------------------------------------------------------------------------------- gallery and images

const imageAddress = id => card => card.image !== null && address(id, `/image/${card.image}?client=${card.client}`);

function galleryView(found, { id, state }) {
  const opens = found.kind === "image" ? imageAddress(id) : null;
  const title = [el("h1", `Private ${found.noun}s and their reconstructions`), el("p.facts", id), el("h2.hidden", "Examples")];
  return [title, gallery(found, state, change, opens)];
}

function imageView(found, { id, state }) {
  const { image, client, label, rounds } = found;
  const attacks = [...new Set(rounds.flatMap(card => card.tiles.map(tile => tile.attack)))];
  const all = link(address(id, `/gallery?client=${client}&round=all`), "All images of this client");
  return [
    el("h1", `Image ${image} of client ${client}`),
    el("p.facts", id, label !== null && `; ${found.label_name}`, `; trained on in ${many(rounds.length, "attacked round")}. `, all),
    section("Through all rounds",
      el("p.meaning", "The same private image each time it was trained on, in time order. PSNR below each: higher leaks more."),
      attacks.map(attack => imageStrip(found, attack, state))),
    found.trace && section("The attack's iterations", tracePanel(found.trace, state)),
  ];
}

const film = (name, ...pictures) => el("ol.film", { tabindex: 0, role: "region", "aria-label": name }, pictures);

/** The true image, then one attack's reconstruction of it in each round. */
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
    choice("Leakage as", clients.metric.name, metrics, value => change({ metric: value })),
    choice("Attack", clients.attack, attacks, value => change({ attack: value })));
  const none = empty(clients.ungraded ? "Unknown, as nothing is graded." : "No attack has given a score yet: the map of clients and rounds appears here by itself.");
  return [
    el("h1", "Who leaks most"), el("p.facts", id), clients.figure ? [controls, heatFigure(clients, open)] : none,
    clientsTable(clients, state, open), clients.opened && openedClient(clients.opened, clients.attacks),
  ];
}

function clientsTable(clients, state, open) {
  const isOpen = r => String(r.client) === state.get("client");
  const pressed = r => ({ type: "button", "aria-expanded": String(isOpen(r)), onclick: () => open(r.client) });
  const button = r => el("button.link", pressed(r), `client ${r.client}`);
  const { mean, worst } = leakageColumns(clients.metric);
  const count = key => ({ key, head: key, value: r => r[key], cell: r => String(r[key]) });
  const columns = [
    { key: "client", head: "client", text: true, value: r => r.client, cell: button },
    worst, mean, HITS, LABELS, EXAMPLES, count("accepted"), count("rejected"), count("missing"),
  ];
  const caption = `Clients, ${clients.metric.label}`, mark = r => isOpen(r) ? "chosen" : "";
  return table({ id: "clients", caption, columns, rows: clients.table, key: r => r.client, mark, state, change });
}

function openedClient({ client, reasons, ...counts }, attacks) {
  const rows = reasons.map(r => [String(r.round), r.status, r.reason || "no reason given"]);
  const replies = list(`Replies of client ${client} that were not accepted`, ["round", "status", "reason"], rows);
  const none = el("p.small", "No reply of this client was rejected or missing.");
  return section(`Client ${client}`, labelsFigure(counts, attacks), rows.length ? replies : none);
}

// ------------------------------------------------------------------------------------------------------------ compare

function compareView(compare, { state }) {
  const metrics = compare.metrics.map(m => [m.name, m.label]);
  const metric = metrics.length > 0 && choice("Leakage as", compare.metric.name, metrics, value => change({ metric: value }));
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
