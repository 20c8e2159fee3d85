// Time charts in SVG: stacked areas, lines and steps over the last five minutes, with one cursor for all of them.
//
// A chart is also a slider: Tab reaches it, the arrow keys walk through time, and its value is spoken. Its numbers are in
// a table below it. Colours come from CSS classes only.

import { clock, NONE } from "/static/format.js";
import { el, svg, tabulate } from "/static/dom.js";

export const SPAN_MS = 300_000;
const SPANS = [[60_000, 15], [120_000, 30], [SPAN_MS, 60]]; // how much time is shown, and seconds between two labels
const GAP = 3.5; // a longer time without a cycle, in intervals, interrupts the line: the agent did not run
const LABEL_PX = 14;

/** Layout of a drawing of this size: its box, and the position of a time. The newest row is at the right end. */
export function frame(width, height, rows, axisPx = 18) {
  const narrow = width < 420;
  const box = { left: narrow ? 40 : 46, right: width - (narrow ? 98 : 112), top: 8, bottom: height - axisPx };
  const end = rows.at(-1)?.time ?? 0;
  const [span, every] = SPANS.find(([ms]) => ms >= end - (rows[0]?.time ?? end)) ?? SPANS.at(-1);
  const x = (time) => box.right - ((end - time) / span) * (box.right - box.left);
  const time = (at) => end - ((box.right - at) / (box.right - box.left)) * span;
  return { box, x, time, span, every, narrow };
}

/** Marks and names of times below a drawing. */
export function axis({ box, span, every, narrow }, names = true) {
  const nodes = [];
  for (let ago = 0; ago <= span / 1000; ago += every) {
    const x = box.right - ((ago * 1000) / span) * (box.right - box.left);
    nodes.push(svg("line", { class: "grid", x1: x, x2: x, y1: box.bottom, y2: box.bottom + 4 }));
    if (!names || (narrow && (ago / every) % 2)) continue;
    const name = ago === 0 ? "now" : ago % 60 ? `−${ago} s` : `−${ago / 60} min`;
    nodes.push(svg("text", { class: "tick", x, y: box.bottom + 15, "text-anchor": ago * 1000 === span ? "start" : "middle" }, name));
  }
  return nodes;
}

/** A name cut to a width, in letters of 11 pixels; the end is kept, because names differ there. */
export function label(name, roomPx) {
  const most = Math.max(Math.floor(roomPx / 6.2), 8);
  return name.length > most ? `…${name.slice(1 - most)}` : name;
}

/** Time that pointer or keys have selected, shared by the charts. */
export class Cursor {
  #listeners = [];
  time = null;

