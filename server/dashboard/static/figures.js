"use strict";
// What is drawn of a run, by the live page and by the report: words, trees of elements, Plotly's figures, tables, galleries.
// Every text that comes from a run is set as text, never as markup; for Plotly, which reads some markup, it passes plain().

// -------------------------------------------------------------------------------------------------------------- words

const NONE = "–";
const LOWER_LEAKS_MORE = new Set(["mse", "lpips_alex", "lpips_vgg"]);
const PARTS = new Set(["identified", "label_accuracy"]);
const PERCENTAGES = /^(rouge|token_accuracy|exact)/; // of words, in hundredths already

const percent = value => value === null || value === undefined ? NONE : `${Math.round(100 * value)}\u00a0%`;
const many = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const plain = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function inMetric(metric, value, unit = " dB") {
  if (value === null || value === undefined) return NONE;
  if (PARTS.has(metric)) return percent(value);
  if (PERCENTAGES.test(metric)) return `${value.toFixed(1)}${unit && " %"}`;
  return metric === "psnr" ? `${value.toFixed(1)}${unit}` : metric === "mse" ? value.toPrecision(3) : value.toFixed(3);
}

function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function interval(row, metric) {
  return row.low === null || row.high === null ? "" : `${inMetric(metric, row.low, "")} to ${inMetric(metric, row.high, "")}`;
}

const LIMITS = {
  drawn: "The limit's line: no attack, biased or not, goes below its error on average over images of the prior that it names; "
    + "on photographs a learned attack may cross it.",
  pending: "The Bayes limit of this chain has not been computed yet, or does not apply to this network.",
  none: "No limit is drawn: a chain without noise leaves no floor above rounding where its Jacobian has full column rank.",
  unknown: "No limit is drawn: the density of this chain's randomness is not known in closed form.",
};

/** Whichever of some items leaks most by a number of theirs; undefined of none. */
function strongest(items, value, lower) {
  const sign = lower ? -1 : 1;
  return items.filter(i => value(i) !== null && value(i) !== undefined).sort((a, b) => sign * (value(b) - value(a)))[0];
}

// -------------------------------------------------------------------------------------------------------------- trees
// A view is a function from data to a tree of elements. patch() brings what stands on the page to such a tree, in place: what
// has the focus, is scrolled or open stays so.

/** An element: its tag with classes (p.small), perhaps properties, and what is in it. */
function el(kind, ...rest) {
  const [tag, ...classes] = kind.split("."), properties = rest[0]?.constructor === Object ? rest.shift() : {};
  const node = document.createElement(tag), handlers = {};
  if (classes.length) node.className = classes.join(" ");
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) handlers[name.slice(2)] = value;
    else if (name === "vars") Object.entries(value).forEach(([key, text]) => node.style.setProperty(key, text));
    else if (name === "draw") { node.draw = value; node.dataset.draw = ""; }
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  listen(node, handlers);
  node.append(...rest.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false));
  if (properties.value !== undefined) node.value = properties.value;
  return node;
}

function listen(node, handlers) {
  const known = node.handlers || {};
  for (const type of Object.keys(handlers).filter(type => !(type in known))) {
    node.addEventListener(type, event => node.handlers[type]?.(event));
  }
  node.handlers = handlers;
}

/** Draw the figures below a node that has just come to the page. */
function begin(node) {
  if (node.draw) node.draw(node);
  node.querySelectorAll?.("[data-draw]").forEach(inner => inner.draw(inner));
}

function remove(node) {
  const figures = node.querySelectorAll ? [node, ...node.querySelectorAll("[data-draw]")] : [];
  figures.filter(figure => figure.draw && window.Plotly).forEach(figure => Plotly.purge(figure));
  node.remove();
}

function patch(old, fresh) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  listen(old, fresh.handlers);
  if (fresh.draw) {
    old.draw = fresh.draw;
    old.draw(old);
    return;
  }
  patchAttributes(old, fresh);
  patchChildren(old, fresh);
  if (!old.matches("input, select")) return;
  if (old.value !== fresh.value) old.value = fresh.value;
  if (old.checked !== fresh.checked) old.checked = fresh.checked;
}

