"use strict";
// Several runs side by side: accuracy against leakage, run by attack, curves, and how the scenarios differ.

/** Sections that compare runs; named(run): how a run's name is shown. */
function sideBySide(compare, state, change, named) {
  return [
    section("Utility against leakage", utilityFigure(compare)),
    section("Run by attack", matrix(compare, named)),
    section("All numbers", compareTable(compare, state, change, named)),
    section("Over rounds", curvesFigure(compare)),
    compare.runs.length > 1 && section("How the scenarios differ", differences(compare)),
  ];
}

/** Mean leakage of each attack on each run; the tint goes from the run's best baseline to what leaks as much as can be seen. */
function matrix({ matrix: m, metric, runs }, named) {
  const { label, ceiling, higher_is_better: higher } = metric;
  const from = floor => floor ?? (higher ? 0 : Math.max(...m.mean.flat().filter(v => v !== null)));
  const part = (v, floor) => ceiling === floor ? 1 : (v - floor) / (ceiling - floor);
  const tint = (v, floor) => Math.round(100 * Math.min(1, Math.max(0, part(v, from(floor)))));
  const cell = (v, floor) => v === null ? el("td", NONE)
    : el("td.tint", { vars: { "--tint": `${tint(v, floor)}%` } }, inMetric(metric, v));
  const head = words => el("th", { scope: "col" }, breakable(words));
  const price = r => [
    ...[r.limit, r.bound, r.gap].map(v => el("td", inDecibel(v))), el("td", percent(r.accuracy)), el("td", decimal(r.epsilon)),
  ];
  const limits = ["Gaussian estimate (dB of the mean error)", "bound (dB of the mean error)", "gap (dB)"];
  const prices = ["best baseline", ...limits, "test accuracy", "epsilon"].map(head);
  const heads = [el("th.text", { scope: "col" }, "run"), m.columns.map(head), prices];
  const name = run => el("th.text", { scope: "row" }, named(run));
  const line = (run, i) => el("tr", { "data-key": run }, name(run),
    m.mean[i].map(v => cell(v, m.baseline[i])), cell(m.baseline[i], m.baseline[i]), price(runs[i]));
  return grid(`Mean ${label}, run by attack; darker leaks more beyond the run's best baseline, – means no value`, heads, m.rows.map(line));
}

function compareTable(compare, state, change, named) {
  const { mean, interval, worst } = leakageColumns(compare.metric);
  const columns = [
    { key: "run", head: "run", text: true, value: r => r.run, cell: r => [named(r.run), el("span.small.detail", r.chain)] },
    { key: "attack", head: "attack", text: true, value: r => r.attack, cell: r => breakable(r.attack) },
    { key: "accuracy", head: "test accuracy", value: r => r.accuracy, cell: r => percent(r.accuracy) },
    mean, interval, worst, HITS, LABELS, EXAMPLES,
    {
      key: "epsilon", head: "epsilon", less: true, value: r => r.epsilon,
      cell: r => decimal(r.epsilon),
    },
  ];
  const caption = `Every attack on every run, ${compare.metric.label}`;
  const said = new Map(compare.table.map(r => [r.privacy, new Set()]));
  compare.table.forEach(r => said.get(r.privacy).add(r.run));
  const privacy = [...said].map(([words, runs]) => el("p.small", said.size > 1 && `${[...runs].join(", ")}: `, words));
  return [table({ id: "compare", caption, columns, rows: compare.table, key: r => `${r.run} ${r.attack}`, state, change }), privacy];
}

function differences({ differences: found, same, runs }) {
  if (!found.length) return el("p", `The scenarios do not differ: all ${same} settings agree.`);
  const rows = found.map(d => [d.key, ...d.values]), heads = ["setting", ...runs.map(run => run.id)];
  return [list("Settings that differ", heads, rows), el("p.small", `${many(same, "other setting")} agree.`)];
}

/** Test accuracy against leakage: one colour and number per run, one symbol per attack, and a line along the Pareto front. */
function utilityFigure(compare) {
  const { runs } = compare, attacks = [...new Set(compare.points.map(p => p.attack))];
  const numbers = new Map(runs.map((r, i) => [r.id, i + 1]));
  const height = 400 + legendHeight(runs.length + attacks.length + 1 + fronts(compare).length);
  const drawing = node => {
    const colours = new Map(runs.map((r, i) => [r.id, colour(r.colour_index ?? i)]));
    const symbols = new Map(attacks.map((a, i) => [a, SYMBOLS[i % SYMBOLS.length]]));
    const key = { x: [null], y: [null], mode: "markers", hoverinfo: "skip" };
    const traces = [
      ...fronts(compare).filter((set, i, sets) => sets.length === 1 || set.points.length > 1).map(frontTrace),
      ...compare.points.map(p => pointTrace(p, compare, colours.get(p.run), symbols.get(p.attack), numbers.get(p.run))),
      ...runs.map(r => ({ ...key, name: `${numbers.get(r.id)}  ${plain(r.id)}`, marker: { color: colours.get(r.id), symbol: "square", size: 12 } })),
      ...attacks.map(a => ({
        ...key, name: plain(a), marker: { color: cssVariable("--ink"), symbol: `${symbols.get(a)}-open`, size: 10 },
      })),
    ];
    const x = {
      uirevision: compare.metric.name, title: { text: `${plain(compare.metric.label)}, mean`, standoff: 6 },
      ...(compare.metric.higher_is_better ? {} : { autorange: "reversed" }),
    };
    const y = { title: { text: "test accuracy" }, tickformat: ".0%", autorangeoptions: { clipmin: -.02, clipmax: 1.03 } };
    draw(node, traces, layout(x, y, height, { hovermode: "closest" }));
  };
  return figure("Test accuracy against leakage", utilityMeaning(compare), drawing, height);
}

