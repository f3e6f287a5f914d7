"use strict";
// The figures of one run that are more than a specification: switches.

// the switches' names for series that are not attacks
const GROUPS = { baseline: "baselines", limit: "limits", estimate: "estimates", worst: "worst cases" };

/** Leakage over rounds with its controls; state holds the metric and what is hidden. */
function overRounds(overview, state, change) {
  const rounds = overview.over_rounds, spec = rounds.find(figure => figure.metric === state.get("metric")) || rounds[0], hidden = new Set(state.getAll("hide"));
  if (!spec) return [el("p.empty", "No round with an accuracy or a score has been recorded yet: it appears here by itself.")];
  const options = rounds.map(figure => [figure.metric, figure.y.label]);
  const controls = spec.metric && el("div.controls",
    choice("Leakage as", spec.metric, options, value => change({ metric: value })), switches(spec, hidden, change),
  );
  const shown = s => !hidden.has(s.role === "attack" ? s.name : GROUPS[s.role]);
  return [controls, specified(spec, shown, !hidden.has(GROUPS.worst))];
}

/** Switches for the attacks, baselines, limits and worst cases of the figure. */
function switches({ series }, hidden, change) {
  const kinds = new Set(series.map(s => s.role)), attacks = series.filter(s => s.role === "attack");
  if (attacks.some(s => s.worst.length)) kinds.add("worst");
  const names = [...attacks.map(s => s.name), ...Object.keys(GROUPS).filter(k => kinds.has(k)).map(k => GROUPS[k])];
  const toggle = name => change({ hide: hidden.has(name) ? [...hidden].filter(n => n !== name) : [...hidden, name] });
  return el("fieldset.switches", el("legend", "Show"), names.map(name => check(name, !hidden.has(name), () => toggle(name))));
}