function patchAttributes(old, fresh) {
  const kept = name => name === "style" || (name === "open" && old.nodeName === "DETAILS");
  for (const { name } of [...old.attributes]) if (!kept(name) && !fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) {
    if (!kept(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  if (old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText;
}

/** Children match by data-key where they have one, else by place and tag. */
function patchChildren(old, fresh) {
  const keyed = new Map([...old.children].filter(c => c.dataset.key).map(c => [c.dataset.key, c]));
  let place = old.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    const key = wanted.dataset?.key;
    const alike = place && !key && !place.dataset?.key && place.nodeName === wanted.nodeName ? place : null;
    const match = key ? keyed.get(key) : alike;
    if (!match) {
      old.insertBefore(wanted, place);
      begin(wanted);
      continue;
    }
    if (match === place) place = place.nextSibling;
    else old.insertBefore(match, place);
    patch(match, wanted);
  }
  while (place) {
    const next = place.nextSibling;
    remove(place);
    place = next;
  }
}

/** Make a node's children the given ones. */
function show(node, ...children) {
  patchChildren(node, el(node.tagName, ...children));
}

// ------------------------------------------------------------------------------------------------------------- Plotly

const scheme = window.matchMedia("(prefers-color-scheme: dark)");
const narrow = window.matchMedia("(max-width: 600px)");
// Okabe and Ito's palette, which the colour-blind can tell apart; its bright members first where the page is dark
const PALETTE = {
  light: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"],
  dark: ["#56b4e9", "#e69f00", "#2fc49a", "#cc79a7", "#f0e442", "#d55e00"],
};
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "star"];
const DASHES = ["dash", "dashdot", "longdash", "longdashdot", "2px,4px", "8px,2px"];

const look = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = index => PALETTE[scheme.matches ? "dark" : "light"][index % PALETTE.light.length];
/** A name in a legend: in two lines where it is long. */
const folded = name => plain(name.length > 34 ? name.replace(/^(.{18,34}) /, "$1\n") : name).replace("\n", "<br>");
const translucent = hex => `rgba(${[1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16)).join()},.2)`;

// attacks get colours in the plan's order, limits a colour of their own, baselines greys
function styles(series, planned) {
  let baselines = 0;
  return series.map(s => {
    if (s.kind === "limit") return { color: look("--limit"), dash: "longdashdot", symbol: "line-ew", width: 2.2, opacity: 1 };
    if (s.kind === "baseline") return {
      color: look("--muted"), dash: DASHES[baselines++ % DASHES.length], symbol: "line-ew", width: 1.3, opacity: .75,
    };
    const place = planned.indexOf(s.name);
    return { color: colour(place), dash: "solid", symbol: SYMBOLS[place % SYMBOLS.length], width: 2.4, opacity: 1 };
  });
}

const planned = knowledge => knowledge.cards.filter(card => card.kind === "attack").map(card => card.name);

function layout(x, y, height, more) {
  const axis = { gridcolor: look("--line"), zerolinecolor: look("--line"), linecolor: look("--line"), automargin: true };
  return {
    paper_bgcolor: look("--page"), plot_bgcolor: look("--page"), height, uirevision: "kept",
    font: { family: "system-ui, -apple-system, 'Segoe UI', sans-serif", size: 13, color: look("--ink") },
    margin: { l: 52, r: narrow.matches ? 44 : 56, t: 32, b: 48 },
    hoverlabel: { bgcolor: look("--panel"), bordercolor: look("--line"), font: { color: look("--ink"), size: 12 } },
    legend: legend(),
    ...more, xaxis: { ...axis, ...x }, yaxis: { ...axis, ...y },
  };
}

const legend = () => ({
  orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, xanchor: "left", entrywidth: narrow.matches ? 260 : 230,
});

/** The height that so many entries of a legend need below a figure. */
const legendHeight = entries => 21 * Math.ceil(entries / (narrow.matches ? 1 : 3));

function draw(node, traces, shape) {
  if (!window.Plotly) return; // its script comes last; whoever loads it calls redraw()
  // Plotly's own tool bar has a button that sends the figure's data to its makers' server
  const tools = {
    displaylogo: false, showSendToCloud: false, plotlyServerURL: "",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };
  Plotly.react(node, traces, shape, { responsive: true, ...tools });
}

function redraw() {
  document.querySelectorAll("[data-draw]").forEach(node => node.draw(node));
}
scheme.addEventListener("change", redraw);
narrow.addEventListener("change", redraw);

/** A figure with a name for those who cannot see it and, below, a line that says what it means. */
function figure(name, meaning, drawing, height) {
  const picture = el("div.plot",
    { role: "group", "aria-label": `${name}. ${meaning}`, vars: { "--height": `${height}px` } }, el("div", { draw: drawing }),
  );
  return el("figure", { "data-key": name }, picture, el("figcaption.meaning", meaning));
}

const roundAxis = last => ({
  title: { text: "round", standoff: 6 }, range: [-.03 * last, 1.03 * last], tickformat: "d",
  unifiedhovertitle: { text: "round %{x}" }, ...(last < 12 ? { dtick: 1 } : {}),
});
const partAxis = { range: [-.02, 1.03], tickformat: ".0%", dtick: .25 };

// --------------------------------------------------------------------------------------------- leakage over the rounds

// what the switches call series that are no attacks
const GROUPS = { baseline: "baselines", limit: "limits", worst: "worst cases" };

/** The figure with its controls; state holds the metric and what is hidden. */
function overRounds(overview, state, change) {
  const metric = overview.metrics.find(m => m.name === state.get("metric")) || overview.metrics[0];
  const hidden = new Set(state.getAll("hide"));
  const options = overview.metrics.map(m => [m.name, m.label]);
  const controls = metric && el("div.controls",
    choice("Leakage as", metric.name, options, value => change({ metric: value })), switches(metric, hidden, change),
  );
  return [controls, roundsFigure(overview, metric, hidden)];
}

function roundsFigure(overview, metric, hidden) {
  const series = metric ? metric.series : [], attacks = planned(overview.knowledge);
  const expected = overview.knowledge.cards.length + attacks.length + 1; // each attack brings a baseline of its own
  const height = 390 + legendHeight(Math.max(expected, series.length + 1));
  const drawing = node => {
    const style = styles(series, attacks), last = Math.max(1, ...overview.accuracy.x, ...series.flatMap(s => s.x));
    const traces = series.flatMap((s, i) => seriesTraces(s, style[i], hidden)).concat(accuracyTrace(overview.accuracy));
    const right = {
      overlaying: "y", side: "right", range: [0, 1.02], tickformat: ".0%", tickmode: "linear", tick0: 0, dtick: .25,
      showgrid: false, title: { text: narrow.matches ? "" : "test accuracy", standoff: 6 },
    };
    const left = {
      uirevision: metric?.name, title: { text: metric ? plain(metric.label) : "" }, visible: Boolean(metric),
      ...(PARTS.has(metric?.name) ? partAxis : {}),
    };
    const fixed = { ...legend(), itemclick: false, itemdoubleclick: false }; // switches() is for that
    draw(node, traces, layout(roundAxis(last), left, height, { hovermode: "x unified", yaxis2: right, legend: fixed }));
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
    x: s.x, y: s.mean, name, visible, legendgroup: name, opacity, customdata: s.told.map(plain), hovertemplate: "%{customdata}",
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
  const color = look("--ink");
  return {
    x, y, name: "test accuracy (right)", yaxis: "y2", hovertemplate: "%{y:.1%}", mode: x.length > 1 ? "lines" : "markers",
    line: { color, width: 1.5 }, marker: { color },
  };
}

/** The newest round in a sentence. */
function roundsMeaning(overview, metric) {
  const attacks = metric ? metric.series.filter(s => s.kind === "attack" && s.x.length) : [];
  if (!attacks.length) return "No attack has given a score yet: only the test accuracy is drawn.";
  const lower = LOWER_LEAKS_MORE.has(metric.name), round = Math.max(...attacks.map(s => s.x.at(-1)));
  const at = s => s.mean[s.x.indexOf(round)];
  const best = strongest(attacks, at, lower), floor = strongest(metric.series.filter(s => s.kind === "baseline"), at, lower);
  const guess = floor ? `, the best guess that does not read the update (${floor.name}) ${inMetric(metric.name, at(floor))}` : "";
  const reached = `In round ${round}, the strongest attack (${best.name}) reaches ${inMetric(metric.name, at(best))} on average`;
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

// ------------------------------------------------------------------------------------------------------ other figures

function successFigure({ success, thresholds, knowledge, ungraded }) {
  const height = 340 + legendHeight(success.length);
  const drawing = node => {
    const style = styles(success, planned(knowledge));
    const traces = success.map((s, i) => ({
      x: thresholds, y: s.y, name: folded(s.name), mode: "lines", opacity: style[i].opacity, customdata: s.told.map(plain),
      hovertemplate: "%{customdata}", line: { color: style[i].color, dash: style[i].dash, width: style[i].width },
    }));
    const x = { title: { text: "PSNR of at least (dB)", standoff: 6 }, unifiedhovertitle: { text: "at least %{x} dB" } };
    draw(node, traces, layout(x, { title: { text: "part of the examples" }, ...partAxis }, height, { hovermode: "x unified" }));
  };
  return figure("Success over thresholds", successMeaning(success, thresholds, 20, ungraded), drawing, height);
}

/** Why attacks have no score. */
function noScore({ count, reason }) {
  return count ? `No score: ${many(count, "reconstruction")}, none graded${reason && ` (${reason})`}.` : "No attack has given a score yet.";
}

function successMeaning(success, thresholds, threshold, ungraded) {
  const at = s => s.y[thresholds.indexOf(threshold)];
  const [best, floor] = ["attack", "baseline"].map(kind => strongest(success.filter(s => s.kind === kind), at));
  if (!best) return noScore(ungraded);
  const reached = `${percent(at(best))} of the attacked examples come back at ${threshold} dB or better with ${best.name}`;
  const guess = floor ? `, ${percent(at(floor))} with the best baseline` : "";
  const hidden = ungraded.count ? ` Not counted: ${many(ungraded.count, "reconstruction")} that nobody graded.` : "";
  return `${reached}${guess}. Attempts that gave no image reach nothing.${hidden}`;
}

/** Worst leak by client and round; brighter leaks more, a cross was not attacked. */
function heatFigure(clients, open) {
  const height = Math.min(720, 130 + Math.max(4, clients.clients.length) * (clients.clients.length > 20 ? 14 : 26));
  const names = clients.clients.map(c => `client ${c}`), rounds = clients.rounds.map(String);
  const drawing = node => {
    const missing = clients.z.flatMap((row, i) => row.flatMap((z, j) => z === null ? [[rounds[j], names[i]]] : []));
    const told = clients.z.map(row => row.map(z => inMetric(clients.metric, z)));
    const wide = .8 * node.clientWidth / rounds.length, gap = wide > 12 ? 1 : 0; // pixels of a cell, about
    const heat = {
      type: "heatmap", x: rounds, y: names, z: clients.z, customdata: told, hoverongaps: false, xgap: gap, ygap: gap,
      colorscale: "Cividis", reversescale: clients.lower_is_worse,
      colorbar: { thickness: 12, outlinewidth: 0, title: { text: plain(clients.label), side: "right" } },
      hovertemplate: "%{y}, round %{x}: %{customdata}<extra></extra>",
    };
    const gaps = {
      x: missing.map(m => m[0]), y: missing.map(m => m[1]), mode: "markers",
      marker: { symbol: "x-thin", size: Math.min(6, Math.max(2, .6 * wide)), line: { color: look("--muted"), width: gap ? 1.2 : .8 } },
      hovertemplate: "%{y}, round %{x}: nothing graded<extra></extra>",
    };
    const category = names => ({ type: "category", showgrid: false, zeroline: false, categoryarray: names });
    const x = {
      ...category(rounds), title: { text: "round", standoff: 6 }, range: [-.5, rounds.length - .5], tickangle: 0,
      nticks: narrow.matches ? 6 : 20,
    };
    const y = { ...category(names), range: [names.length - .5, -.5], nticks: 25 };
    draw(node, [heat, gaps], layout(x, y, height, { margin: { l: 52, r: 8, t: 32, b: 48 }, showlegend: false }));
    node.removeAllListeners?.("plotly_click"); // node.on and this are Plotly's, there once it has drawn
    node.on?.("plotly_click", event => open?.(clients.clients[names.indexOf(event.points[0].y)]));
  };
  return figure("Worst leak by client and round", heatMeaning(clients), drawing, height);
}

function heatMeaning({ clients, rounds, z, table: [most], metric, lower_is_worse }) {
  const row = most ? z[clients.indexOf(most.client)].map((value, j) => ({ value, round: rounds[j] })) : [];
  const worst = strongest(row, cell => cell.value, lower_is_worse);
  const found = worst ? `Client ${most.client} leaks most, in round ${worst.round}: ${inMetric(metric, raw(most.worst, most.exact))}. ` : "";
  return `${found}Brighter leaks more; a cross means that nothing was graded there.`;
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
      type: "bar", x: client.classes.map(String), y: g.counts, name: plain(g.name), hovertemplate: "%{y}",
      marker: {
        color: g.place === null ? look("--muted") : colour(g.place),
        pattern: { shape: shapes[i % shapes.length], fillmode: "overlay", solidity: .25, fgcolor: look("--page") },
      },
    }));
    const x = { type: "category", title: { text: "label", standoff: 6 }, unifiedhovertitle: { text: "label %{x}" } };
    const y = { title: { text: "examples" }, rangemode: "tozero", ...(most < 6 ? { dtick: 1 } : {}) };
    draw(node, traces, layout(x, y, height, { barmode: "group", hovermode: "x unified" }));
  };
  return figure("Label counts, true and restored", labelsMeaning(client), drawing, height);
}

