"use strict";
// The figures of one run that are more than a specification: switches, the worst leaks, labels, an attack's objective.

// the switches' names for series that are not attacks
const GROUPS = { baseline: "baselines", limit: "limits", worst: "worst cases" };

/** Leakage over rounds with its controls; state holds the metric and what is hidden. */
function overRounds({ figures: { rounds }, ungraded }, state, change) {
  const spec = rounds.find(f => f.metric === state.get("metric")) || rounds[0], hidden = new Set(state.getAll("hide"));
  if (!spec) return [el("p.empty", ungraded.count ? "Nothing is graded, and the app returned no accuracy." : "No round has been recorded yet: it appears here by itself.")];
  const options = rounds.map(f => [f.metric, f.y.label]);
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

/** Why attacks have no score. */
function noScore({ count, reason }) {
  return count ? `No score: ${many(count, "reconstruction")}, none graded${reason && ` (${reason})`}.` : "No attack has given a score yet.";
}

/** Worst leak by client and round: brighter leaks more, a cross marks a client that was not graded. */
function heatFigure({ figure: spec, metric }, open) {
  const height = Math.min(720, 130 + Math.max(4, spec.clients.length) * (spec.clients.length > 20 ? 14 : 26));
  const names = spec.clients.map(c => `client ${c}`), rounds = spec.rounds.map(String), z = spec.values;
  const drawing = node => {
    const missing = z.flatMap((row, i) => row.flatMap((value, j) => value === null ? [[rounds[j], names[i]]] : []));
    const wide = .8 * node.clientWidth / rounds.length, gap = wide > 12 ? 1 : 0; // the approximate width of a square, in pixels
    const heat = {
      type: "heatmap", x: rounds, y: names, z, customdata: z.map(row => row.map(value => inMetric(metric, value))), hoverongaps: false,
      xgap: gap, ygap: gap, colorscale: "Cividis", reversescale: spec.darkest > spec.brightest,
      zmin: Math.min(spec.darkest, spec.brightest), zmax: Math.max(spec.darkest, spec.brightest),
      colorbar: { thickness: 12, outlinewidth: 0, title: { text: plain(spec.label), side: "right" } },
      hovertemplate: "%{y}, round %{x}: %{customdata}<extra></extra>",
    };
    const gaps = {
      x: missing.map(m => m[0]), y: missing.map(m => m[1]), mode: "markers",
      marker: { symbol: "x-thin", size: Math.min(6, Math.max(2, .6 * wide)), line: { color: cssVariable("--muted"), width: gap ? 1.2 : .8 } },
      hovertemplate: "%{y}, round %{x}: nothing graded<extra></extra>",
    };
    const category = names => ({ type: "category", showgrid: false, zeroline: false, categoryarray: names });
    const x = {
      ...category(rounds), title: { text: "round", standoff: 6 }, range: [-.5, rounds.length - .5], tickangle: 0,
      nticks: narrow.matches ? 6 : 20,
    };
    const y = { ...category(names), range: [names.length - .5, -.5], nticks: 25 };
    draw(node, [heat, gaps], layout(x, y, height, { margin: { l: 52, r: 8, t: 32, b: 48 }, showlegend: false }));
    node.removeAllListeners?.("plotly_click"); // Plotly adds this method and node.on when it draws
    node.on?.("plotly_click", event => open?.(spec.clients[names.indexOf(event.points[0].y)]));
  };
  return figure(spec.title, spec.meaning, drawing, height);
}

/** Counts of a client's labels; attacks: in the plan's order. */
function labelsFigure(client, attacks) {
  const named = r => r.given ? `${r.attack} (given)` : r.attack;
  const restored = client.restored.map(r => ({ name: named(r), counts: r.counts, place: attacks.indexOf(r.attack) }));
  const groups = [{ name: "true", counts: client.true, place: null }, ...restored];
  const most = Math.max(...groups.flatMap(g => g.counts));
  const height = 300 + legendHeight(groups.length), shapes = ["", "/", "\\", "x", "-", "|", "."];
  const drawing = node => {
    const traces = groups.map((g, i) => ({
      type: "bar", x: client.classes.map(k => plain(client.class_names[k] || k)), y: g.counts, name: plain(g.name), hovertemplate: "%{y}",
      marker: {
        color: g.place === null ? cssVariable("--muted") : colour(g.place),
        pattern: { shape: shapes[i % shapes.length], fillmode: "overlay", solidity: .25, fgcolor: cssVariable("--page") },
      },
    }));
    const x = { type: "category", title: { text: "label", standoff: 6 }, unifiedhovertitle: { text: client.class_names.length ? "%{x}" : "label %{x}" } };
    const y = { title: { text: "examples" }, rangemode: "tozero", ...(most < 6 ? { dtick: 1 } : {}) };
    draw(node, traces, layout(x, y, height, { barmode: "group", hovermode: "x unified" }));
  };
  return figure("Label counts, true and restored", labelsMeaning(client), drawing, height);
}

function labelsMeaning(client) {
  const total = client.true.reduce((a, b) => a + b, 0);
  const right = r => r.counts.reduce((sum, n, i) => sum + Math.min(n, client.true[i]), 0);
  const results = client.restored.map(r => r.given ? `${r.attack} was given the labels` : `${r.attack} restored ${right(r)} of ${total}`);
  const over = `Over ${many(client.rounds, "attacked round")}: ${results.join("; ") || "no attack claimed labels"}.`;
  return `${over} The counts cover all rounds together and ignore which example a label belongs to.`;
}

function traceFigure(trace, attack, step) {
  const height = 280;
  const drawing = node => {
    const color = colour(0), x = trace.iterations, y = trace.objective;
    const line = {
      x, y, mode: "lines+markers", line: { color, width: 2 }, marker: { color, size: 6 },
      hovertemplate: "iteration %{x}: %{y:.4g}<extra></extra>",
    };
    const here = {
      x: [x[step]], y: [y[step]], mode: "markers",
      marker: { color: cssVariable("--leak"), size: 13, symbol: "circle-open", line: { width: 3 } }, hoverinfo: "skip",
    };
    const logarithmic = y.every(v => v > 0) ? { type: "log", exponentformat: "power" } : {};
    const axis = { title: { text: "objective" }, ...logarithmic };
    draw(node, [line, here], layout({ title: { text: "iteration", standoff: 6 } }, axis, height, { showlegend: false }));
  };
  const [from, to] = [trace.objective[0], trace.objective.at(-1)].map(v => v === null ? "no number" : decimal(v));
  const taken = many(trace.iterations.at(-1), "iteration");
  const meaning = `${attack} takes its own objective from ${from} to ${to} in ${taken}; it never sees the true image.`;
  return figure("The attack's objective", meaning, drawing, height);
}
