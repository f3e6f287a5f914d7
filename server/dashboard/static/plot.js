"use strict";
// What all Plotly figures share: colours, layout and drawing. Plotly reads some markup, so text from a run goes through plain().

const scheme = window.matchMedia("(prefers-color-scheme: dark)");
const narrow = window.matchMedia("(max-width: 600px)");
// Okabe and Ito's palette, which the colour-blind can tell apart; on a dark page the bright ones come first
const PALETTE = {
  light: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"],
  dark: ["#56b4e9", "#e69f00", "#2fc49a", "#cc79a7", "#f0e442", "#d55e00"],
};
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "star"];
const DASHES = ["dash", "dashdot", "longdash", "longdashdot", "2px,4px", "8px,2px"];

const cssVariable = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = index => PALETTE[scheme.matches ? "dark" : "light"][index % PALETTE.light.length];
/** A name for a legend, in two lines if it is long. */
const folded = name => plain(name.length > 34 ? name.replace(/^(.{18,34}) /, "$1\n") : name).replace("\n", "<br>");
const translucent = hex => `rgba(${[1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16)).join()},.2)`;

// attacks get colours in the plan's order, limits a colour of their own, baselines greys
function styles(series, planned) {
  let baselines = 0;
  return series.map(s => {
    if (s.kind === "limit") return { color: cssVariable("--limit"), dash: "longdashdot", symbol: "line-ew", width: 2.2, opacity: 1 };
    if (s.kind === "baseline") return {
      color: cssVariable("--muted"), dash: DASHES[baselines++ % DASHES.length], symbol: "line-ew", width: 1.3, opacity: .75,
    };
    const place = planned.indexOf(s.name);
    return { color: colour(place), dash: "solid", symbol: SYMBOLS[place % SYMBOLS.length], width: 2.4, opacity: 1 };
  });
}

const planned = knowledge => knowledge.cards.filter(card => card.kind === "attack").map(card => card.name);

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
  orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, xanchor: "left", entrywidth: narrow.matches ? 260 : 230,
});

/** The height that a legend with this many entries needs below a figure. */
const legendHeight = entries => 21 * Math.ceil(entries / (narrow.matches ? 1 : 3));

function draw(node, traces, shape) {
  if (!window.Plotly) return; // Plotly's script loads last, and redraw() is called then
  // Plotly's default tool bar has a button that sends the figure's data to Plotly's server
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

/** A figure with a name for screen readers and a caption that says what it shows. */
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