function labelsMeaning(client) {
  const total = client.true.reduce((a, b) => a + b, 0);
  const right = r => r.counts.reduce((sum, n, i) => sum + Math.min(n, client.true[i]), 0);
  const told = client.restored.map(r => r.given ? `${r.attack} was given the labels` : `${r.attack} restored ${right(r)} of ${total}`);
  const over = `Over ${many(client.rounds, "attacked round")}: ${told.join("; ") || "no attack claimed labels"}.`;
  return `${over} Counted over the rounds together, whichever example a label belongs to.`;
}

/** Test accuracy against leakage: a colour and a number a run, a symbol an attack, and the runs that none beats joined. */
function utilityFigure(compare) {
  const { runs } = compare, attacks = [...new Set(compare.points.map(p => p.attack))];
  const limits = runs.filter(r => r.limit !== null && r.accuracy !== null), numbers = new Map(runs.map((r, i) => [r.id, i + 1]));
  const height = 400 + legendHeight(runs.length + attacks.length + 2);
  const drawing = node => {
    const colours = new Map(runs.map((r, i) => [r.id, colour(r.colour_index ?? i)]));
    const symbols = new Map(attacks.map((a, i) => [a, SYMBOLS[i % SYMBOLS.length]]));
    const key = { x: [null], y: [null], mode: "markers", hoverinfo: "skip" };
    const traces = [
      frontTrace(compare),
      ...(limits.length ? [limitTrace(limits, compare.metric)] : []),
      ...compare.points.map(p => pointTrace(p, compare, colours.get(p.run), symbols.get(p.attack), numbers.get(p.run))),
      ...runs.map(r => ({ ...key, name: `${numbers.get(r.id)}  ${plain(r.id)}`, marker: { color: colours.get(r.id), symbol: "square", size: 12 } })),
      ...attacks.map(a => ({
        ...key, name: plain(a), marker: { color: look("--ink"), symbol: `${symbols.get(a)}-open`, size: 10 },
      })),
    ];
    const x = {
      uirevision: compare.metric, title: { text: `${plain(compare.label)}, mean`, standoff: 6 },
      ...(compare.lower_is_worse ? { autorange: "reversed" } : {}),
    };
    draw(node, traces, layout(x, { title: { text: "test accuracy" }, tickformat: ".0%" }, height, { hovermode: "closest" }));
  };
  return figure("Test accuracy against leakage", utilityMeaning(compare), drawing, height);
}

