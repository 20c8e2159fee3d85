// Decisions over time: a lane for each pod and knob, a mark for each decision, on the axis of the charts above it.
//
// The pointer or the arrow keys enlarge the seconds around a time and list the decisions made then; a click or Enter keeps
// them. Shapes show the direction of a change, outlines its outcome: no information is given by colour alone.

import { direction } from "/static/decisions.js";
import { brief, byId, el, say, svg } from "/static/dom.js";
import { axis, frame, label } from "/static/charts.js";
import { change, clock, knobValue } from "/static/format.js";

const LANE_PX = 26;
const MAX_LANES = 9; // one more lane holds all others
const LENS_MS = 5000; // decisions within this distance of the pointer are listed
const LENS_PX = 58;
const VALUE_PX = 70; // a value next to its mark, if the next mark is at least this far away
const MAX_LISTED = 4;
const SHAPES = { shrink: "M-5 -4h10l-5 9z", grow: "M-5 4h10l-5 -9z", other: "M0 -6l6 6l-6 6l-6 -6z" };
const CROSS = "M-4 -4l8 8M4 -4l-8 8";

/** Values by which decisions are divided into lanes. */
const LANES = {
  pod: ({ outcome: { decision } }) => `${brief(decision.pod || decision.cgroup, 56)} · ${decision.knob}`,
  knob: ({ outcome: { decision } }) => decision.knob,
  status: ({ outcome }) => outcome.status,
  rule: ({ outcome: { decision } }) => decision.verdict.rule,
};

export class Timeline {
  #rows = [];
  #marks = []; // {time, entry}, oldest first
  #chosen = null; // the entry that was chosen
  #width = 0;

