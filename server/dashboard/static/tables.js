"use strict";
// Tables, as server/views/tables.py makes them: typed columns, and rows of plain values.

/** A cell as text, as `Column.written` writes it. */
function written(column, cell) {
  if (isMissing(cell) || cell === "") return NONE;
  const number = value => column.fraction ? percent(value, column.digits || 0) : inMetric(column, value);
  if (column.form === "rate") return `${cell[0]} of ${cell[1]}`;
  if (column.form === "interval") return `${number(cell[0])} to ${number(cell[1])}`;
  return column.form === "number" ? number(cell) : String(cell);
}

const raw = value => value === "∞" ? Infinity : value;

/** A cell's value to sort by. */
function sortable(column, cell) {
  if (isMissing(cell)) return null;
  return column.form === "rate" ? cell[0] / cell[1] : raw(column.form === "interval" ? cell[0] : cell);
}

/**
 * A table that scrolls, also by keyboard, and sorts when a heading is pressed if it has a name for its order in the state.
 * cells: by a column's key, what is shown of a row's record in place of its text.
 */
function table(spec, { sorts, state, change, cells = {} } = {}) {
  const { columns, rows } = spec, by = sorts && state.get(`by.${sorts}`) || "", down = by.startsWith("-");
  const place = columns.findIndex(column => column.key === by.replace(/^-/, ""));
  const value = row => sortable(columns[place], row[place]), ordered = place < 0 ? rows : [...rows].sort(comparison(value, down));
  const head = (column, i) => {
    const own = i === place, next = own ? !down : column.form !== "text" && !column.less, side = column.form === "text" && "text";
    if (!sorts) return el("th", { scope: "col", class: side }, column.head);
    const press = () => change({ [`by.${sorts}`]: (next ? "-" : "") + column.key });
    const arrow = el("span.arrow", { "aria-hidden": "true" }, own ? (down ? "▼" : "▲") : "↕");
    const order = own ? (down ? "descending" : "ascending") : "none";
    return el("th", { scope: "col", class: side, "aria-sort": order }, el("button", { type: "button", onclick: press }, column.head, arrow));
  };
  const line = row => {
    const record = Object.fromEntries(columns.map((column, i) => [column.key, row[i]]));
    const kind = record.kind && record.kind !== "attack" && "baseline";
    const cell = (column, i) => el("td", { class: column.form === "text" && (i === row.length - 1 ? "text reason" : "text") },
      cells[column.key] ? cells[column.key](record) : written(column, row[i]));
    return el("tr", { "data-key": JSON.stringify(row.slice(0, 2)), class: kind }, columns.map(cell));
  };
  const body = el("table", el("caption", spec.caption), el("thead", el("tr", columns.map(head))), el("tbody", ordered.map(line)));
  return el("div.wide", { tabindex: 0, role: "region", "aria-label": spec.caption }, body);
}

/** Compare values; missing ones come last in either direction. */
function comparison(value, down) {
  return (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (isMissing(x) || isMissing(y)) return isMissing(x) - isMissing(y);
    const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
    return down ? -order : order;
  };
}
