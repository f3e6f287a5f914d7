"use strict";
// Several runs side by side: accuracy against leakage, numbers, curves, and how the scenarios differ.

/** Sections that compare runs; named(run): how a run's name is shown. */
function sideBySide(compare, state, change, named) {
  return [
    section("Utility against leakage", drawnOr(compare.utility, "No run has both a test accuracy and a score yet.")),
    section("All numbers", compareTable(compare, state, change, named), printed(compare.prices)),
    section("Over rounds", drawnOr(compare.rounds, "No attack has given a score yet.")),
    compare.runs.length > 1 && section("How the scenarios differ", printed(compare.differences)),
  ];
}

const drawnOr = (spec, words) => spec ? specified(spec) : el("p.empty", words);

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