  constructor(cursor, open) {
    this.cursor = cursor;
    this.open = open;
    this.plot = byId("lanes");
    this.drawing = svg("svg", { "aria-hidden": "true" });
    this.hand = svg("g", { class: "hand" });
    this.plot.append(this.drawing);
    this.lens = svg("svg", { "aria-hidden": "true" });
    byId("lens").append(this.lens);
    this.plot.addEventListener("pointermove", (event) => this.#point(event));
    this.plot.addEventListener("pointerleave", () => cursor.set(null));
    this.plot.addEventListener("blur", () => cursor.set(null));
    this.plot.addEventListener("click", (event) => this.#choose(this.#under(event)));
    this.plot.addEventListener("keydown", (event) => this.#key(event));
    byId("lanes-by").addEventListener("input", () => this.#draw());
    cursor.listen(() => this.#tell());
    new ResizeObserver(([entry]) => {
      this.#width = entry.contentRect.width;
      this.#draw();
    }).observe(this.plot);
  }

  update(rows, marks) {
    this.#rows = rows;
    this.#marks = marks;
    if (this.#chosen !== null && !marks.some(({ entry }) => entry.seq === this.#chosen.seq)) this.#chosen = null;
    this.#draw();
  }

  /** Lanes by name with their marks; those with most decisions have a lane of their own. */
  #lanes() {
    const named = LANES[byId("lanes-by").value];
    const lanes = new Map();
    for (const mark of this.#marks) {
      const name = named(mark.entry);
      lanes.set(name, [...(lanes.get(name) ?? []), mark]);
    }
    const busiest = [...lanes].sort(([a, p], [b, q]) => q.length - p.length || a.localeCompare(b));
    const rest = busiest.splice(MAX_LANES);
    const shown = busiest.sort(([a], [b]) => a.localeCompare(b));
    return rest.length ? [...shown, [`${rest.length} more`, rest.flatMap(([, marks]) => marks)]] : shown;
  }

  #draw() {
    const empty = this.#marks.length === 0;
    byId("no-lanes").hidden = !empty;
    byId("timeline").dataset.empty = String(empty);
    this.plot.hidden = empty;
    if (empty || this.#width < 120) return this.#tell();
    const lanes = this.#lanes();
    const height = lanes.length * LANE_PX + 22;
    this.plot.style.height = `${height}px`;
    this.drawing.setAttribute("viewBox", `0 0 ${this.#width} ${height}`);
    const at = frame(this.#width, height, this.#rows);
    this.drawing.replaceChildren(...axis(at));
    for (const [i, [name, marks]] of lanes.entries()) {
      const y = i * LANE_PX;
      this.drawing.append(
        svg("line", { class: "grid", x1: at.box.left, x2: at.box.right, y1: y + LANE_PX, y2: y + LANE_PX }),
        svg("text", { class: "tick", x: at.box.left, y: y + 10 }, label(name, at.box.right - at.box.left)),
        svg("text", { class: "tick", x: at.box.right + 8, y: y + 22 }, `${marks.length}`),
      );
      for (const { time, entry } of marks) this.drawing.append(this.#mark(entry, at.x(time), y + 18));
    }
    this.drawing.append(this.hand);
    this.#tell();
  }

  #mark(entry, x, y) {
    const { status } = entry.outcome;
    const failed = status === "refused" || status === "mismatch";
    const shape = svg("path", { class: `deed ${status}`, d: failed ? CROSS : SHAPES[direction(entry.outcome)], transform: `translate(${x.toFixed(1)} ${y})` });
    shape.dataset.seq = entry.seq;
    if (entry.seq === this.#chosen?.seq) shape.classList.add("kept");
    return shape;
  }

  /** Time of the listed decisions: that of the cursor, else of the chosen decision, else of the newest one. */
  #moment() {
    const kept = this.#marks.find(({ entry }) => entry.seq === this.#chosen?.seq);
    return this.cursor.time ?? (kept ?? this.#marks.at(-1))?.time ?? null;
  }

  /** Decisions near this time, nearest first; the chosen one comes first, unless the cursor selects another time. */
  #near() {
    const moment = this.#moment(), { time } = this.cursor;
    const away = ({ time: at, entry }) => (time === null && entry.seq === this.#chosen?.seq ? -1 : Math.abs(at - moment));
    return this.#marks.filter((mark) => away(mark) <= LENS_MS).sort((a, b) => away(a) - away(b) || b.entry.seq - a.entry.seq).map(({ entry }) => entry);
  }

  #tell() {
    const near = this.#near();
    const { time } = this.cursor;
    this.hand.replaceChildren();
    byId("lens").hidden = this.#marks.length === 0;
    if (time !== null && this.#rows.length && this.#width >= 120) {
      const at = frame(this.#width, this.plot.clientHeight, this.#rows);
      const x = Math.min(Math.max(at.x(time), at.box.left), at.box.right);
      this.hand.append(svg("line", { x1: x, x2: x, y1: 0, y2: at.box.bottom }));
    }
    this.#magnify(near);
    const listed = near.slice(0, MAX_LISTED).sort((a, b) => b.seq - a.seq);
    byId("decisions-at").replaceChildren(...listed.map((entry) => this.#line(entry)));
    const more = near.length - listed.length;
    const hint = time === null ? "Point at a time to enlarge it and read its decisions; a click opens them in the list." : "";
    say(byId("decisions-at-more"), [more > 0 ? `and ${more} more within ${LENS_MS / 1000} s` : "", hint].filter(Boolean).join(". "));
    const index = this.#marks.findIndex(({ entry }) => entry === near[0]);
    this.plot.setAttribute("aria-valuemax", Math.max(this.#marks.length - 1, 0));
    this.plot.setAttribute("aria-valuenow", Math.max(index, 0));
    this.plot.setAttribute("aria-valuetext", near.length ? sentence(near[0]) : "no decision here");
  }

  /** The seconds around that moment, as wide as five minutes are above: a mark for each decision, with what it set. */
  #magnify(near) {
    const time = this.#moment();
    this.lens.replaceChildren();
    if (time === null || this.#width < 120) return;
    const { box } = frame(this.#width, LENS_PX, this.#rows);
    this.lens.setAttribute("viewBox", `0 0 ${this.#width} ${LENS_PX}`);
    const x = (ms) => (box.left + box.right) / 2 + (ms / LENS_MS) * ((box.right - box.left) / 2);
    for (let s = -LENS_MS / 1000; s <= LENS_MS / 1000; s += 1) {
      this.lens.append(
        svg("line", { class: s ? "grid" : "at", x1: x(s * 1000), x2: x(s * 1000), y1: 4, y2: box.bottom }),
        svg("text", { class: "tick", x: x(s * 1000), y: box.bottom + 14, "text-anchor": "middle" }, s ? `${s > 0 ? "+" : "−"}${Math.abs(s)} s` : "here"),
      );
    }
    const shown = new Set(near);
    let free = -Infinity;
    for (const { time: at, entry } of this.#marks) {
      if (!shown.has(entry)) continue;
      const place = x(at - time);
      this.lens.append(this.#mark(entry, place, 26));
      if (place < free) continue;
      free = place + VALUE_PX;
      this.lens.append(svg("text", { class: "tick", x: place, y: 13, "text-anchor": "middle" }, knobValue(entry.outcome.decision.knob, entry.outcome.decision.value)));
    }
  }

  #line(entry) {
    const { decision, status } = entry.outcome;
    const [from, to] = change(decision.knob, entry.outcome.before, decision.value);
    return el("li", { "data-status": status },
      el("span", { class: "time" }, clock(entry.wall_time_ns / 1e6)), " ",
      el("b", { title: decision.cgroup }, brief(decision.pod || decision.cgroup, 64)), " ", el("code", {}, decision.knob), ` ${from} → ${to} (${status}, ${decision.verdict.rule}) `,
      el("span", { class: "note" }, entry.outcome.error || decision.verdict.text));
  }

  #point(event) {
    const at = frame(this.#width, this.plot.clientHeight, this.#rows);
    const x = event.clientX - this.plot.getBoundingClientRect().left;
    this.cursor.set(at.time(x));
  }

  #under(event) {
    const seq = Number(event.target.dataset?.seq);
    return this.#marks.find(({ entry }) => entry.seq === seq)?.entry ?? this.#near()[0] ?? null;
  }

  /** Choose an entry: it stays listed, and is opened in the list of decisions. */
  #choose(entry) {
    this.#chosen = entry;
    if (entry !== null) this.open(entry.seq);
    this.#draw();
  }

  #key(event) {
    const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, Home: -Infinity, End: Infinity };
    if (event.key === "Enter") this.#choose(this.#near()[0] ?? null);
    if (event.key === "Escape") this.cursor.set(null);
    if (!(event.key in steps) || this.#marks.length === 0) return;
    event.preventDefault();
    const now = this.cursor.time ?? Infinity;
    const times = [...new Set(this.#marks.map(({ time }) => time))];
    const step = steps[event.key];
    const next = step < 0 ? times.filter((time) => time < now).at(step === -1 ? -1 : 0) : times.filter((time) => time > now).at(step === 1 ? 0 : -1);
    this.cursor.set(next ?? (step < 0 ? times[0] : times.at(-1)));
  }
}

function sentence({ wall_time_ns: ns, outcome: { decision, before, status } }) {
  const [from, to] = change(decision.knob, before, decision.value);
  return `${clock(ns / 1e6)}: ${decision.pod || decision.cgroup}, ${decision.knob} from ${from} to ${to}, ${status}: ${decision.verdict.text}`;
}
