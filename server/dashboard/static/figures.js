"use strict";
// The figures of one run: leakage over rounds, success over thresholds, the worst leaks, labels, an attack's objective.

// the switches' names for series that are not attacks
const GROUPS = { baseline: "baselines", limit: "limits", worst: "worst cases" };

/** The figure with its controls; state holds the metric and what is hidden. */
function overRounds(overview, state, change) {
  const metric = overview.metrics.find(m => m.name === state.get("metric")) || overview.metrics[0];
  const hidden = new Set(state.getAll("hide"));
  if (!metric && !overview.accuracy.x.length && overview.ungraded.count) return [el("p.empty", "Nothing is graded, and the app returned no accuracy.")];
  const options = overview.metrics.map(m => [m.name, m.label]);
  const controls = metric && el("div.controls",
    choice("Leakage as", metric.name, options, value => change({ metric: value })), switches(metric, hidden, change),
  );
  return [controls, roundsFigure(overview, metric, hidden)];
}

function roundsFigure(overview, metric, hidden) {
  const series = metric ? metric.series : [], attacks = planned(overview.knowledge);
  const expected = overview.knowledge.cards.length + attacks.length + 1; // each attack has one baseline of its own
  const height = 390 + legendHeight(Math.max(expected, series.length + 1)), tested = overview.accuracy.x.length > 0 || !metric;
  const drawing = node => {
    const style = styles(series, attacks), last = Math.max(1, ...overview.accuracy.x, ...series.flatMap(s => s.x));
    const traces = series.flatMap((s, i) => seriesTraces(s, style[i], hidden)).concat(tested ? accuracyTrace(overview.accuracy) : []);
    const right = {
      overlaying: "y", side: "right", range: [0, 1.02], tickformat: ".0%", tickmode: "linear", tick0: 0, dtick: .25,
      showgrid: false, title: { text: narrow.matches ? "" : "test accuracy", standoff: 6 },
    };
    const left = {
      uirevision: metric?.name, title: { text: metric ? plain(metric.label) : "" }, visible: Boolean(metric),
      ...(metric?.fraction ? partAxis : {}),
    };
    const fixed = { ...legend(), itemclick: false, itemdoubleclick: false }; // switches() does that
    draw(node, traces, layout(roundAxis(last), left, height, { hovermode: "x unified", ...(tested ? { yaxis2: right } : {}), legend: fixed }));
  };
  return figure("Leakage and test accuracy over rounds", roundsMeaning(overview, metric), drawing, height);
}

function seriesTraces(s, { color, dash, symbol, width, opacity }, hidden) {
  const name = folded(s.name), shown = !hidden.has(s.kind === "attack" ? s.name : GROUPS[s.kind]);
  const visible = shown || "legendonly";
  const banded = s.x.map((_, k) => k).filter(k => s.low[k] !== null && s.high[k] !== null), traces = [];
  if (s.kind === "attack" && banded.length > 1 && shown) {
    const edge = {
      x: banded.map(k => s.x[k]), mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false, legendgroup: name,
    };
    traces.push({ ...edge, y: banded.map(k => s.high[k]) });
    traces.push({ ...edge, y: banded.map(k => s.low[k]), fill: "tonexty", fillcolor: translucent(color) });
  }
  const alone = s.kind !== "limit" && s.x.length === 1 && s.low[0] !== null;
  traces.push({
    x: s.x, y: s.mean, name, visible, legendgroup: name, opacity, customdata: s.hover.map(plain), hovertemplate: "%{customdata}",
    mode: s.kind !== "attack" && s.x.length > 1 ? "lines" : "lines+markers", line: { color, dash, width },
    marker: { color, symbol, size: 7, line: { color, width: s.kind === "attack" ? 0 : 2 } },
    error_y: alone ? {
      type: "data", symmetric: false, array: [s.high[0] - s.mean[0]], arrayminus: [s.mean[0] - s.low[0]], color,
    } : undefined,
  });
  if (s.best.length && shown && !hidden.has(GROUPS.worst)) {
    traces.push({
      x: s.x, y: s.best, mode: "lines+markers", name: `${name}, worst case`, legendgroup: name, showlegend: false, hoverinfo: "skip",
      line: { color, dash: "dot", width: 1.5 }, marker: { color, symbol: `${symbol}-open`, size: 6 },
    });
  }
  return traces;
}

function accuracyTrace({ x, y }) {
  const color = cssVariable("--ink");
  return {
    x, y, name: "test accuracy (right)", yaxis: "y2", hovertemplate: "%{y:.1%}", mode: x.length > 1 ? "lines" : "markers",
    line: { color, width: 1.5 }, marker: { color },
  };
}