/** The runs that none beats in both, in the order of leakage: each by its strongest attack's point. */
const front = compare => compare.points.filter(p => p.pareto).sort((a, b) => a.mean - b.mean);

function frontTrace(compare) {
  const points = front(compare);
  return {
    x: points.map(p => p.mean), y: points.map(p => p.accuracy), mode: "lines", name: "Pareto front",
    line: { color: look("--muted"), dash: "dash", width: 1.5 }, hoverinfo: "skip",
  };
}

/** What no attack on a run exceeds, at the run's accuracy. */
function limitTrace(runs, metric) {
  const told = runs.map(r => `${plain(r.id)}: limit ${inMetric(metric, r.limit)}`);
  const marker = { symbol: "line-ns-open", size: 12, color: look("--limit"), line: { width: 2 } };
  return {
    x: runs.map(r => r.limit), y: runs.map(r => r.accuracy), mode: "markers", name: "limit of a run", marker, customdata: told,
    hovertemplate: "%{customdata}<extra></extra>",
  };
}

const epsilon = p => p.epsilon === null ? "no epsilon" : `epsilon ${p.epsilon.toPrecision(3)} for one record`;

function pointTrace(p, compare, color, symbol, number) {
  const band = p.low === null || p.high === null ? undefined : {
    type: "data", symmetric: false, array: [p.high - p.mean], arrayminus: [p.mean - p.low], color, thickness: 1.2,
  };
  const leakage = `${inMetric(compare.metric, p.mean)} (${interval(p, compare.metric) || "no interval"})`;
  const told = `${plain(p.run)}, ${plain(p.attack)}<br>${leakage}<br>test accuracy ${percent(p.accuracy)}<br>${epsilon(p)}`;
  return {
    x: [p.mean], y: [p.accuracy], error_x: band, marker: { color, symbol, size: 11 }, showlegend: false,
    mode: p.strongest ? "markers+text" : "markers", text: [number], textposition: "top right",
    hovertemplate: `${told}<extra></extra>`,
  };
}

