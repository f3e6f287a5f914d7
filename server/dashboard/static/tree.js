"use strict";
// Trees of elements. A view is a function from data to a tree; patch() changes the page in place to match such a tree, so that
// focus, scroll positions and opened parts stay. Text that comes from a run is always set as text, never as markup.

/** Create an element from its tag and classes (p.small), optional properties, and children. */
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

/** Draw the figures in a node that was just added to the page. */
function drawFigures(node) {
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

/** Children match by data-key if they have one, else by position and tag. */
function patchChildren(old, fresh) {
  const keyed = new Map([...old.children].filter(c => c.dataset.key).map(c => [c.dataset.key, c]));
  let place = old.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    const key = wanted.dataset?.key;
    const alike = place && !key && !place.dataset?.key && place.nodeName === wanted.nodeName ? place : null;
    const match = key ? keyed.get(key) : alike;
    if (!match) {
      old.insertBefore(wanted, place);
      drawFigures(wanted);
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

/** Give a node new children, by patching the old ones. */
function show(node, ...children) {
  patchChildren(node, el(node.tagName, ...children));
}

const section = (title, ...children) => el("section.section", { "data-key": title }, el("h2", title), children);
