"use strict";
// What all Plotly figures share: colours, layout and drawing. Plotly reads some markup, so text from a run goes through plain().

const scheme = window.matchMedia("(prefers-color-scheme: dark)");
const narrow = window.matchMedia("(max-width: 600px)");
const cssVariable = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = place => cssVariable(`--series-${place % 6}`);
/** A name for a legend, in two lines if it is long. */
const folded = name => plain(name.length > 34 ? name.replace(/^(.{18,34}) /, "$1\n") : name).replace("\n", "<br>");
const translucent = hex => `rgba(${[1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16)).join()},.2)`;

function layout(x, y, height, more) {
  const axis = { gridcolor: cssVariable("--line"), zerolinecolor: cssVariable("--line"), linecolor: cssVariable("--line"), automargin: true };
  return {
    paper_bgcolor: cssVariable("--page"), plot_bgcolor: cssVariable("--page"), height, uirevision: "kept",
    font: { family: "system-ui, -apple-system, 'Segoe UI', sans-serif", size: 13, color: cssVariable("--ink") },
    margin: { l: 52, r: narrow.matches ? 44 : 56, t: 32, b: 48 },
    hoverlabel: { bgcolor: cssVariable("--panel"), bordercolor: cssVariable("--line"), font: { color: cssVariable("--ink"), size: 12 } },
    legend: legend(),
    ...more, xaxis: { ...axis, ...x }, yaxis: { ...axis, ...y },
  };
}

const legend = () => ({
  orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, xanchor: "left", maxheight: 1, entrywidth: narrow.matches ? 260 : 230,
});

/** The height that a legend with this many entries needs below a figure. */
const legendHeight = entries => 30 * Math.ceil(entries / (narrow.matches ? 1 : 3));

function draw(node, traces, shape) {
  if (!window.Plotly) return; // Plotly's script loads last, and redraw() is called then
  // Plotly's default tool bar has a button that sends the figure's data to Plotly's server
  const tools = {
    toImageButtonOptions: { format: "svg" }, displaylogo: false, showSendToCloud: false, plotlyServerURL: "",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };
  Plotly.react(node, traces, shape, { responsive: true, ...tools });
}

function redraw() {
  document.querySelectorAll("[data-draw]").forEach(node => node.draw(node));
}
scheme.addEventListener("change", redraw);
narrow.addEventListener("change", redraw);

/** A figure with a name for screen readers and a caption that says what it shows. */
function figure(name, meaning, drawing, height) {
  const picture = el("div.plot",
    { role: "group", "aria-label": `${name}. ${meaning}`, vars: { "--height": `${height}px` } }, el("div", { draw: drawing }),
  );
  return el("figure", { "data-key": name }, picture, el("figcaption.meaning", meaning));
}

/** An axis of a specification; a fraction's that is whole has a line at every quarter. */
function axis({ label, kind, low, high }) {
  const open = low === null || high === null, whole = high - low > 1, ends = kind === "log" ? [Math.log10(low), Math.log10(high)] : [low, high];
  return {
    title: { text: plain(label), standoff: 6 }, unifiedhovertitle: { text: `${plain(label)}: %{x}` },
    ...(open ? { rangemode: "tozero" } : { range: ends }),
    ...(kind === "round" ? { tickformat: "d", ...(high < 12 ? { dtick: 1 } : {}) } : {}),
    ...(kind === "fraction" ? { tickformat: whole ? ".0%" : "~%", ...(whole ? { dtick: .25 } : {}) } : {}),
    ...(kind === "log" ? { type: "log", tickvals: [.001, .01, .1, 1], ticktext: ["0.1 %", "1 %", "10 %", "100 %"] } : {}),
  };
}

/**
 * A figure as server/views/figures.py specifies it.
 * shown(series): whether it is drawn, or else only named in the legend; then the legend itself switches nothing.
 */
function specified(spec, shown, worst = true) {
  const height = 320 + legendHeight(spec.series.filter(s => s.name).length);
  const drawing = node => {
    const traces = spec.series.flatMap(s => seriesTraces(s, Boolean(spec.right), !shown || shown(s), worst));
    const right = spec.right && { ...axis(spec.right), overlaying: "y", side: "right", showgrid: false };
    if (right && narrow.matches) right.title = { text: "" };
    const hovermode = spec.x.kind === "fraction" ? "closest" : "x unified";
    const more = { hovermode, ...(right ? { yaxis2: right } : {}), legend: { ...legend(), ...(shown ? { itemclick: false, itemdoubleclick: false } : {}) } };
    draw(node, traces, layout(axis(spec.x), { uirevision: spec.metric, ...axis(spec.y) }, height, more));
  };
  return figure(spec.title, spec.meaning, drawing, height);
}

function seriesTraces({ look, ...s }, right, shown, worst) {
  const name = folded(s.name), color = cssVariable(`--${look.colour}`), lone = s.x.length === 1;
  const named = { name, legendgroup: name || undefined, visible: shown || "legendonly", ...(right && s.role === "accuracy" ? { yaxis: "y2" } : {}) };
  const dash = look.dash.map(n => `${n}px`).join() || "solid", thin = look.symbol === "line-ew";
  const banded = s.x.map((_, k) => k).filter(k => (s.low[k] ?? null) !== null && (s.high[k] ?? null) !== null), traces = [];
  if (banded.length > 1 && shown) {
    const edge = { x: banded.map(k => s.x[k]), mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false, legendgroup: name };
    traces.push({ ...edge, y: banded.map(k => s.high[k]) });
    traces.push({ ...edge, y: banded.map(k => s.low[k]), fill: "tonexty", fillcolor: translucent(color) });
  }
  const line = s.x.length > 1, marked = look.symbol && (!line || (!thin && s.x.length < 40));
  traces.push({
    ...named, x: s.x.length ? s.x : [null], y: s.x.length ? s.mean : [null], showlegend: Boolean(s.name),
    mode: [line || !marked ? "lines" : "", marked ? "markers" : "", s.label ? "text" : ""].filter(Boolean).join("+"), text: [s.label], textposition: "top right",
    customdata: s.note.map(note => plain(note).replaceAll("\n", "<br>")), hovertemplate: s.note.length ? "%{customdata}" : "%{y:.3g}",
    line: { color, dash, width: look.width }, marker: { color, symbol: look.symbol || "circle", size: lone ? 10 : 7, line: { color, width: thin ? 2 : 0 } },
    error_y: lone && banded.length ? { type: "data", symmetric: false, array: [s.high[0] - s.mean[0]], arrayminus: [s.mean[0] - s.low[0]], color } : undefined,
  });
  if (s.worst.length && shown && worst) traces.push({
    x: s.x, y: s.worst, mode: "lines+markers", legendgroup: name, showlegend: false, hoverinfo: "skip",
    line: { color, dash: "dot", width: 1.5 }, marker: { color, symbol: `${look.symbol}-open`, size: 6 },
  });
  return traces;
}