function utilityMeaning(compare) {
  const names = front(compare).map(p => p.run);
  if (!names.length) return "No run has both a test accuracy and a score yet.";
  const better = "Towards the top left is better: accurate, and little leaks. A run's number stands at its strongest attack.";
  return `${better} No other run is both more accurate and leaks less than ${names.join(", ")}.`;
}

function curvesFigure(compare) {
  const attacks = [...new Set(compare.points.map(p => p.attack))];
  const colours = new Map(compare.runs.map((r, i) => [r.id, r.colour_index ?? i]));
  const alone = compare.runs.length > PALETTE.light.length; // more lines than colours: of each run the strongest attack's
  const strongest = new Set(compare.points.filter(p => p.strongest).map(p => `${p.run} ${p.attack}`));
  const chosen = compare.curves.filter(c => !alone || strongest.has(`${c.run} ${c.attack}`));
  const curves = chosen.filter(c => c.mean.some(v => v !== null)), height = 340 + legendHeight(curves.length);
  const drawing = node => {
    const traces = curves.map(c => {
      const color = colour(colours.get(c.run)), symbol = SYMBOLS[attacks.indexOf(c.attack) % SYMBOLS.length];
      const told = c.mean.map(v => inMetric(compare.metric, v));
      return {
        x: c.x, y: c.mean, name: `${plain(c.run)}, ${plain(c.attack)}`, customdata: told, hovertemplate: "%{customdata}",
        mode: "lines+markers", line: { color, width: 2 }, marker: { color, symbol, size: 7 },
      };
    });
    const last = Math.max(1, ...curves.flatMap(c => c.x));
    const more = { hovermode: "x unified", legend: { ...legend(), entrywidth: 320 } };
    draw(node, traces, layout(roundAxis(last), { title: { text: plain(compare.label) } }, height, more));
  };
  const which = alone ? " Of each run its strongest attack is drawn." : "";
  const meaning = `Means over the examples of a round. Colours are runs, symbols attacks, as above.${which}`;
  return figure("Leakage over rounds, run by run", meaning, drawing, height);
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
      marker: { color: look("--leak"), size: 13, symbol: "circle-open", line: { width: 3 } }, hoverinfo: "skip",
    };
    const logarithmic = y.every(v => v > 0) ? { type: "log", exponentformat: "power" } : {};
    const axis = { title: { text: "objective" }, ...logarithmic };
    draw(node, [line, here], layout({ title: { text: "iteration", standoff: 6 } }, axis, height, { showlegend: false }));
  };
  const [from, to] = [trace.objective[0], trace.objective.at(-1)].map(v => v === null ? "no number" : v.toPrecision(3));
  const taken = many(trace.iterations.at(-1), "iteration");
  const meaning = `${attack} takes its own objective from ${from} to ${to} in ${taken}; it never sees the true image.`;
  return figure("The attack's objective", meaning, drawing, height);
}

// ----------------------------------------------------------------------------------------------------------- controls
// What they choose is kept in a state (URLSearchParams); change(values) puts new values into it and shows what follows.

