// Heat map of run-queue latency over time: one row per cgroup, one column per cycle. Drawn on a canvas.
//
// The picture is also a slider: Tab reaches it, left and right walk through time, up and down through the cgroups, and the
// value is spoken. Its numbers are in a table below it.

import { SPAN_MS } from "/static/charts.js";
import { clock, cores, duration, NONE, percent } from "/static/format.js";
import { brief, each, el, hint, say, sayName, tabulate } from "/static/dom.js";

const ROW_PX = 18;
const MOST_ROWS = 40;
const MOST_GAP = 3.5; // intervals; a longer one is drawn as a gap
const SPANS = [[60_000, 15], [120_000, 30], [SPAN_MS, 60]];
export const STEPS = 9;

/** Bounds between the steps of the scale; the first one separates negligible values. */
export const SCALES = {
  p99: { name: "wait p99", bounds: [100, 300, 1e3, 3e3, 1e4, 3e4, 1e5, 1e6], format: duration, read: (c) => (c.wait === null ? null : c.wait.p99_us ?? c.wait.mean_us ?? 0) },
  waiting: { name: "tasks waiting", bounds: [0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30], format: cores, read: (c) => c.wait_cores },
  throttled: { name: "throttled", bounds: [0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9], format: percent, read: (c) => c.throttled_ratio },
  pressure: { name: "CPU pressure", bounds: [0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9], format: percent, read: (c) => c.cpu_pressure_ratio },
};

export function step(bounds, value) {
  let found = 0;
  while (found < bounds.length && value >= bounds[found]) found += 1;
  return found;
}

/** The scale as swatches with the bounds between them; `format` writes a bound. */
export function legend(bounds, format) {
  const names = bounds.map((bound) => format(bound).replace(/(\.\d*?)0+(?= |$)/, "$1").replace(/\.(?= |$)/, ""));
  return el("span", { class: "legend", role: "img", "aria-label": `Colours change at ${names.join(", ")}` },
    ...Array.from({ length: bounds.length + 1 }, (_, i) => el("i", { class: `h${i}`, "aria-hidden": "true" }, i ? names[i - 1] : "0")));
}

export class HeatMap {
  #rows = [];
  #lines = [];
  #more = 0;
  #width = 0;
  #at = null; // {line: cgroup, time}
  #metric = "p99";

