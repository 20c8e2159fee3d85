// Both kinds of workload's run-queue waits as one mirrored histogram: online above the axis, batch below, the same slots.
//
// Log2 slots of microseconds; heights are the share of waits on a logarithmic scale, because the waits that matter are rare.

import { byId, el, say, svg, tabulate, write } from "/static/dom.js";
import { bound, duration, integer, NONE, percent, quantile } from "/static/format.js";
import { sum, watching } from "/static/model.js";

const DECADES = 4; // 100 % down to 0.01 %
const AXIS_PX = 20;
const AXIS_SLOTS = [0, 5, 10, 15, 20, 25];
const SIDES = ["online", "batch"];
const FORMS = { tp_btf: "BPF, typed tracepoint", raw_tp: "BPF, raw tracepoint", classic: "BPF, classic tracepoints", schedstat: "/proc/PID/schedstat, sums only" };

/** Bounds of slot k as text. */
export function slotRange(k, bounds) {
  if (k === 0) return `up to ${bound(bounds[0])}`;
  return k < bounds.length ? `${bound(bounds[k - 1])} to ${bound(bounds[k])}` : `longer than ${bound(bounds.at(-1))}`;
}

export class RunqLatencyChart {
  #data = null;
  #size = { width: 0, height: 0 };
  #at = null;