function assign(state, values) {
  for (const [key, value] of Object.entries(values)) {
    state.delete(key);
    for (const one of [value].flat()) if (one !== null && one !== "") state.append(key, one);
  }
}

function check(name, checked, onchange) {
  const box = el("input", { type: "checkbox", onchange });
  box.checked = checked;
  return el("label.check", { "data-key": `check-${name}` }, box, name);
}

/** A labelled choice; options: [value, words]. */
function choice(label, value, options, onchange) {
  const items = options.map(([key, words]) => el("option", { value: key }, words));
  const chosen = event => onchange(event.target.value);
  return el("label.choice", label, el("select", { "aria-label": label, onchange: chosen, value: String(value) }, items));
}

/** A slider over some steps; words says what a step is. */
function slider(label, step, steps, words, onstep) {
  const said = el("output", words(step));
  const move = event => {
    const chosen = Number(event.target.value);
    event.target.setAttribute("aria-valuetext", words(chosen));
    event.target.parentNode.querySelector("output").textContent = words(chosen);
    onstep(chosen);
  };
  const range = el("input", {
    type: "range", min: 0, max: Math.max(0, steps - 1), step: 1, "aria-label": label, "aria-valuetext": words(step),
    disabled: steps < 2, oninput: move, value: step,
  });
  return el("label.slider", el("span", label), range, said);
}

// ------------------------------------------------------------------------------------------------------------- tables

/**
 * A table that sorts where its heads are pressed.
 * columns: {key, head, text (left-aligned words), value(row) to sort by, cell(row) to show, less (small numbers first)}
 */
function table({ id, caption, columns, rows, key, mark = () => "", state, change }) {
  const by = state.get(`by.${id}`) || "", down = by.startsWith("-"), sorted = columns.find(c => c.key === by.replace(/^-/, ""));
  const ordered = sorted ? [...rows].sort(comparison(sorted.value, down)) : rows;
  const head = column => {
    const own = column === sorted, next = own ? !down : !column.text && !column.less;
    const press = () => change({ [`by.${id}`]: (next ? "-" : "") + column.key });
    const arrow = el("span.arrow", { "aria-hidden": "true" }, own ? (down ? "▼" : "▲") : "↕");
    const order = own ? (down ? "descending" : "ascending") : "none";
    const button = el("button", { type: "button", onclick: press }, column.head, arrow);
    return el("th", { scope: "col", class: column.text && "text", "aria-sort": order }, button);
  };
  const cells = row => columns.map(c => el("td", { class: c.text && "text" }, c.cell(row)));
  const lines = ordered.map(row => el("tr", { "data-key": key(row), class: mark(row) }, cells(row)));
  return grid(caption, columns.map(head), lines);
}

/** A table that can be scrolled, by keys too. */
function grid(caption, heads, lines) {
  const body = el("table", el("caption", caption), el("thead", el("tr", heads)), el("tbody", lines));
  return el("div.wide", { tabindex: 0, role: "region", "aria-label": caption }, body);
}

/** Missing values last, whichever way. */
function comparison(value, down) {
  const missing = v => v === null || v === undefined;
  return (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (missing(x) || missing(y)) return missing(x) - missing(y);
    const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
    return down ? -order : order;
  };
}

/** A table that does not sort; its last column is of longer words. */
function list(caption, heads, rows) {
  const cell = (words, i, row) => el("td", { class: i === row.length - 1 ? "text reason" : "text" }, words);
  return grid(caption, heads.map(h => el("th.text", { scope: "col" }, h)), rows.map(row => el("tr", row.map(cell))));
}

const small = text => el("span.small", text);
const raw = (value, exact) => exact ? Infinity : value;
const hits = rate => rate ? `${rate.count} of ${rate.n}` : NONE;
const wilson = rate => rate && rate.low !== undefined && small(`${percent(rate.low)} to ${percent(rate.high)}`);
// columns that several tables have
const HITS = {
  key: "identified", head: "identified", value: r => r.identified && r.identified.count / r.identified.n,
  cell: r => [hits(r.identified), wilson(r.identified)],
};
const LABELS = { key: "labels", head: "labels", value: r => r.labels, cell: r => percent(r.labels) };
const EXAMPLES = { key: "n", head: "examples", value: r => r.n, cell: r => r.kind === "limit" ? NONE : String(r.n) };

function leakageColumns(metric, less, unit) {
  const sign = PERCENTAGES.test(metric) ? "%" : "dB";
  const told = value => inMetric(metric, value, unit), head = words => unit === "" ? `${words} (${sign})` : words;
  return {
    mean: { key: "mean", head: head("mean"), less, value: r => r.mean, cell: r => told(r.mean) },
    interval: { key: "low", head: "95 % interval", less, value: r => r.low, cell: r => interval(r, metric) || NONE },
    worst: {
      key: "worst", head: head("worst case"), less, value: r => raw(r.worst, r.exact),
      cell: r => r.exact ? "∞" : told(r.worst),
    },
  };
}

