"use strict";
// Numbers and names as text, for the live page and the reports; numbers as in server/views/formatting.py.

const NONE = "–";
const isMissing = value => value === null || value === undefined;

/** Digits with halves rounded to even, as Python writes them, where JavaScript rounds halves up; write: digits => text. */
function halfToEven(write, digits) {
  const exact = write(digits + 25), half = /([02468])\.?50{24}(?=e|$)/;
  return half.test(exact) ? exact.replace(half, "$1") : write(digits);
}

const fixed = (value, digits) => halfToEven(n => value.toFixed(n), digits).replace(/^-(?=[0.]+$)/, "");
const percent = (value, digits = 0) => isMissing(value) ? NONE : `${fixed(100 * value, digits)}\u00a0%`;

/** Three significant digits. */
function decimal(value) {
  if (isMissing(value)) return NONE;
  const [digits, power] = halfToEven(n => value.toExponential(n), 2).split("e");
  if (power >= -4 && power < 3) return String(Number(`${digits}e${power}`));
  return `${Number(digits)}e${power[0]}${power.slice(1).padStart(2, "0")}`;
}

const many = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const plain = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

/** A value of a metric, which the data says how to show; an infinite one is text. */
function inMetric({ digits, unit, fraction }, value) {
  if (isMissing(value)) return NONE;
  if (fraction) return percent(value);
  const number = typeof value === "string" ? value : digits === null ? decimal(value) : fixed(value, digits);
  return unit ? `${number} ${unit}` : number;
}

/** The item of the highest value; undefined if there is none. */
function highest(items, value) {
  return items.filter(i => !isMissing(value(i))).sort((a, b) => value(b) - value(a))[0];
}