/** The newest round, in a sentence. */
function roundsMeaning(overview, metric) {
  if (!metric?.newest) return `${overview.ungraded.count ? "Nothing is graded" : "No attack has given a score yet"}: only the test accuracy is drawn.`;
  const { round, strongest: best, baseline: floor } = metric.newest;
  const guess = floor ? `, the best guess that does not read the update (${floor.name}) ${inMetric(metric, floor.mean)}` : "";
  const reached = `In round ${round}, the strongest attack (${best.name}) reaches ${inMetric(metric, best.mean)} on average`;
  return `${reached}${guess}. What an attack has beyond the grey lines is leakage.`;
}

/** Switches for the attacks, baselines, limits and worst cases of the figure. */
function switches(metric, hidden, change) {
  const kinds = new Set(metric.series.map(s => s.kind)), attacks = metric.series.filter(s => s.kind === "attack");
  if (attacks.some(s => s.best.length)) kinds.add("worst");
  const names = [...attacks.map(s => s.name), ...Object.keys(GROUPS).filter(k => kinds.has(k)).map(k => GROUPS[k])];
  const toggle = name => change({ hide: hidden.has(name) ? [...hidden].filter(n => n !== name) : [...hidden, name] });
  return el("fieldset.switches", el("legend", "Show"), names.map(name => check(name, !hidden.has(name), () => toggle(name))));
}

function successFigure({ success, thresholds, knowledge, ungraded }) {
  const height = 340 + legendHeight(success.length);
  const drawing = node => {
    const style = styles(success, planned(knowledge));
    const traces = success.map((s, i) => ({
      x: thresholds, y: s.y, name: folded(s.name), mode: "lines", opacity: style[i].opacity, customdata: s.hover.map(plain),
      hovertemplate: "%{customdata}", line: { color: style[i].color, dash: style[i].dash, width: style[i].width },
    }));
    const x = { title: { text: "PSNR of at least (dB)", standoff: 6 }, unifiedhovertitle: { text: "at least %{x} dB" } };
    draw(node, traces, layout(x, { title: { text: "part of the examples" }, ...partAxis }, height, { hovermode: "x unified" }));
  };
  return figure("Success over thresholds", successMeaning(success, thresholds, 20, ungraded), drawing, height);
}

/** Members told at each rate of false positives, on two logarithmic axes; grey: as many strangers as members. */
function rocFigure({ membership: { roc, rates }, knowledge }) {
  const height = 340 + legendHeight(roc.length + 1), least = rates.find((_, i) => roc.some(s => s.y[i] !== null)) ?? rates[0];
  const drawing = node => {
    const style = styles(roc, planned(knowledge));
    const traces = roc.map((s, i) => ({
      x: rates, y: s.y.map(y => y === null ? null : Math.max(y, least / 2)), name: folded(s.name), mode: "lines+markers",
      opacity: style[i].opacity, customdata: s.hover.map(plain), hovertemplate: "%{customdata}",
      line: { color: style[i].color, dash: style[i].dash, width: style[i].width }, marker: { color: style[i].color, size: 5 },
    }));
    const even = { x: rates, y: rates, name: "chance", mode: "lines", hoverinfo: "skip", line: { color: cssVariable("--muted"), dash: "dot", width: 1 } };
    const scale = { type: "log", tickvals: [.001, .01, .1, 1], ticktext: ["0.1 %", "1 %", "10 %", "100 %"] };
    const x = { ...scale, title: { text: "strangers taken for members", standoff: 6 }, range: [Math.log10(least), 0] };
    const y = { ...scale, title: { text: "members told" }, range: [Math.log10(least / 2), .03] };
    draw(node, [...traces, even], layout(x, y, height, { hovermode: "x unified" }));
  };
  const tests = roc.filter(s => s.kind === "attack"), at = s => s.y[rates.indexOf(.01)];
  const best = highest(tests, at);
  const meaning = best ? `At 1 % false positives, ${best.name} tells ${percent(at(best))} of the members.` : "Too few strangers for 1 % false positives.";
  return figure("Members told from strangers", meaning, drawing, height);
}