function summaryTable(rows, state, change, measure) {
  const { metric, name: called, unit, private: noun } = measure, without = `without ${noun === "image" ? "an image" : `a ${noun}`}`;
  const name = r => [r.attack, r.kind !== "attack" && small(r.kind), r.failed && small(`${without}: ${r.failed}`),
    r.ungraded && small(`${many(r.ungraded, "reconstruction")} not graded`)];
  const { mean, interval, worst } = leakageColumns(metric, false, "");
  const columns = [
    { key: "attack", head: "attack", text: true, value: r => r.attack, cell: name },
    EXAMPLES, { ...mean, head: `mean ${called} (${unit})` }, interval,
    { key: "median", head: `median (${unit})`, value: r => r.median, cell: r => inMetric(metric, r.median, "") },
    worst, HITS, LABELS,
  ];
  const mark = r => r.kind === "attack" ? "" : "baseline";
  return table({ id: "summary", caption: "All rounds together", columns, rows, key: r => r.attack, mark, state, change });
}

// ------------------------------------------------------------------------------------------------------------ gallery

const SORTS = [["leak", "worst leak first"], ["hidden", "best hidden first"], ["client", "by client"]];

/** Cards of a round with its controls; link(card): the address of an image through all rounds, or none. */
function gallery(data, state, change, link) {
  if (!data.rounds.length) return el("p.empty", "Nothing has been reconstructed yet: images appear here once an attack is done.");
  const none = el("p.empty", "No example matches: choose another client, attack or class.");
  const found = data.cards.length ? cards(data.cards, data.kind, link) : none;
  const head = [galleryControls(data, state, change), galleryWords(data), data.kind === "text" && tokenLegend()];
  return el("div.gallery", head, found, pager(data, change));
}

const cardKey = card => `${card.round}-${card.client}-${card.example}`;

function cards(found, kind, link) {
  return el("ul.cards", found.map(card => el("li", { "data-key": cardKey(card) }, cardOf(card, kind, link))));
}

function galleryControls(data, state, change) {
  const round = state.get("round") || String(data.round), all = round === "all"; // what is asked for: the cards may come later
  const step = all ? data.rounds.length - 1 : Math.max(0, data.rounds.map(String).indexOf(round));
  const words = i => all && i === step ? "all rounds" : `round ${data.rounds[i]}`;
  const reset = values => change({ offset: null, ...values });
  const pick = (label, key, values) => {
    const options = [["", "all"], ...values.map(value => [value, String(value)])];
    return choice(label, state.get(key) || "", options, value => reset({ [key]: value }));
  };
  return el("div.controls",
    slider("Round", step, data.rounds.length, words, i => reset({ round: data.rounds[i] })),
    check("all rounds", all, () => reset({ round: all ? null : "all" })),
    choice("Sort", state.get("sort") || "leak", SORTS, value => reset({ sort: value })),
    pick("Client", "client", data.clients), pick("Attack", "attack", data.attacks), pick("Class", "label", data.labels));
}

const EACH = {
  text: "Each card: the true text, then what each attack made of the update.",
  image: "Each card: the true image; then, for each attack, what it made of the update and how that differs from the truth "
    + "(black: not at all). A higher PSNR leaks more. Labels: ✓ right, ✗ wrong.",
};

function galleryWords(data) {
  const where = data.round === "all" ? `in ${many(data.rounds.length, "attacked round")}` : `in round ${data.round}`;
  const absent = data.cards.length > 0 && data.cards.every(card => card.absent) && data.cards[0].absent;
  const each = absent ? `Each card: what each attack made of the update; ${absent}.` : EACH[data.kind];
  return el("p.meaning", el("strong", { "aria-live": "polite" }, `${many(data.total, "example")} ${where}.`), ` ${each}`);
}

function pager(data, change) {
  const last = Math.min(data.total, data.offset + data.page);
  if (data.total <= data.page) return null;
  const turn = offset => change({ offset: offset > 0 ? offset : null });
  return el("nav.pager", { "aria-label": "Pages of examples" },
    el("button", { type: "button", disabled: data.offset === 0, onclick: () => turn(data.offset - data.page) }, "← Previous"),
    el("span", `${data.offset + 1} to ${last} of ${data.total}`),
    el("button", { type: "button", disabled: last >= data.total, onclick: () => turn(data.offset + data.page) }, "Next →"));
}

function cardOf(card, kind, link) {
  const address = link && link(card), words = `client ${card.client} · round ${card.round} · example ${card.example}`;
  const title = el("h3.who", address ? el("a", { href: address }, words) : words, card.why && [" · ", el("b", card.why)]);
  return el("article", { class: address ? "card opens" : "card" }, title, kind === "text" ? texts(card) : tiles(card));
}

/** The truth, then of each attack what it made of it beside the difference. */
function tiles(card) {
  const words = el("figcaption", el("b", "truth"), card.label !== null && ` label ${card.label}`);
  const truth = el("figure", picture(card.truth, "the private image", card.absent), words);
  return el("div.tiles", truth, card.tiles.map(tile => pair(card.truth, tile)));
}

