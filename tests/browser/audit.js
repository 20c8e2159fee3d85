// A check of our own, run inside the page; tests/browser/audit.py says what it is for.
(() => {
  const found = [];
  const name = (node) => `${node.tagName.toLowerCase()}${node.id ? `#${node.id}` : ""}${node.className && node.className.baseVal === undefined ? `.${String(node.className).trim().split(/\s+/).join(".")}` : ""}`;
  const shown = (node) => {
    for (let at = node; at && at.nodeType === 1; at = at.parentElement) {
      const style = getComputedStyle(at);
      if (style.display === "none" || style.visibility === "hidden") return false;
    }
    return true;
  };
  const hushed = (node) => node.closest(".hush, .skip:not(:focus)");
  const all = [...document.querySelectorAll("body *")].filter(shown);

  // Ids, language, title
  const ids = all.map((node) => node.id).filter(Boolean);
  for (const id of new Set(ids)) if (ids.filter((other) => other === id).length > 1) found.push(`id ${id} twice`);
  if (!document.documentElement.lang) found.push("no language");
  if (!document.title) found.push("no title");

  // Headings go down one level at a time, and there is one first one
  const levels = all.filter((node) => /^H[1-6]$/.test(node.tagName)).map((node) => Number(node.tagName[1]));
  if (levels.filter((level) => level === 1).length !== 1) found.push("not one h1");
  levels.forEach((level, i) => { if (i && level - levels[i - 1] > 1) found.push(`h${levels[i - 1]} is followed by h${level}`); });

  // Tables: a caption, headers with a scope, as many cells in each row
  for (const table of all.filter((node) => node.tagName === "TABLE")) {
    if (!table.caption?.textContent.trim()) found.push(`${name(table)} has no caption`);
    for (const head of table.querySelectorAll("th")) if (!head.scope) found.push(`a header of ${name(table)} has no scope: ${head.textContent}`);
    for (const head of table.querySelectorAll("th")) if (!head.textContent.trim()) found.push(`an empty header in ${name(table)}`);
    const sizes = new Set([...table.rows].map((row) => [...row.cells].reduce((n, cell) => n + cell.colSpan, 0)));
    if (sizes.size > 1) found.push(`rows of ${name(table)} differ in length: ${[...sizes]}`);
  }

  // Names: everything that can be used has one
  const label = (node) => node.getAttribute("aria-label") || node.labels?.[0]?.textContent || node.textContent || node.title || "";
  for (const node of all.filter((node) => node.matches("a, button, input, select, summary, [role=slider], [role=group]"))) {
    if (!label(node).trim()) found.push(`${name(node)} has no name`);
  }
  for (const image of all.filter((node) => node.tagName === "IMG" && !node.hasAttribute("alt"))) found.push(`${name(image)} has no alt`);
  for (const drawing of all.filter((node) => node.tagName === "svg" || node.tagName === "CANVAS")) {
    if (!drawing.closest("[aria-hidden=true], [role=img]")) found.push(`${name(drawing)} is neither hidden nor named`);
  }
  for (const hidden of all.filter((node) => node.getAttribute("aria-hidden") === "true")) {
    if (hidden.querySelector("a, button, input, select, [tabindex]:not([tabindex='-1'])")) found.push(`${name(hidden)} hides something that takes the focus`);
  }
  for (const node of all.filter((node) => node.tabIndex > 0)) found.push(`${name(node)} has a place of its own in the order of focus`);
  // What scrolls must be reachable by keys
  for (const node of all.filter((node) => ["auto", "scroll"].includes(getComputedStyle(node).overflowX) || ["auto", "scroll"].includes(getComputedStyle(node).overflowY))) {
    const scrolls = node.scrollWidth > node.clientWidth + 1 || node.scrollHeight > node.clientHeight + 1;
    if (scrolls && node.tabIndex < 0 && !node.querySelector("[tabindex='0'], a, button, input, summary")) found.push(`${name(node)} scrolls, but not by keys`);
  }
  // What is clicked is 24 px in one direction at least, and not smaller than a line of text in the other
  for (const node of all.filter((node) => node.matches("button, select, input:not([type=radio]), summary") && !hushed(node))) {
    const box = node.getBoundingClientRect();
    if (Math.max(box.width, box.height) < 24 || Math.min(box.width, box.height) < 14) found.push(`${name(node)} is ${Math.round(box.width)} x ${Math.round(box.height)}`);
  }

  // Contrast of every text against what is painted behind it
  const parse = (text) => { const n = text.match(/[\d.]+/g).map(Number); return [...n.slice(0, 3), n[3] ?? 1]; };
  const over = ([r, g, b, a], under) => [r, g, b].map((c, i) => c * a + under[i] * (1 - a));
  const light = (rgb) => rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4)).reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (a, b) => { const [low, high] = [light(a), light(b)].sort((x, y) => x - y); return (high + 0.05) / (low + 0.05); };
  const seen = new Map(); // of an element: its own background, and how much of it and of what it holds is seen
  const own = (node) => {
    if (!seen.has(node)) seen.set(node, [parse(getComputedStyle(node).backgroundColor), Number(getComputedStyle(node).opacity)]);
    return seen.get(node);
  };
  // The colour where an element paints `top` over its background, through every opacity around it.
  const painted = (node, top) => {
    if (!node) return top([255, 255, 255]);
    const [background, opacity] = own(node);
    return painted(node.parentElement, (under) => over([...top(over(background, under)), opacity], under));
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const dim = new Set();
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !shown(node) || hushed(node) || node.closest("option, script, noscript")) continue;
    const style = getComputedStyle(node);
    const ink = parse(node instanceof SVGElement ? style.fill : style.color);
    const measured = ratio(painted(node, (behind) => over(ink, behind)), painted(node, (behind) => behind));
    if (measured < 4.5) dim.add(`${name(node)} in ${name(node.parentElement)}: ${measured.toFixed(2)}`);
  }
  found.push(...dim);
  return found;
})()
