// Elements without markup: whatever a name contains, it becomes text.

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

/** A table of strings; built anew, for details that are opened rarely. */
export function table(caption, heads, rows) {
  return el(
    "table", {}, el("caption", {}, caption),
    el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells.map((cell, i) => (i ? el("td", {}, cell) : el("th", { scope: "row" }, cell)))))),
  );
}
