// Gain and cost of colocation since the first agent ran on the node: core-hours, latency with and without batch work, CPU
// taken back, and what was not measured. cli/colocation_report.py has the texts of the terminal.

import { byId, each, el, line, say, write } from "/static/dom.js";
import { cores, duration, integer, NONE, percent, quantile } from "/static/format.js";

const NS_PER_HOUR = 3600e9;
const MIN_WAITS = 1000;
const MAX_LOAD_RATIO = 1.5;
const MAX_NAMESPACES = 6;

const hours = (ns) => cores(ns / NS_PER_HOUR);
const total = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);

/** How long: 90 s, 90 min, 2.0 h. */
function span(ns) {
  const seconds = ns / 1e9;
  if (seconds < 99.5) return `${seconds.toFixed(0)} s`;
  return seconds < 5970 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function cpuRows(totals) {
  const used = total(totals.reclaimed_ns), lent = totals.reclaimable_ns;
  const mean = (ns) => cores(ns / totals.duration_ns);
  const named = Object.entries(totals.reclaimed_ns).sort(([a, x], [b, y]) => y - x || a.localeCompare(b));
  const rest = named.slice(MAX_NAMESPACES);
  return [
    ["lent to reclaimed pods", hours(lent), mean(lent), ""],
    ["used by reclaimed pods", hours(used), mean(used), lent ? `${percent(used / lent)} of lent` : ""],
    ...named.slice(0, MAX_NAMESPACES).map(([name, ns]) => [`· ${name === "_other" ? "other namespaces" : name}`, hours(ns), mean(ns), ""]),
    ...(rest.length ? [[`· ${rest.length} more namespaces`, hours(rest.reduce((sum, [, ns]) => sum + ns, 0)), "", ""]] : []),
  ];
}

const meanCores = ({ cpu_ns: cpu, duration_ns: time }) => (time ? cpu / time : null);

function latencyRow(name, online, bounds) {
  const { latency, duration_ns: time } = online;
  const q = (share) => (latency.slots === null ? NONE : duration(quantile(latency.slots, bounds, share)));
  return [name, time ? span(time) : NONE, cores(meanCores(online)), time ? integer(latency.count) : NONE, q(0.5), q(0.99)];
}

function takenBack({ reductions, evictions }) {
  const ranked = (counts) => Object.entries(counts).sort(([a, x], [b, y]) => y - x || a.localeCompare(b)).map(([rule, count]) => `${rule} ${integer(count)}`);
  const parts = [];
  if (total(reductions)) parts.push(`CPU reduced in ${integer(total(reductions))} cycles (${ranked(reductions).join(", ")})`);
  if (total(evictions)) parts.push(`${integer(total(evictions))} ${total(evictions) === 1 ? "eviction" : "evictions"} (${ranked(evictions).join(", ")})`);
  return parts.length ? `Taken back: ${parts.join("; ")}.` : "Nothing was taken back from reclaimed pods.";
}

/** One sentence for each thing that the totals cannot show. */
export function unknowns(totals, act) {
  const { busy, idle } = totals;
  const found = [];
  if (act !== "on") found.push(`The agent runs with --act ${act}, so it lends no CPU: use profile colocate, or --act on.`);
  if (!total(totals.reclaimed_ns)) found.push("No reclaimed pod has used CPU: give a batch pod the QoS level reclaimed_cores.");
  if (!busy.duration_ns && !idle.duration_ns) return [...found, "The run-queue latency of online pods was not measured. Sources has the reason (source waits)."];
  if (!busy.duration_ns) found.push("Reclaimed pods were idle in all the measured time, so the latency with batch work is unknown: run a batch pod.");
  if (!idle.duration_ns) found.push("Reclaimed pods were busy in all the measured time, so the latency without batch work is unknown: suspend the batch jobs for ten minutes.");
  for (const [name, online] of [["with", busy], ["without", idle]]) {
    if (online.duration_ns && online.latency.count < MIN_WAITS) found.push(`The p99 ${name} batch work is not reliable: ${integer(online.latency.count)} waits were measured, ${integer(MIN_WAITS)} are needed. Measure longer.`);
  }
  const [less, more] = [meanCores(busy), meanCores(idle)].sort((a, b) => a - b);
  if (busy.duration_ns && idle.duration_ns && more > MAX_LOAD_RATIO * less) {
    found.push(`Online pods used ${cores(meanCores(busy))} cores with batch work and ${cores(meanCores(idle))} cores without. This difference in load changes the latency too: compare times of similar load.`);
  }
  if (!totals.interference_duration_ns) found.push("The time that online pods waited for reclaimed pods was not measured, because the probe blame does not run. Sources has the reason.");
  return found;
}

export function showWorth(view) {
  const { totals } = view;
  const known = totals !== null && totals.duration_ns > 0;
  for (const id of ["worth-cpu", "worth-latency", "worth-more"]) byId(id).hidden = !known;
  byId("no-worth").hidden = known;
  if (!known) return;
  say(byId("worth-note"), `${span(totals.duration_ns)} measured since ${new Date(totals.since_wall_ns / 1e6).toISOString().slice(0, 16).replace("T", " ")} UTC`);
  each(byId("worth-cpu").tBodies[0], cpuRows(totals), () => line(3), write);
  const rows = [latencyRow("with batch work", totals.busy, view.bounds_us), latencyRow("without batch work", totals.idle, view.bounds_us)];
  each(byId("worth-latency").tBodies[0], rows, () => line(5), write);
  const harm = totals.interference_duration_ns ? `Online pods waited ${duration(totals.interference_ns / 1e3)} for reclaimed pods. ` : "";
  each(byId("worth-more"), [harm + takenBack(totals), ...unknowns(totals, view.act)], () => el("li"), say);
}