  listen(listener) { this.#listeners.push(listener); }

  set(time) {
    this.time = time;
    for (const listener of this.#listeners) listener();
  }
}

export class TimeChart {
  #rows = [];
  #marks = [];
  #size = { width: 0, height: 0 };

  /** spec: {name, series: [{key, label (text or function), kind: area|line|step, css}], top(rows) or log, format, tick, axis, threshold()}. */
  constructor(figure, spec, cursor) {
    this.spec = spec;
    this.cursor = cursor;
    this.plot = el("div", { class: "plot", tabindex: 0, role: "slider", "aria-label": `${spec.name}: arrow keys walk through time`, "aria-valuemin": 0, "aria-valuemax": 0, "aria-valuenow": 0 });
    this.drawing = svg("svg", { "aria-hidden": "true" });
    this.hand = svg("g", { class: "hand" });
    this.readout = el("div", { class: "readout", "aria-hidden": "true", hidden: "" });
    this.details = el("details", { class: "data" }, el("summary", { "aria-label": `${spec.name} as a table` }, "table"));
    this.plot.append(this.drawing, this.readout);
    figure.append(this.plot, this.details);
    this.details.addEventListener("toggle", () => this.#tabulate());
    this.plot.addEventListener("pointermove", (event) => this.#point(event));
    this.plot.addEventListener("pointerdown", (event) => this.#point(event));
    this.plot.addEventListener("pointerleave", () => cursor.set(null));
    this.plot.addEventListener("blur", () => cursor.set(null));
    this.plot.addEventListener("focus", () => { if (this.plot.matches(":focus-visible")) cursor.set(this.#rows.at(-1)?.time ?? null); });
    this.plot.addEventListener("keydown", (event) => this.#key(event));
    cursor.listen(() => this.#drawHand());
    new ResizeObserver(([entry]) => {
      this.#size = { width: entry.contentRect.width, height: entry.contentRect.height };
      this.#draw();
    }).observe(this.plot);
  }

  update(rows, marks = []) {
    this.#rows = rows;
    this.#marks = marks;
    this.#draw();
    if (this.details.open) this.#tabulate();
  }

  #frame() {
    const { width, height } = this.#size;
    const at = frame(width, height, this.#rows, this.spec.axis === false ? 8 : 18);
    const scale = this.spec.log ? logScale(this.spec, this.#rows) : linearScale(this.spec.top(this.#rows));
    const y = (value) => at.box.bottom - scale.at(value) * (at.box.bottom - at.box.top);
    return { ...at, scale, y };
  }

  #draw() {
    const { width, height } = this.#size;
    if (width < 120 || height < 40) return;
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const at = this.#frame();
    this.drawing.replaceChildren(...this.#axes(at));
    if (this.#rows.length === 0) return;
    const labels = [...this.#series(at), ...this.#threshold(at)];
    if (!this.drawing.querySelector(".line")) {
      const { left, right, top, bottom } = at.box;
      this.drawing.append(svg("text", { class: "none", x: (left + right) / 2, y: (top + bottom) / 2, "text-anchor": "middle" }, "nothing measured yet"));
    }
    this.#drawMarks(at);
    this.drawing.append(...placeLabels(labels, at.box));
    this.drawing.append(this.hand);
    this.#drawHand();
  }

  #axes(at) {
    const { box, scale, y } = at;
    const nodes = scale.ticks.flatMap((value) => [
      svg("line", { class: "grid", x1: box.left, x2: box.right, y1: y(value), y2: y(value) }),
      svg("text", { class: "tick", x: box.left - 6, y: y(value) + 4, "text-anchor": "end" }, this.spec.tick(value)),
    ]);
    return [...nodes, ...axis(at, this.spec.axis !== false)];
  }

  /** Series to show: an optional one only after it has had a value. */
  #shown() {
    return this.spec.series.filter((series) => !series.optional || this.#rows.some((row) => row[series.key] !== null));
  }

  #series(frame) {
    const floor = new Map(this.#rows.map((row) => [row, 0]));
    const labels = [];
    for (const series of this.#shown()) {
      const area = series.kind === "area";
      const ends = this.#rows.map((row) => {
        const value = row[series.key];
        if (value === null) return null;
        const low = area ? floor.get(row) : 0;
        if (area) floor.set(row, low + value);
        return { x: frame.x(row.time), low: frame.y(low), high: frame.y(area ? low + value : value), time: row.time };
      });
      for (const run of runs(ends)) {
        if (area) this.drawing.append(svg("path", { class: `area ${series.css}`, d: areaPath(run) }));
        this.drawing.append(svg("path", { class: `line ${series.css}`, d: linePath(run, series.kind === "step") }));
      }
      const last = ends.at(-1);
      if (last && !(series.quiet && Math.abs(last.low - last.high) < 2)) {
        const text = `${named(series)} ${this.spec.format(this.#rows.at(-1)[series.key])}`;
        labels.push({ text, css: series.css, y: area ? (last.low + last.high) / 2 : last.high });
      }
    }
    return labels;
  }

  #threshold(frame) {
    const line = this.spec.threshold?.() ?? null;
    if (line === null || frame.scale.at(line) < 0 || frame.scale.at(line) > 1) return [];
    const y = frame.y(line);
    this.drawing.append(svg("line", { class: "target", x1: frame.box.left, x2: frame.box.right, y1: y, y2: y }));
    return [{ text: `target ${this.spec.tick(line)}`, css: "t-target", y }];
  }

  #drawMarks({ box, x }) {
    for (const mark of this.#marks) {
      const at = x(mark.time), y = box.bottom;
      const shape = mark.kind === "shrink" ? `M${at - 4} ${y - 8}h8l-4 7z` : mark.kind === "grow" ? `M${at - 4} ${y - 1}h8l-4 -7z` : `M${at} ${y - 9}l4 4l-4 4l-4 -4z`;
      this.drawing.append(svg("path", { class: `mark ${mark.kind}`, d: shape }));
    }
  }

  #nearest() {
    const time = this.cursor.time;
    if (time === null || this.#rows.length === 0) return null;
    return this.#rows.reduce((best, row) => (Math.abs(row.time - time) < Math.abs(best.time - time) ? row : best));
  }

  #drawHand() {
    const row = this.#nearest();
    this.hand.replaceChildren();
    this.readout.hidden = row === null;
    if (row === null) return;
    const { box, x } = this.#frame();
    const at = x(row.time);
    this.hand.append(svg("line", { x1: at, x2: at, y1: box.top, y2: box.bottom }));
    const parts = this.#shown().map((series) => [series, this.spec.format(row[series.key])]);
    this.readout.replaceChildren(
      el("b", {}, clock(row.wall)),
      ...parts.map(([series, text]) => el("span", { class: series.css }, el("i", {}), `${named(series)} `, el("b", {}, text))),
    );
    this.readout.style.left = `${at}px`;
    this.readout.classList.toggle("flip", at > this.#size.width / 2);
    const index = this.#rows.indexOf(row);
    this.plot.setAttribute("aria-valuemax", this.#rows.length - 1);
    this.plot.setAttribute("aria-valuenow", index);
    this.plot.setAttribute("aria-valuetext", `${clock(row.wall)}: ${parts.map(([s, text]) => `${named(s)} ${text === NONE ? "unknown" : text}`).join(", ")}`);
  }

  #point(event) {
    const x = event.clientX - this.plot.getBoundingClientRect().left;
    this.cursor.set(this.#frame().time(x));
  }

  #key(event) {
    const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -30, PageUp: 30, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") this.cursor.set(null);
    if (!(event.key in steps) || this.#rows.length === 0) return;
    event.preventDefault();
    const from = this.#nearest() ?? this.#rows.at(-1);
    const index = Math.min(Math.max(this.#rows.indexOf(from) + steps[event.key], 0), this.#rows.length - 1);
    this.cursor.set(this.#rows[index].time);
  }

  #tabulate() {
    if (!this.details.open) return;
    const heads = ["time", ...this.#shown().map(named)];
    const rows = [...this.#rows].reverse().map((row) => [clock(row.wall), ...this.#shown().map((s) => this.spec.format(row[s.key]))]);
    tabulate(this.details, `${this.spec.name}, newest first`, heads, rows);
  }
}

function linearScale(top) {
  const step = [1, 2, 5, 10, 20, 50, 100].map((n) => n * 10 ** Math.floor(Math.log10(top) - 1)).find((s) => top / s <= 4) ?? top;
  const ticks = [];
  for (let value = 0; value <= top * 1.0001; value += step) ticks.push(value);
  return { at: (value) => Math.min(value / top, 1), ticks }; // in a short cycle, counters can exceed the node's capacity by a tick
}

/** Range between multiples of 1, 2 or 5 around all values, at least one and a half decades, so that small changes look small. */
function logScale(spec, rows) {
  const values = rows.flatMap((row) => spec.series.map((s) => row[s.key])).filter((v) => v !== null && v > 0);
  const line = spec.threshold?.() ?? null;
  if (line !== null) values.push(line);
  if (values.length === 0) values.push(200, 20_000);
  const steps = Array.from({ length: 36 }, (_, i) => [1, 2, 5][i % 3] * 10 ** (Math.floor(i / 3) - 2));
  const least = steps.findLast((step) => step <= Math.min(...values)) ?? steps[0];
  const low = Math.log10(least), high = Math.log10(steps.find((step) => step >= Math.max(...values) * 1.05 && step >= least * 40) ?? steps.at(-1));
  const ticks = steps.filter((step) => Math.log10(step) >= low && Math.log10(step) <= high && Math.abs(Math.log10(step) % 1) < 1e-9);
  return { at: (value) => Math.max((Math.log10(Math.max(value, 1e-9)) - low) / (high - low), 0), ticks };
}

/** Current name of a series. */
const named = (series) => (typeof series.label === "function" ? series.label() : series.label);

/** Split a series at missing values and at times without cycles. */
function runs(ends) {
  const seen = ends.filter((end) => end !== null);
  const steps = seen.slice(1).map((end, i) => end.time - seen[i].time).sort((a, b) => a - b);
  const limit = GAP * (steps[Math.floor(steps.length / 2)] ?? Infinity);
  const result = [];
  let run = [];
  for (const end of ends) {
    if (end === null || (run.length && end.time - run.at(-1).time > limit)) {
      if (run.length) result.push(run);
      run = [];
    }
    if (end !== null) run.push(end);
  }
  if (run.length) result.push(run);
  return result;
}

const px = (x) => x.toFixed(1);

function linePath(run, step) {
  return run.map((p, i) => (i === 0 ? `M${px(p.x)} ${px(p.high)}` : step ? `H${px(p.x)}V${px(p.high)}` : `L${px(p.x)} ${px(p.high)}`)).join("") + (run.length === 1 ? "h1" : "");
}

function areaPath(run) {
  const back = [...run].reverse().map((p) => `L${px(p.x)} ${px(p.low)}`).join("");
  return `${linePath(run, false)}${back}Z`;
}

/** Labels right of the plot, moved apart until they do not overlap. */
function placeLabels(labels, box) {
  const placed = labels.map((label) => ({ ...label })).sort((a, b) => a.y - b.y);
  for (let i = 1; i < placed.length; i += 1) placed[i].y = Math.max(placed[i].y, placed[i - 1].y + LABEL_PX);
  let limit = box.bottom;
  for (let i = placed.length - 1; i >= 0; i -= 1) {
    placed[i].y = Math.min(placed[i].y, limit);
    limit = placed[i].y - LABEL_PX;
  }
  return placed.map((label) => svg("text", { class: `label ${label.css}`, x: box.right + 8, y: label.y + 4 }, label.text));
}