function pair(truth, tile) {
  const note = [!tile.image && "no image: ", el("b", tile.note), tile.label && ` ${tile.label}`];
  const image = tile.image && picture(tile.image, `reconstruction by ${tile.attack}`);
  const words = el("figcaption", breakable(tile.attack), el("br"), note);
  return el("figure.pair", image, truth && tile.image && difference(truth, tile.image), words);
}

const picture = (source, alt, without = "no image") => source ? el("img", { src: source, alt }) : el("div.none", without);

/** Two images on top of each other: the browser takes their difference. */
function difference(truth, image) {
  const pair = [truth, image].map(source => el("img", { src: source, alt: "" }));
  return el("div.difference", { role: "img", "aria-label": "difference" }, pair);
}

/** A name that may be broken after its underscores. */
const breakable = name => name.split(/(?<=_)/).flatMap((part, i) => i ? [el("wbr"), part] : [part]);

// --------------------------------------------------------------------------------------------------------------- text

const TOKENS = [["right", "right"], ["misplaced", "right, but misplaced"], ["wrong", "wrong"]];

function texts(card) {
  const line = (name, tokens, note) => el("div.text-line", el("dt", name, note && el("b", note)), el("dd", tokens));
  const truth = card.truth_words ? card.truth_words.map(w => token(w, "")) : card.absent;
  const guess = tile => tile.words ? tile.words.map(([word, kind]) => token(word, kind)) : "no text";
  return el("dl.texts", line("truth", truth), card.tiles.map(tile => line(breakable(tile.attack), guess(tile), tile.note)));
}

/** A token marked by colour and by underline, and in words for those who hear it. */
function token(word, kind) {
  return el("span", { class: `token ${kind}` }, word, kind && kind !== "right" && el("span.hidden", ` (${kind})`));
}

function tokenLegend() {
  return el("p.small.legend", "Tokens: ", TOKENS.map(([kind, words]) => el("span", { class: `token ${kind}` }, words)));
}

// ------------------------------------------------------------------------------------------------------ several runs

const section = (title, ...children) => el("section.section", { "data-key": title }, el("h2", title), children);

/** Sections that set runs side by side; named: how a run's name is shown. */
function sideBySide(compare, state, change, named) {
  return [
    section("Utility against leakage", utilityFigure(compare)),
    section("Run by attack", matrix(compare, named)),
    section("All numbers", compareTable(compare, state, change, named)),
    section("Over rounds", curvesFigure(compare)),
    compare.runs.length > 1 && section("How the scenarios differ", differences(compare)),
  ];
}

/** Mean leakage of each attack on each run; the tint goes from the baseline to the highest cell. */
function matrix({ matrix: m, metric, label, lower_is_worse, runs }, named) {
  const flat = m.mean.flat().concat(m.baseline).filter(v => v !== null);
  const low = Math.min(...flat), high = Math.max(...flat);
  const tint = v => Math.round(100 * (lower_is_worse ? high - v : v - low) / (high - low || 1));
  const cell = v => v === null ? el("td", NONE) : el("td.tint", { vars: { "--tint": `${tint(v)}%` } }, inMetric(metric, v));
  const head = words => el("th", { scope: "col" }, breakable(words));
  const price = r => [
    el("td", r.limit === null ? NONE : inMetric(metric, r.limit)), el("td", r.accuracy === null ? NONE : percent(r.accuracy)),
    el("td", r.epsilon === null ? NONE : r.epsilon.toPrecision(3)),
  ];
  const prices = ["best baseline", "limit", "test accuracy", "epsilon"].map(head);
  const heads = [el("th.text", { scope: "col" }, "run"), m.columns.map(head), prices];
  const name = run => el("th.text", { scope: "row" }, named(run));
  const line = (run, i) => el("tr", { "data-key": run }, name(run), m.mean[i].map(cell), cell(m.baseline[i]), price(runs[i]));
  return grid(`Mean ${label}, run by attack; deeper leaks more, – gave no value`, heads, m.rows.map(line));
}

function compareTable(compare, state, change, named) {
  const { mean, interval, worst } = leakageColumns(compare.metric, compare.lower_is_worse);
  const columns = [
    { key: "run", head: "run", text: true, value: r => r.run, cell: r => [named(r.run), small(r.chain)] },
    { key: "attack", head: "attack", text: true, value: r => r.attack, cell: r => r.attack },
    { key: "accuracy", head: "test accuracy", value: r => r.accuracy, cell: r => percent(r.accuracy) },
    mean, interval, worst, HITS, LABELS, EXAMPLES,
    {
      key: "epsilon", head: "epsilon", less: true, value: r => r.epsilon,
      cell: r => [r.epsilon === null ? NONE : r.epsilon.toPrecision(3), small(r.privacy)],
    },
  ];
  const caption = `Every attack on every run, ${compare.label}`;
  return table({ id: "compare", caption, columns, rows: compare.table, key: r => `${r.run} ${r.attack}`, state, change });
}

function differences({ differences: found, same, runs }) {
  if (!found.length) return el("p", `They do not: all ${same} settings agree.`);
  const rows = found.map(d => [d.key, ...d.values]), heads = ["setting", ...runs.map(run => run.id)];
  return [list("Settings that differ", heads, rows), el("p.small", `${many(same, "other setting")} agree.`)];
}
