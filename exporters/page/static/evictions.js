// Evictions: thresholds of the plugins, conditions of the node, and the state of victims.

import { bytes, clock, duration, NONE } from "/static/format.js";
import { byId, each, el, line, say, write } from "/static/dom.js";

const KEEP = 100;
const STATES = { "not-met": "not met", soft: "▲ soft", hard: "■ hard" };

const BYTES = /^(NumaMemory|NumaMemoryBalance|rootfs) |^SystemMemory free$|^SystemRootfs bytes$|reclaimed_memory $/; // scope and subject

/** A number of a threshold. Their units differ: ratios, seconds, and bytes. */
function amount({ scope, subject }, value) {
  if (value === null) return NONE;
  if (BYTES.test(`${scope} ${subject}`)) return bytes(value);
  return value.toLocaleString("en", { maximumFractionDigits: Math.abs(value) < 100 ? 3 : 0 });
}

function state(threshold) {
  if (!threshold.judged) return "not evaluated";
  const since = threshold.met_s === null ? "" : ` for ${duration(threshold.met_s * 1e6)}`;
  const wait = threshold.met_s !== null && threshold.met_s < threshold.tolerance_s ? ` of ${duration(threshold.tolerance_s * 1e6)}` : "";
  return `${STATES[threshold.met] ?? threshold.met}${since}${wait}${threshold.dry_run ? ", dry run" : ""}`;
}

function showThreshold(row, threshold) {
  row.dataset.met = threshold.judged ? threshold.met : "unknown";
  const name = [threshold.plugin, threshold.subject || threshold.scope].filter(Boolean).join(" ");
  write(row, [name, state(threshold), amount(threshold, threshold.observed), threshold.value === null ? NONE : `${threshold.operator} ${amount(threshold, threshold.value)}`, threshold.text]);
}

function fate({ victim, kill }) {
  if (kill !== null) return kill.reason;
  return victim.dry_run ? "would be evicted" : victim.notify ? "notified" : "is evicted";
}

function build(entry) {
  const { victim, kill } = entry;
  const bad = kill !== null && ["EvictFailed", "EvictExceededGracePeriod"].includes(kill.reason);
  return el("li", { class: "entry", "data-fate": bad ? "bad" : victim?.dry_run || victim?.notify ? "shown" : "done" },
    el("span", { class: "change" },
      el("time", { datetime: new Date(entry.wall_time_ns / 1e6).toISOString() }, clock(entry.wall_time_ns / 1e6)), " ",
      el("b", {}, victim?.pod ?? kill.pod), " ", el("span", { class: "status" }, fate(entry))),
    el("span", { class: "why" }, victim !== null ? `${victim.plugin}: ${victim.verdict.text}` : kill.message));
}

export class Evictions {
  #last = 0;

  /** Number of the newest entry that is shown. */
  get last() { return this.#last; }

  clear() {
    this.#last = 0;
    byId("evicted").replaceChildren();
  }

  /** Entries of the journal that are new, oldest first. */
  add(entries) {
    const list = byId("evicted");
    for (const entry of entries) {
      list.prepend(build(entry));
      this.#last = entry.seq;
    }
    while (list.children.length > KEEP) list.lastElementChild.remove();
  }

  /** Show the panel; hide it if no plugin is configured. */
  show(result) {
    byId("evictions").hidden = result === null;
    if (result === null) return;
    const met = result.thresholds.filter((threshold) => threshold.met !== "not-met").length;
    const unevaluated = result.thresholds.filter((threshold) => !threshold.judged).length;
    const parts = [`${met} of ${result.thresholds.length} thresholds met`, unevaluated ? `${unevaluated} not evaluated` : "", result.leaving.length ? `terminating: ${result.leaving.join(", ")}` : "", ...Object.entries(result.held).map(([pod, why]) => `${pod} is blocked for now: ${why}`)];
    say(byId("evictions-note"), parts.filter(Boolean).join(" · "));
    const conditions = result.conditions.map((c) => `Condition ${c.name} (${c.effects.join(", ")}) is set; ${c.plugin} met its threshold ${duration(c.last_met_s * 1e6)} ago.`);
    const list = byId("conditions");
    list.hidden = conditions.length === 0;
    each(list, conditions, () => el("li"), say);
    each(byId("thresholds").tBodies[0], result.thresholds, () => line(4), showThreshold);
    byId("no-evicted").hidden = byId("evicted").children.length > 0;
  }
}