  constructor(figure, cursor) {
    this.cursor = cursor;
    this.names = el("ol", { class: "heat-names", "aria-hidden": "true" });
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.plot = el("div", { class: "heat-plot", tabindex: 0, role: "slider", "aria-label": "Latency by cgroup and time: left and right walk through time, up and down through the cgroups", "aria-valuemin": 0, "aria-valuemax": 0, "aria-valuenow": 0 });
    this.readout = el("div", { class: "readout", "aria-hidden": "true", hidden: "" });
    this.mark = el("div", { class: "heat-mark", "aria-hidden": "true", hidden: "" });
    this.axis = el("div", { class: "heat-axis", "aria-hidden": "true" });
    this.empty = el("p", { class: "empty" }, "Nothing has been measured yet.");
    this.note = el("p", { class: "note" });
    this.scale = el("div", { class: "scale" });
    this.details = el("details", { class: "data" }, el("summary", { "aria-label": "Waits by cgroup as a table" }, "table"));
    this.plot.append(this.canvas, this.mark, this.readout);
    this.body = el("div", { class: "heat" }, this.names, this.plot);
    figure.append(this.scale, this.empty, this.body, this.axis, this.note, this.details);
    this.details.addEventListener("toggle", () => this.#tabulate());
    this.plot.addEventListener("pointermove", (event) => this.#point(event));
    this.plot.addEventListener("pointerdown", (event) => this.#point(event));
    this.plot.addEventListener("pointerleave", () => this.#show(null));
    this.plot.addEventListener("blur", () => this.#show(null));
    this.plot.addEventListener("focus", () => { if (this.plot.matches(":focus-visible")) this.#key({ key: "", preventDefault() {} }); });
    this.plot.addEventListener("keydown", (event) => this.#key(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
    new ResizeObserver(([entry]) => {
      this.#width = entry.contentRect.width;
      this.#draw();
    }).observe(this.plot);
    this.#legend();
  }

  get metric() { return this.#metric; }

  set metric(name) {
    this.#metric = name;
    this.#legend();
  }

  /** rows: of the model; fits(c): whether a cgroup matches the filter; names(cgroup): its name; order: worst, now or name. */
  update(rows, fits, names, order) {
    this.#rows = rows;
    this.labels = names;
    const { read } = SCALES[this.#metric];
    const found = new Map();
    for (const row of rows) {
      for (const c of row.cgroups.values()) {
        if (!fits(c)) continue;
        const value = read(c);
        let line = found.get(c.cgroup);
        if (!line) found.set(c.cgroup, (line = { cgroup: c.cgroup, name: names(c.cgroup), qos: c.qos, worst: -1, worstWall: 0, now: null }));
        line.qos = c.qos;
        if (value !== null && value > line.worst) [line.worst, line.worstWall] = [value, row.wall];
      }
    }
    for (const c of rows.at(-1)?.cgroups.values() ?? []) if (found.has(c.cgroup)) found.get(c.cgroup).now = read(c);
    const by = {
      worst: (a, b) => b.worst - a.worst || a.name.localeCompare(b.name),
      now: (a, b) => (b.now ?? -1) - (a.now ?? -1) || b.worst - a.worst || a.name.localeCompare(b.name),
      name: (a, b) => a.name.localeCompare(b.name),
    }[order];
    const known = [...found.values()].filter((line) => line.worst >= 0);
    const kept = order === "name" ? known : known.sort(by);
    this.#lines = kept.slice(0, MOST_ROWS);
    if (order === "name") this.#lines.sort(by);
    this.#more = known.length - this.#lines.length;
    this.#draw();
    if (this.details.open) this.#tabulate();
  }

  #legend() {
    const { bounds, format } = SCALES[this.#metric];
    this.scale.replaceChildren(legend(bounds, format));
  }

  #frame() {
    const end = this.#rows.at(-1)?.time ?? 0;
    const [span, every] = SPANS.find(([ms]) => ms >= end - (this.#rows[0]?.time ?? end)) ?? SPANS.at(-1);
    const x = (time) => this.#width * (1 - (end - time) / span);
    return { end, span, every, x };
  }

  #draw() {
    const lines = this.#lines;
    this.empty.hidden = lines.length > 0;
    this.body.hidden = this.axis.hidden = lines.length === 0;
    this.details.hidden = lines.length === 0;
    say(this.note, this.#more > 0 ? `${this.#more} more cgroups have lower values: use the filter` : "");
    if (lines.length === 0 || this.#width < 60) return;
    each(this.names, lines, () => el("li"), (node, line) => {
      sayName(node, line.name);
      node.title = hint(line.name, line.cgroup);
      node.className = kind(line.qos);
    });
    const ratio = devicePixelRatio || 1, height = lines.length * ROW_PX;
    if (this.canvas.width !== Math.round(this.#width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(this.#width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    this.canvas.style.height = `${height}px`;
    this.#paint(this.canvas.getContext("2d"), ratio, height);
    this.#ticks();
    this.#show(this.#at);
  }

  #paint(context, ratio, height) {
    const style = getComputedStyle(this.plot);
    const colors = Array.from({ length: STEPS }, (_, i) => style.getPropertyValue(`--h${i}`));
    const { read, bounds } = SCALES[this.#metric];
    const { x } = this.#frame();
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.#width, height);
    const usual = usualGap(this.#rows);
    for (const [i, row] of this.#rows.entries()) {
      const before = i ? row.time - this.#rows[i - 1].time : usual;
      // On whole pixels, or a seam shows between two columns.
      const [left, right] = [row.time - (before > MOST_GAP * usual ? usual : before), row.time].map((time) => Math.round(x(time) * ratio) / ratio);
      if (right < 0) continue;
      for (const [k, line] of this.#lines.entries()) {
        const c = row.cgroups.get(line.cgroup);
        const value = c ? read(c) : null;
        if (value === null) continue;
        context.fillStyle = colors[step(bounds, value)];
        context.fillRect(left, k * ROW_PX + 1, right - left, ROW_PX - 2);
      }
    }
  }

  #ticks() {
    const { span, every } = this.#frame();
    const names = [];
    for (let ago = span / 1000; ago >= 0; ago -= every) names.push(ago === 0 ? "now" : ago % 60 ? `−${ago} s` : `−${ago / 60} min`);
    each(this.axis, names, () => el("span"), say);
  }

  #show(at) {
    this.#at = at;
    const k = at === null ? -1 : this.#lines.findIndex((line) => line.cgroup === at.cgroup);
    this.readout.hidden = this.mark.hidden = k < 0 || this.#rows.length === 0;
    this.cursor.set(this.readout.hidden ? null : at.time);
    if (this.readout.hidden) return;
    const line = this.#lines[k];
    const row = nearest(this.#rows, at.time);
    const c = row.cgroups.get(line.cgroup);
    const { read, format, name } = SCALES[this.#metric];
    const value = c ? read(c) : null;
    const facts = [[name, format(value)]];
    if (c && this.#metric !== "waiting") facts.push(["tasks waiting", cores(c.wait_cores)]);
    if (c?.wait) facts.push(["waits", `${c.wait.count}`]);
    const worst = c?.blame?.culprits[0];
    if (worst) facts.push(["most because of", worst[0] === line.cgroup ? "its own tasks" : brief(this.labels(worst[0]), 60)]);
    this.readout.replaceChildren(el("b", {}, `${line.name}, ${clock(row.wall)}`), ...facts.map(([what, text]) => el("span", {}, `${what} `, el("b", {}, text))));
    const { x } = this.#frame();
    const left = Math.max(x(row.time), 0);
    this.mark.style.left = `${left}px`;
    this.mark.style.top = `${k * ROW_PX}px`;
    this.readout.style.left = `${left}px`;
    this.readout.style.top = `${k < this.#lines.length / 2 ? (k + 1) * ROW_PX + 4 : Math.max(k * ROW_PX - 24 - 20 * facts.length, 0)}px`;
    this.readout.classList.toggle("flip", left > this.#width / 2);
    this.plot.setAttribute("aria-valuemax", this.#lines.length * this.#rows.length - 1);
    this.plot.setAttribute("aria-valuenow", k * this.#rows.length + this.#rows.indexOf(row));
    this.plot.setAttribute("aria-valuetext", `${line.name} at ${clock(row.wall)}: ${facts.map(([what, text]) => `${what} ${text === NONE ? "unknown" : text}`).join(", ")}`);
  }

  #point(event) {
    if (this.#lines.length === 0) return;
    const box = this.plot.getBoundingClientRect();
    const { end, span } = this.#frame();
    const k = Math.floor((event.clientY - box.top) / ROW_PX);
    const time = end - (1 - (event.clientX - box.left) / this.#width) * span;
    this.#show(k < 0 || k >= this.#lines.length ? null : { cgroup: this.#lines[k].cgroup, time: time + usualGap(this.#rows) / 2 });
  }

  #key(event) {
    const times = { ArrowLeft: -1, ArrowRight: 1, PageDown: -30, PageUp: 30, Home: -Infinity, End: Infinity };
    const lines = { ArrowUp: -1, ArrowDown: 1 };
    if (event.key === "Escape") return this.#show(null);
    if ((event.key && !(event.key in times) && !(event.key in lines)) || this.#lines.length === 0) return;
    event.preventDefault();
    const now = this.#at ?? { cgroup: this.#lines[0].cgroup, time: this.#rows.at(-1).time };
    const k = Math.max(this.#lines.findIndex((line) => line.cgroup === now.cgroup), 0) + (lines[event.key] ?? 0);
    const i = this.#rows.indexOf(nearest(this.#rows, now.time)) + (times[event.key] ?? 0);
    const within = (value, size) => Math.min(Math.max(value, 0), size - 1);
    this.#show({ cgroup: this.#lines[within(k, this.#lines.length)].cgroup, time: this.#rows[within(i, this.#rows.length)].time });
    this.mark.scrollIntoView?.({ block: "nearest" });
  }

  #tabulate() {
    if (!this.details.open) return;
    const { format, name } = SCALES[this.#metric];
    const rows = this.#lines.map((line) => [line.name, format(line.now), format(line.worst), clock(line.worstWall)]);
    tabulate(this.details, `${name} by cgroup in the shown time`, ["cgroup", "now", "worst", "at"], rows);
  }
}

export const kind = (qos) => (qos === "reclaimed_cores" ? "s-batch" : qos === "" ? "s-rest" : "s-online");

function nearest(rows, time) {
  return rows.reduce((best, row) => (Math.abs(row.time - time) < Math.abs(best.time - time) ? row : best));
}

/** Usual time between two cycles. */
function usualGap(rows) {
  const gaps = rows.slice(1).map((row, i) => row.time - rows[i].time).sort((a, b) => a - b);
  return gaps[Math.floor(gaps.length / 2)] ?? 1000;
}