  constructor(figure) {
    this.plot = el("div", { class: "plot", tabindex: 0, role: "slider", "aria-label": "Run-queue latency: arrow keys walk through the slots", "aria-valuemin": 0, "aria-valuemax": 26, "aria-valuenow": 0 });
    this.drawing = svg("svg", { "aria-hidden": "true" });
    this.readout = el("div", { class: "readout", "aria-hidden": "true", hidden: "" });
    this.missing = el("p", { class: "empty", hidden: "" });
    this.details = el("details", { class: "data" }, el("summary", { "aria-label": "Run-queue latency as a table" }, "table"));
    this.plot.append(this.drawing, this.readout, this.missing);
    figure.append(this.plot, this.details);
    this.details.addEventListener("toggle", () => this.#tabulate());
    this.plot.addEventListener("pointermove", (event) => this.#point(event));
    this.plot.addEventListener("pointerdown", (event) => this.#point(event));
    this.plot.addEventListener("pointerleave", () => this.#show(null));
    this.plot.addEventListener("blur", () => this.#show(null));
    this.plot.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(([entry]) => {
      this.#size = { width: entry.contentRect.width, height: entry.contentRect.height };
      this.#draw();
    }).observe(this.plot);
  }

  /** data: {bounds, targetUs, names of both sides, online: {slots, count, meanUs}, batch: the same}; slots are null if only sums are measured. */
  update(data) {
    this.#data = data;
    this.#draw();
    this.#tabulate();
  }

  #frame() {
    const { width, height } = this.#size;
    const box = { left: 42, right: width - 6, top: 20, bottom: height - 20 };
    const middle = (box.top + box.bottom) / 2;
    const slots = this.#data.bounds.length + 1;
    return { ...box, middle, half: middle - box.top - AXIS_PX / 2, slots, step: (box.right - box.left) / slots };
  }

  #draw() {
    const { width, height } = this.#size;
    if (this.#data === null || width < 120 || height < 120) return;
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.drawing.replaceChildren();
    const without = SIDES.filter((side) => this.#data[side].slots === null);
    this.missing.hidden = without.length < SIDES.length;
    this.drawing.toggleAttribute("hidden", without.length === SIDES.length);
    if (without.length === SIDES.length) {
      const counted = SIDES.some((side) => this.#data[side].count !== null);
      say(this.missing, counted ? "Only sums of waits are measured, so there is no distribution: the run-queue probe does not run. Sources has the reason." : "No run-queue latency has been measured yet.");
      return;
    }
    const frame = this.#frame();
    this.#axis(frame);
    for (const [i, side] of SIDES.entries()) this.#side(frame, side, i === 0 ? -1 : 1);
    this.#show(this.#at);
  }

  #axis(frame) {
    const { left, right, middle, half, step } = frame;
    for (const sign of [-1, 1]) {
      for (let k = 0; k < DECADES; k += 1) {
        const y = middle + sign * (AXIS_PX / 2 + half * (1 - k / DECADES));
        this.drawing.append(svg("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }));
        this.drawing.append(svg("text", { class: "tick", x: left - 5, y: y + 4, "text-anchor": "end" }, `${100 / 10 ** k} %`));
      }
    }
    for (const slot of AXIS_SLOTS) {
      const x = left + (slot + 1) * step;
      this.drawing.append(svg("text", { class: "tick", x, y: middle + 4, "text-anchor": "middle" }, bound(this.#data.bounds[slot])));
    }
  }

  #side(frame, side, sign) {
    const { left, right, middle, half, step } = frame;
    const slots = this.#data[side].slots;
    const base = middle + (sign * AXIS_PX) / 2;
    this.drawing.append(svg("text", { class: `label s-${side}`, x: right, y: base + sign * half + (sign < 0 ? 12 : -4), "text-anchor": "end" }, this.#data.names[SIDES.indexOf(side)]));
    if (slots === null) return;
    const total = slots.reduce((a, b) => a + b, 0);
    for (const [k, count] of slots.entries()) {
      if (count === 0) continue;
      const size = Math.max(1 + Math.log10(count / total) / DECADES, 0) * half;
      const tall = Math.max(size, 2);
      this.drawing.append(svg("rect", { class: `slot s-${side}`, x: left + k * step + 0.75, width: Math.max(step - 1.5, 1), y: sign < 0 ? base - tall : base, height: tall }));
    }
    if (side === "online" && this.#data.targetUs !== null) this.#line(frame, sign, this.#data.targetUs, "target", "target");
    const p50 = quantile(slots, this.#data.bounds, 0.5), p99 = quantile(slots, this.#data.bounds, 0.99);
    // Labels of lines that are close are aligned away from each other.
    const close = p50 !== null && p99 !== null && p99 / p50 < 256;
    if (p50 !== null) this.#line(frame, sign, p50, "at", `p50 ${duration(p50)}`, close ? "end" : "middle");
    if (p99 !== null) this.#line(frame, sign, p99, "at", `p99 ${duration(p99)}`, close ? "start" : "middle");
  }

  /** A vertical line at a wait, from the axis outwards, with its name at the outer end. */
  #line({ left, middle, half, step }, sign, us, css, text, anchor = "middle") {
    const x = left + (us <= 1 ? us : 1 + Math.log2(us)) * step;
    const base = middle + (sign * AXIS_PX) / 2, end = base + sign * half;
    this.drawing.append(svg("line", { class: css, x1: x, x2: x, y1: base, y2: end }));
    const place = css === "target" ? { x: x + 4, y: base + sign * half * 0.8 + 4, "text-anchor": "start" } : { x, y: end + (sign < 0 ? -6 : 15), "text-anchor": anchor, dx: { end: -2, start: 2 }[anchor] ?? 0 };
    this.drawing.append(svg("text", { class: css === "target" ? "label t-target" : "label", ...place }, text));
  }

  #share(side, k) {
    const slots = this.#data[side].slots;
    if (slots === null) return "unknown";
    const total = slots.reduce((a, b) => a + b, 0);
    return total ? `${integer(slots[k])} (${percent(slots[k] / total)})` : "none";
  }

  #show(k) {
    this.#at = k;
    this.readout.hidden = k === null || this.#data === null || this.drawing.hasAttribute("hidden");
    if (this.readout.hidden) return;
    const { left, step } = this.#frame();
    const range = slotRange(k, this.#data.bounds);
    this.readout.replaceChildren(el("b", {}, range), ...SIDES.map((side) => el("span", { class: `s-${side}` }, el("i", {}), `${this.#data.names[SIDES.indexOf(side)]} `, el("b", {}, this.#share(side, k)))));
    this.readout.style.left = `${left + (k + 0.5) * step}px`;
    this.readout.classList.toggle("flip", k > this.#data.bounds.length / 2);
    this.plot.setAttribute("aria-valuenow", k);
    this.plot.setAttribute("aria-valuetext", `${range}: ${SIDES.map((side, i) => `${this.#data.names[i]} ${this.#share(side, k)}`).join(", ")}`);
  }

  #point(event) {
    if (this.#data === null) return;
    const { left, step, slots } = this.#frame();
    const k = Math.floor((event.clientX - this.plot.getBoundingClientRect().left - left) / step);
    this.#show(k < 0 || k >= slots ? null : k);
  }

  #key(event) {
    const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") this.#show(null);
    if (!(event.key in steps) || this.#data === null) return;
    event.preventDefault();
    const last = this.#data.bounds.length;
    this.#show(Math.min(Math.max((this.#at ?? -1) + steps[event.key], 0), last));
  }

  #tabulate() {
    if (!this.details.open || this.#data === null) return;
    const rows = [...Array(this.#data.bounds.length + 1).keys()].map((k) => [slotRange(k, this.#data.bounds), ...SIDES.map((side) => this.#share(side, k))]);
    tabulate(this.details, "Waits by length", ["wait", ...this.#data.names], rows);
  }
}

/** Latency of several rows together: slots, count and mean. */
function sumRows(rows, kind) {
  const parts = rows.map((row) => row.waits[kind]);
  const slots = parts.map((p) => p.slots).filter((s) => s !== null);
  const count = sum(parts.map((p) => p.count));
  const totalUs = sum(parts.map((p) => p.totalUs));
  return {
    slots: slots.length ? slots[0].map((_, k) => slots.reduce((n, s) => n + s[k], 0)) : null,
    count,
    meanUs: count && totalUs !== null ? totalUs / count : null,
  };
}

/** Draw the chart and its table from the rows of the chosen span. */
export function showRunqLatency(chart, view, rows, targetUs) {
  // Without listed pods: all cgroups above, the one with the highest latency of each cycle below.
  const [first, second] = watching(view) ? ["node", "worst"] : ["online", "batch"];
  const sides = { online: sumRows(rows, first), batch: sumRows(rows, second) };
  const names = watching(view) ? ["all cgroups", "the slowest"] : ["online", "batch"];
  chart.update({ bounds: view.bounds_us, targetUs, names, ...sides });
  const form = view.sources.find((source) => source.detail.split(/\W/).some((word) => word in FORMS));
  const word = form?.detail.split(/\W/).find((part) => part in FORMS);
  say(byId("waits-form"), word ?? "");
  byId("waits-form").title = word ? `${form.name}: ${FORMS[word]}` : "";
  const last = rows.at(-1);
  const lines = [
    [sides.online, last?.throttledOnline ?? null, last?.throttledMsOnline ?? null],
    [sides.batch, last?.throttledBatch ?? null, last?.throttledMsBatch ?? null],
  ];
  for (const [i, line] of [...byId("waits-table").tBodies[0].rows].entries()) {
    const [side, ratio, ms] = lines[i];
    const at = (q) => (side.slots === null ? (q === 0.5 && side.meanUs !== null ? `mean ${duration(side.meanUs)}` : NONE) : duration(quantile(side.slots, view.bounds_us, q)));
    const throttled = ratio ? `${percent(ratio)}, ${duration(ms === null ? null : ms * 1000)}` : percent(ratio);
    write(line, [names[i], integer(side.count), at(0.5), at(0.99), throttled]);
  }
}