/** The points of each data set's Pareto front in the order of leakage: of each run its strongest attack's. */
function fronts(compare) {
  const best = compare.points.filter(p => p.pareto).sort((a, b) => a.mean - b.mean), sets = [...new Set(best.map(p => p.data))];
  return sets.map(data => ({ name: sets.length > 1 ? `Pareto front, ${data}` : "Pareto front", points: best.filter(p => p.data === data) }));
}

function frontTrace({ name, points }) {
  return {
    x: points.map(p => p.mean), y: points.map(p => p.accuracy), mode: "lines", name: folded(name),
    line: { color: cssVariable("--muted"), dash: "dash", width: 1.5 }, hoverinfo: "skip",
  };
}

const epsilon = p => p.epsilon === null ? "no epsilon" : `epsilon ${decimal(p.epsilon)} for one record`;

function pointTrace(p, compare, color, symbol, number) {
  const band = p.low === null || p.high === null ? undefined : {
    type: "data", symmetric: false, array: [p.high - p.mean], arrayminus: [p.mean - p.low], color, thickness: 1.2,
  };
  const leakage = `${inMetric(compare.metric, p.mean)} (${interval(p, compare.metric) || "no interval"})`;
  const hover = `${plain(p.run)}, ${plain(p.attack)}<br>${leakage}<br>test accuracy ${percent(p.accuracy)}<br>${epsilon(p)}`;
  return {
    x: [p.mean], y: [p.accuracy], error_x: band, marker: { color, symbol, size: 11 }, showlegend: false,
    mode: p.strongest ? "markers+text" : "markers", text: [number], textposition: "top right",
    hovertemplate: `${hover}<extra></extra>`,
  };
}

function utilityMeaning(compare) {
  const sets = fronts(compare);
  if (!sets.length) return "No run has both a test accuracy and a score yet.";
  const better = "The top left is best: accurate, and little leaks. Each run's number is at its strongest attack.";
  const apart = sets.length > 1 ? " Only runs on the same data set are set against each other." : "";
  const of = sets.length > 1 ? "No other run on its data set" : "No other run";
  const names = sets.flatMap(set => set.points.map(p => p.run));
  return `${better}${apart} ${of} is both more accurate and leaks less than ${names.join(", ")}.`;
}

function curvesFigure(compare) {
  const attacks = [...new Set(compare.points.map(p => p.attack))];
  const colours = new Map(compare.runs.map((r, i) => [r.id, r.colour_index ?? i]));
  const alone = compare.runs.length > PALETTE.light.length; // more lines than colours: draw only each run's strongest attack
  const strongest = new Set(compare.points.filter(p => p.strongest).map(p => `${p.run} ${p.attack}`));
  const chosen = compare.curves.filter(c => !alone || strongest.has(`${c.run} ${c.attack}`));
  const curves = chosen.filter(c => c.mean.some(v => v !== null)), height = 340 + legendHeight(curves.length);
  const drawing = node => {
    const traces = curves.map(c => {
      const color = colour(colours.get(c.run)), symbol = SYMBOLS[attacks.indexOf(c.attack) % SYMBOLS.length];
      const hover = c.mean.map(v => inMetric(compare.metric, v));
      return {
        x: c.x, y: c.mean, name: `${plain(c.run)}, ${plain(c.attack)}`, customdata: hover, hovertemplate: "%{customdata}",
        mode: "lines+markers", line: { color, width: 2 }, marker: { color, symbol, size: 7 },
      };
    });
    const last = Math.max(1, ...curves.flatMap(c => c.x));
    const more = { hovermode: "x unified", legend: { ...legend(), entrywidth: 320 } };
    draw(node, traces, layout(roundAxis(last), { title: { text: plain(compare.metric.label) } }, height, more));
  };
  const which = alone ? " Only each run's strongest attack is drawn." : "";
  const meaning = `Means over the examples of a round. Colours are runs, symbols attacks, as above.${which}`;
  return figure("Leakage over rounds, run by run", meaning, drawing, height);
}
