"use strict";
// Several runs side by side: accuracy against leakage, run by attack, curves, and how the scenarios differ.

/** Sections that compare runs; named(run): how a run's name is shown. */
function sideBySide(compare, state, change, named) {
  return [
    section("Utility against leakage", drawnOr(compare.utility, "No run has both a test accuracy and a score yet.")),
    section("Run by attack", matrix(compare, named)),
    section("All numbers", compareTable(compare, state, change, named)),
    section("Over rounds", drawnOr(compare.rounds, "No attack has given a score yet.")),
    compare.runs.length > 1 && section("How the scenarios differ", differences(compare)),
  ];
}

const drawnOr = (spec, words) => spec ? specified(spec) : el("p.empty", words);

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
  const said = new Map(compare.points.map(r => [r.privacy, new Set()]));
  compare.points.forEach(r => said.get(r.privacy).add(r.run));
  const privacy = [...said].map(([words, runs]) => el("p.small", said.size > 1 && `${[...runs].join(", ")}: `, words));
  return [table({ id: "compare", caption, columns, rows: compare.points, key: r => `${r.run} ${r.attack}`, state, change }), privacy];
}

function differences({ differences: found, same, runs }) {
  if (!found.length) return el("p", `The scenarios do not differ: all ${same} settings agree.`);
  const rows = found.map(d => [d.key, ...d.values]), heads = ["setting", ...runs.map(run => run.id)];
  return [list("Settings that differ", heads, rows), el("p.small", `${many(same, "other setting")} agree.`)];
}
