// List of decisions: cgroup, knob, old and new value, reason. Newest first.

import { change, clock, NONE } from "/static/format.js";
import { brief, byId, el, say } from "/static/dom.js";

const KEEP = 500;
const REPEAT_WITHIN = 12; // lines: a decision that is among the newest ones again is counted there
const MAX_NAME = 64;
const SIGNS = { applied: "✓", "dry-run": "◌", refused: "✕", vanished: "∅", mismatch: "≠" };
const WAYS = { grow: "▲", shrink: "▼", other: "◆" };

/** Direction of a change of CPU for the cgroup: grow, shrink or other. */
export function direction(outcome) {
  if (outcome.decision.knob !== "cpu.max" || outcome.before === null) return "other";
  const size = (value) => (value.startsWith("max") ? Infinity : Number(value.split(" ")[0]) / Number(value.split(" ")[1]));
  const before = size(outcome.before), after = size(outcome.decision.value);
  return after < before ? "shrink" : after > before ? "grow" : "other";
}

function fact(name, value) {
  return value === null || value === undefined || value === "" ? [] : [el("dt", {}, name), el("dd", {}, String(value))];
}

/** What two decisions have in common that are shown as one line. */
function sameness({ outcome: { decision, status, before, repaired, error } }) {
  return [decision.cgroup, decision.knob, before, decision.value, decision.verdict.rule, status, repaired, error].join("\n");
}

function build(entry, times, first) {
  const { outcome } = entry, { decision } = outcome, { knob, verdict } = decision;
  const way = direction(outcome);
  const [from, to] = change(knob, outcome.before, decision.value);
  const raw = (value) => (value === null ? NONE : value === "" ? "empty" : value);
  return el(
    "li", { class: "entry", "data-status": outcome.status, "data-way": way },
    el("details", {},
      el("summary", {},
        el("span", { class: "change" },
          el("time", { title: times > 1 ? `first at ${clock(first.wall_time_ns / 1e6)}` : null, datetime: new Date(entry.wall_time_ns / 1e6).toISOString() }, clock(entry.wall_time_ns / 1e6)), " ",
          el("span", { class: "knob" },
            el("span", { class: "way", "aria-hidden": "true" }, WAYS[way]), " ",
            el("code", {}, knob), " ",
            el("span", { class: "before" }, from),
            el("span", { class: "arrow", role: "img", "aria-label": "to" }, " → "),
            el("b", {}, to)), " ",
          times > 1 ? el("span", { class: "times", title: `${times} times since ${clock(first.wall_time_ns / 1e6)}` }, `×${times} `) : null,
          el("span", { class: "status" }, el("span", { "aria-hidden": "true" }, `${SIGNS[outcome.status] ?? "?"} `), outcome.repaired ? "repaired" : outcome.status)),
        outcome.error ? el("span", { class: "error" }, outcome.error) : null,
        el("span", { class: "why" }, el("b", { title: decision.cgroup }, brief(decision.pod || decision.cgroup, MAX_NAME)), " ", verdict.text)),
      el("dl", {},
        ...fact("rule", verdict.rule), ...fact("threshold", verdict.threshold), ...fact("cgroup", decision.cgroup),
        ...fact("written", `${raw(outcome.before)} → ${raw(decision.value)}`), ...fact("read back", outcome.after),
        ...fact("requested value", outcome.clamped_from), ...fact("cycle", `${entry.round_seq} (${entry.trigger})`), ...fact("policy", entry.policy),
        ...Object.entries(verdict.inputs).flatMap(([name, value]) => fact(name, value ?? "unknown")))),
  );
}

/** Text that the filter searches. */
function words(entry) {
  const { decision, status, error, repaired } = entry.outcome;
  return [decision.pod, decision.cgroup, decision.knob, repaired ? "repaired" : status, decision.verdict.rule, decision.verdict.text, error].join("\n").toLowerCase();
}

export class Decisions {
  #items = []; // lines, newest first: {entries (newest first), same, node, text}

  constructor() {
    this.list = byId("entries");
    this.find = byId("find");
    this.status = byId("status");
    this.find.addEventListener("input", () => this.#filter());
    this.status.addEventListener("change", () => this.#filter());
    this.#filter();
  }

  get last() { return this.#items[0]?.entries[0].seq ?? 0; }

  get entries() { return this.#items.flatMap((item) => item.entries).sort((a, b) => b.seq - a.seq); }

  clear() {
    this.#items = [];
    this.list.replaceChildren();
    this.#filter();
  }

  /** Open one entry of the list and scroll to it; clear the filter if it hides the entry. */
  open(seq) {
    const item = this.#items.find(({ entries }) => entries.some((entry) => entry.seq === seq));
    if (item === undefined) return;
    if (item.node.hidden) {
      this.find.value = this.status.value = "";
      this.#filter();
    }
    item.node.querySelector("details").open = true;
    this.list.scrollTop += item.node.getBoundingClientRect().top - this.list.getBoundingClientRect().top;
  }

  /** Entries that are new, oldest first. */
  add(entries) {
    if (entries.length === 0) return;
    for (const entry of entries) {
      const same = sameness(entry);
      const at = this.#items.slice(0, REPEAT_WITHIN).findIndex((item) => item.same === same);
      const earlier = at < 0 ? [] : this.#items[at].entries;
      const entries = [entry, ...earlier].slice(0, KEEP);
      const node = build(entry, entries.length, entries.at(-1));
      if (at >= 0) {
        const [{ node: shown }] = this.#items.splice(at, 1);
        node.querySelector("details").open = shown.querySelector("details").open;
        shown.remove();
      }
      this.#items.unshift({ entries, same, node, text: words(entry) });
      this.list.prepend(node);
    }
    for (const item of this.#items.splice(KEEP)) item.node.remove();
    this.#filter();
  }

  #filter() {
    const words = this.find.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const status = this.status.value;
    let shown = 0;
    for (const { entries, node, text } of this.#items) {
      const fits = (status === "" || entries[0].outcome.status === status) && words.every((word) => text.includes(word));
      node.hidden = !fits;
      shown += fits ? entries.length : 0;
    }
    const all = this.#items.reduce((sum, { entries }) => sum + entries.length, 0);
    say(byId("decisions-count"), shown === all ? `${all}` : `${shown} of ${all}`);
    const empty = byId("no-entries");
    empty.hidden = shown > 0;
    this.list.hidden = shown === 0;
    say(empty, all ? "No decision matches this filter." : "No cgroup has been changed yet. Decisions appear here when the load of online pods changes.");
  }
}
