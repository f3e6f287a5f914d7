"use strict";
// Tables that sort when a heading is pressed, and plain ones.

/**
 * A table that sorts when a heading is pressed.
 * columns: {key, head, text (left-aligned), value(row) to sort by, cell(row) to show, less (small numbers first),
 * first (on a narrow page before the others, as text is)}
 */
function table({ id, caption, columns: all, rows, key, mark = () => "", state, change }) {
  const columns = narrow.matches ? [...all].sort((a, b) => Boolean(b.first || b.text) - Boolean(a.first || a.text)) : all;
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

/** A table that scrolls, also by keyboard. */
function grid(caption, heads, lines) {
  const body = el("table", el("caption", caption), el("thead", el("tr", heads)), el("tbody", lines));
  return el("div.wide", { tabindex: 0, role: "region", "aria-label": caption }, body);
}

/** Compare values; missing ones come last in either direction. */
function comparison(value, down) {
  const missing = v => v === null || v === undefined;
  return (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (missing(x) || missing(y)) return missing(x) - missing(y);
    const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
    return down ? -order : order;
  };
}

/** A table that does not sort; its last column holds longer text. */
function list(caption, heads, rows) {
  const cell = (words, i, row) => el("td", { class: i === row.length - 1 ? "text reason" : "text" }, words);
  return grid(caption, heads.map(h => el("th.text", { scope: "col" }, h)), rows.map(row => el("tr", row.map(cell))));
}

const small = text => el("span.small", text);
const raw = (value, exact) => exact ? Infinity : value;
const hits = rate => rate ? `${rate.count} of ${rate.n}` : NONE;
const wilson = rate => rate && rate.low !== undefined && el("span.small.detail", `${percent(rate.low)} to ${percent(rate.high)}`);
// columns that several tables have
const HITS = {
  key: "identified", head: "identified", first: true, value: r => r.identified && r.identified.count / r.identified.n,
  cell: r => [hits(r.identified), wilson(r.identified)],
};
const LABELS = { key: "labels", head: "labels", first: true, value: r => r.labels, cell: r => percent(r.labels) };
const EXAMPLES = { key: "n", head: "examples", value: r => r.n, cell: r => r.kind === "limit" ? NONE : String(r.n) };

const inDecibel = value => isMissing(value) ? NONE : fixed(value, 1);
const OF_ERROR = {
  key: "of_error", head: "PSNR of the mean error (dB)", value: r => r.of_error, cell: r => inDecibel(r.of_error),
};

function leakageColumns(metric, bare) {
  const less = !metric.higher_is_better;
  const shown = value => inMetric(metric, value, bare), head = words => bare ? `${words} (${metric.unit})` : words;
  return {
    mean: { key: "mean", head: head("mean"), less, first: true, value: r => r.mean, cell: r => shown(r.mean) },
    interval: { key: "low", head: "95 % interval", less, value: r => r.low, cell: r => interval(r, metric) || NONE },
    worst: {
      key: "worst", head: head("worst case"), less, first: true, value: r => raw(r.worst, r.exact),
      cell: r => r.exact ? "∞" : shown(r.worst),
    },
  };
}

function summaryTable(rows, state, change, measure) {
  const { name: called, unit, private: noun } = measure, without = `without ${article(noun)} ${noun}`;
  const name = r => [breakable(r.attack), r.kind !== "attack" && small(r.kind), r.failed && small(`${without}: ${r.failed}`),
    r.ungraded > 0 && small(`${many(r.ungraded, "reconstruction")} not graded`)];
  const { mean, interval, worst } = leakageColumns(measure, true);
  const columns = [
    { key: "attack", head: "attack", text: true, value: r => r.attack, cell: name },
    EXAMPLES, { ...mean, head: `mean ${called} (${unit})` }, interval,
    { key: "median", head: `median (${unit})`, value: r => r.median, cell: r => inMetric(measure, r.median, true) },
    worst, ...(rows.some(r => r.of_error !== null) ? [OF_ERROR] : []), HITS, LABELS,
  ];
  const mark = r => r.kind === "attack" ? "" : "baseline";
  return table({ id: "summary", caption: "All rounds together", columns, rows, key: r => r.attack, mark, state, change });
}

/** A table of server/views/tables.py. */
const printed = ({ caption, heads, rows }) => list(caption, heads, rows);
