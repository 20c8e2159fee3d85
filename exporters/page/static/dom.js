// Elements without markup: names become text, whatever they contain.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/** Set text only where it changed, so that a reader's selection and a screen reader's place survive an update. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Keep one child of `parent` per item of `data`. Existing children stay, so that focus, selection and pointer keep their place. */
export function each(parent, data, make, show) {
  while (parent.children.length > data.length) parent.lastElementChild.remove();
  for (const [i, item] of data.entries()) show(parent.children[i] ?? parent.appendChild(make(item, i)), item, i);
}

/** A name in at most `chars` characters: the middle is left out, because pods differ at their ends. */
export function brief(name, chars) {
  if (name.length <= chars || name.startsWith("…")) return name;
  const end = Math.floor(chars * 0.45);
  return `${name.slice(0, chars - end - 1)}…${name.slice(-end)}`;
}

const TAIL = 14; // characters: a hash and a number, by which the pods of one workload differ

/** Set a name of any length. Where it does not fit its middle is not shown, because pods differ at their ends. */
export function sayName(node, name) {
  if (node.textContent === name) return;
  if (node.firstElementChild?.className !== "name") node.replaceChildren(el("span", { class: "name" }, el("span"), el("span")));
  const cut = Math.max(name.length - TAIL, 0);
  const [head, tail] = node.firstElementChild.children;
  say(head, name.slice(0, cut));
  say(tail, name.slice(cut));
}

/** What a pointer reads of a cgroup: its name and its path, or the path alone if the name is a part of it. */
export const hint = (name, path) => (name === path || name.startsWith("…") ? path : `${name}, cgroup ${path}`);

/** A row of a table: its head and this number of cells. */
export const line = (cells) => el("tr", {}, el("th", { scope: "row" }), ...Array.from({ length: cells }, () => el("td")));

/** Texts of a row's cells, its head first. */
export function write(row, texts) {
  for (const [k, text] of texts.entries()) say(row.cells[k], text);
}

/** A table of strings below the summary of `details`. */
export function tabulate(details, caption, heads, rows) {
  let frame = details.querySelector(".wide");
  if (frame === null) {
    const empty = el("table", {}, el("caption"), el("thead", {}, el("tr")), el("tbody"));
    details.append((frame = el("div", { class: "wide", tabindex: 0, role: "group" }, empty)));
  }
  frame.setAttribute("aria-label", caption);
  const table = frame.firstElementChild;
  say(table.caption, caption);
  each(table.tHead.rows[0], heads, () => el("th", { scope: "col" }), say);
  each(table.tBodies[0], rows, (cells) => line(cells.length - 1), write);
}
