"use strict";
// Several runs side by side: accuracy against leakage, numbers, curves, and how the scenarios differ.

/** Sections that compare runs; cells: how a run's name is shown. */
function sideBySide(compared, state, change, cells) {
  return [
    section("Utility against leakage", compared.utility ? specified(compared.utility) : el("p.empty", "No run has both a test accuracy and a score yet.")),
    section("All numbers", table(compared.points, { sorts: "compare", state, change, cells })),
    compared.runs.length > 1 && section("How the scenarios differ", table(compared.differences)),
  ];
}