/** The epsilon that canaries show, round by round, with its interval or as a lower bound, beside the accounted one. */
function canariesFigure({ kind, rows }) {
  const height = 320 + legendHeight(2), x = rows.map(r => r.round), color = colour(0), bound = kind === "examples";
  const drawing = node => {
    const edge = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
    const line = { x, mode: x.length > 1 ? "lines" : "markers", hovertemplate: "%{y:.3g}" };
    const interval = [{ ...edge, y: rows.map(r => r.high) }, { ...edge, y: rows.map(r => r.low), fill: "tonexty", fillcolor: translucent(color) }];
    const traces = [
      ...(bound ? [] : interval),
      { ...line, y: rows.map(r => r.epsilon), name: bound ? "at least, by canaries" : "seen by canaries", line: { color, width: 2 }, marker: { color, size: 7 } },
      { ...line, y: rows.map(r => r.accounted), name: "accounted", line: { color: cssVariable("--limit"), dash: "longdashdot" }, marker: { color: cssVariable("--limit"), symbol: "line-ew", size: 9, line: { color: cssVariable("--limit"), width: 2 } } },
    ];
    draw(node, traces, layout(roundAxis(Math.max(1, ...x)), { title: { text: `epsilon, ${bound ? "one record" : "all of a client's data"}` }, rangemode: "tozero" }, height, { hovermode: "x unified" }));
  };
  const meaning = bound ? "The line is a lower bound with a confidence of 95 %, from guesses of which canaries are among the data" : "The line is what their updates show, with its 95 % interval";
  return figure("Epsilon that canaries show", `${meaning}; the accounted epsilon is what the noise promises.`, drawing, height);
}

/** Why attacks have no score. */
function noScore({ count, reason }) {
  return count ? `No score: ${many(count, "reconstruction")}, none graded${reason && ` (${reason})`}.` : "No attack has given a score yet.";
}

function successMeaning(success, thresholds, threshold, ungraded) {
  const at = s => s.y[thresholds.indexOf(threshold)];
  const [best, floor] = ["attack", "baseline"].map(kind => highest(success.filter(s => s.kind === kind), at));
  if (!best) return noScore(ungraded);
  const reached = `${percent(at(best))} of the attacked examples come back at ${threshold} dB or better with ${best.name}`;
  const guess = floor ? `, ${percent(at(floor))} with ${floor.name}, which needs no update` : "";
  const hidden = ungraded.count ? ` Not counted: ${many(ungraded.count, "reconstruction")} that nobody graded.` : "";
  return `${reached}${guess}. Attempts without an image count as failed.${hidden}`;
}

/** What the heat map's colours mean, the same in every run: from the best guess (dark) to what leaks as much as can be seen. */
function heatScale({ floor, z, metric: { ceiling, higher_is_better: higher } }) {
  const values = z.flat().filter(v => v !== null), step = ceiling / 1e6;
  const from = floor ? floor.value : higher ? 0 : Math.max(1e-9, ...values);
  return higher ? { zmin: Math.min(from, ceiling - step), zmax: ceiling } : { zmin: ceiling, zmax: Math.max(from, ceiling + 1e-9) };
}

/** Worst leak by client and round: brighter leaks more, a cross marks a client that was not graded. */
function heatFigure(clients, open) {
  const height = Math.min(720, 130 + Math.max(4, clients.clients.length) * (clients.clients.length > 20 ? 14 : 26));
  const names = clients.clients.map(c => `client ${c}`), rounds = clients.rounds.map(String);
  const drawing = node => {
    const missing = clients.z.flatMap((row, i) => row.flatMap((z, j) => z === null ? [[rounds[j], names[i]]] : []));
    const hover = clients.z.map(row => row.map(z => inMetric(clients.metric, z)));
    const wide = .8 * node.clientWidth / rounds.length, gap = wide > 12 ? 1 : 0; // the approximate width of a square, in pixels
    const heat = {
      type: "heatmap", x: rounds, y: names, z: clients.z, customdata: hover, hoverongaps: false, xgap: gap, ygap: gap,
      colorscale: "Cividis", reversescale: !clients.metric.higher_is_better, ...heatScale(clients),
      colorbar: { thickness: 12, outlinewidth: 0, title: { text: plain(clients.metric.label), side: "right" } },
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
    node.on?.("plotly_click", event => open?.(clients.clients[names.indexOf(event.points[0].y)]));
  };
  return figure("Worst leak by client and round", heatMeaning(clients), drawing, height);
}

function heatMeaning({ table: [most], metric, floor, left_out: left }) {
  const worst = most ? raw(most.worst, most.exact) : null;
  const guess = floor && `The best guess that does not read the update (${floor.name}) reaches ${inMetric(metric, floor.value)} in a cell on average.`;
  const beyond = !floor || (metric.higher_is_better ? worst > floor.value : worst < floor.value);
  const found = worst !== null && `Client ${most.client} leaks most, in round ${most.round}: ${inMetric(metric, worst)}`;
  const scale = `Brighter leaks more: darkest is ${guess ? "no more than that guess" : "nothing"}, brightest ${inMetric(metric, metric.ceiling)}`
    + `${metric.cap === null ? "" : " or more"}.`;
  return [
    found && `${found}${beyond ? "" : ", no more than a guess"}.`, guess, scale, "A cross means that nothing was graded there.",
    left.clients > 0 && `${many(left.clients, "client")} that leak less are left out.`,
    left.rounds > 0 && `Rounds are shown evenly spread, and ${left.rounds} between them are left out.`,
  ].filter(Boolean).join(" ");
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
