"use strict";
// Controls. Their values live in a state (URLSearchParams); change(values) stores new ones and redraws what depends on them.

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

/** A labelled choice; options: [value, text]. */
function choice(label, value, options, onchange) {
  const items = options.map(([key, words]) => el("option", { value: key }, words));
  const chosen = event => onchange(event.target.value);
  return el("label.choice", label, el("select", { "aria-label": label, onchange: chosen, value: String(value) }, items));
}

/** A slider over some steps; words(i) names a step. */
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
