"use strict";
// Numbers and names as text, for the live page and the reports.

const NONE = "–";

const percent = value => value === null || value === undefined ? NONE : `${Math.round(100 * value)}\u00a0%`;
const decimal = value => value === null || value === undefined ? NONE : value.toPrecision(3);
const many = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const article = noun => /^[aeiou]/.test(noun) ? "an" : "a";
const plain = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

/** A value of a metric, which the data says how to show; bare: its unit stands elsewhere. */
function inMetric({ digits, unit, fraction }, value, bare = false) {
  if (value === null || value === undefined) return NONE;
  if (fraction) return percent(value);
  const number = digits === null ? value.toPrecision(3) : value.toFixed(digits);
  return bare || !unit ? number : `${number} ${unit}`;
}

function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function interval(row, metric) {
  return row.low === null || row.high === null ? "" : `${inMetric(metric, row.low, true)} to ${inMetric(metric, row.high, true)}`;
}

/** The item of the highest value; undefined if there is none. */
function highest(items, value) {
  return items.filter(i => value(i) !== null && value(i) !== undefined).sort((a, b) => value(b) - value(a))[0];
}
