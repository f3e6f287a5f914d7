"use strict";
// The gallery: private examples and their reconstructions, as images or as text.

/** The cards of a round, with controls. */
function gallery(data, state, change) {
  if (!data.rounds.length) return el("p.empty", "Nothing has been reconstructed yet: images appear here once an attack is done.");
  const none = el("p.empty", "No example matches: choose another client.");
  const found = data.cards.length ? cards(data.cards, data.kind) : none;
  const head = [galleryControls(data, state, change), galleryWords(data), data.kind === "text" && tokenLegend(data.cards.some(card => card.headings.length))];
  return el("div.gallery", head, found, pager(data, change));
}

const cardKey = card => `${card.round}-${card.client}-${card.example}`;

function cards(found, kind) {
  return el("ul.cards", found.map(card => el("li", { "data-key": cardKey(card) }, cardOf(card, kind))));
}

/** The few best-reconstructed private examples, or nothing; all: a link to all of them. */
function bestBack(worst, kind, noun, all) {
  if (!worst.length) return null;
  const words = `The ${many(worst.length, `private ${noun}`)} reconstructed best: `
    + `truth, reconstruction${kind === "text" ? "" : ", difference (black: none)"}. `;
  const few = { class: "worst", "data-key": "worst" }, title = el("h2.hidden", "Worst cases");
  return el("div", few, title, cards(worst, kind), el("p.small", words, all));
}

function galleryControls(data, state, change) {
  const round = state.get("round") || String(data.round ?? "all"), all = round === "all";
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
    pick("Client", "client", data.clients));
}

const EACH = {
  rows: "Each card shows the private row, then what each attack reconstructed, cell by cell.",
  text: "Each card shows the true text, then what each attack reconstructed.",
  image: "Each card shows the true image; then, for each attack, its reconstruction and the difference from the truth "
    + "(black: none). A higher PSNR leaks more. Labels: ✓ right, ✗ wrong.",
};

function galleryWords(data) {
  const where = data.round === null ? `in ${many(data.rounds.length, "attacked round")}` : `in round ${data.round}`;
  const absent = data.cards.length > 0 && data.cards.every(card => card.absent) && data.cards[0].absent;
  const each = absent ? `Each card shows what each attack reconstructed; ${absent}.` : EACH[data.cards.some(card => card.headings.length) ? "rows" : data.kind];
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

function cardOf(card, kind) {
  const words = `client ${card.client} · round ${card.round} · example ${card.example}`;
  return el("article.card", el("h3.who", words), kind !== "text" ? tiles(card) : card.headings.length ? rowsOf(card) : texts(card));
}

/** The truth, then each attack's reconstruction with its difference from the truth. */
function tiles(card) {
  const words = el("figcaption", el("b", "truth"), card.label !== null && ` ${card.label_name}`);
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

/** The difference of two images, by the browser. */
function difference(truth, image) {
  const pair = [truth, image].map(source => el("img", { src: source, alt: "" }));
  return el("div.difference", { role: "img", "aria-label": "difference" }, pair);
}

/** A name that may wrap after its underscores and brackets. */
const breakable = name => name.split(/(?<=[_(])/).flatMap((part, i) => i ? [el("wbr"), part] : [part]);

const TOKENS = [["right", "right"], ["misplaced", "right, but misplaced"], ["wrong", "wrong"]];

function texts(card) {
  const line = (name, tokens, note) => el("div.text-line", el("dt", name, note && el("b", note)), el("dd", tokens));
  const truth = card.truth_words ? card.truth_words.map(w => token(w, "")) : card.absent;
  const guess = tile => tile.words ? tile.words.map(([word, kind]) => token(word, kind)) : "no text";
  return el("dl.texts", line("truth", truth), card.tiles.map(tile => line(breakable(tile.attack), guess(tile), tile.note)));
}

/** A row of a table, cell by cell: the truth, then each attack's; the first line says how good each is. */
function rowsOf(card) {
  const head = [["cell", ""], ["truth", card.truth_words ? card.label_name : card.absent], ...card.tiles.map(t => [t.attack, t.note])];
  const heads = head.map(([name, note]) => el("th", { scope: "col" }, breakable(name), note && el("b", note)));
  const guess = (tile, i) => tile.words ? token(...tile.words[i]) : "";
  const line = (heading, i) => el("tr", el("th", { scope: "row" }, heading),
    el("td", card.truth_words ? token(card.truth_words[i], "") : ""), card.tiles.map(tile => el("td", guess(tile, i))));
  return el("div.wide", el("table.cells", el("thead", el("tr", heads)), el("tbody", card.headings.map(line))));
}

/** A token marked by colour and underline, and by a word for screen readers. */
function token(word, kind) {
  return el("span", { class: `token ${kind}` }, word, kind && kind !== "right" && el("span.hidden", ` (${kind})`));
}

function tokenLegend(cells) {
  const shown = cells ? TOKENS.filter(([kind]) => kind !== "misplaced") : TOKENS;
  return el("p.small.legend", cells ? "Cells (a number is right within .319 standard deviations): " : "Tokens: ", shown.map(([kind, words]) => el("span", { class: `token ${kind}` }, words)));
}
