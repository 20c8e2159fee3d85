// What the kernel says of memory and threads: zones and their watermarks, background reclaim, OOM kills, threads by state.

import { byId, el, say, svg } from "/static/dom.js";
import { bytes, clock, cores, duration, integer, pathClass, percent } from "/static/format.js";

const MOST_LINES = 12;
const STATES = [["runnable", "t-runnable"], ["iowait", "t-iowait"], ["uninterruptible", "t-blocked"], ["sleeping", "t-sleeping"]];

/** Rebuild children only when what they show has changed. */
function same(parent, data, build) {
  const key = JSON.stringify(data);
  if (parent.dataset.shown === key) return;
  parent.dataset.shown = key;
  parent.replaceChildren(...data.map(build));
}

const perSecond = (x) => (x === null || x === undefined ? "–" : x > 0 && x < 9.95 ? x.toFixed(1) : integer(x));

/** Time that tasks stood still. */
const stalled = (ms) => (typeof ms !== "number" ? "–" : ms > 0 ? `${duration(ms * 1000)} a second` : "none");

export function showMemory(node, refaults) {
  const share = node.memory_total_bytes ? node.memory_available_bytes / node.memory_total_bytes : null;
  say(byId("memory-free"), `${bytes(node.memory_available_bytes)} of ${bytes(node.memory_total_bytes)} could be had${share === null ? "" : ` (${percent(share)})`}`);
  const facts = [
    ["direct reclaim", stalled(node.reclaim?.direct_ms)],
    ["reclaim at limits", stalled(node.reclaim?.limit_ms)],
    ["refaults", `${perSecond(refaults)} pages/s`],
  ];
  same(byId("memory-facts"), facts, ([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  const kswapd = byId("kswapd");
  kswapd.hidden = node.kswapd.length === 0;
  same(kswapd.tBodies[0], node.kswapd.map((k) => [`NUMA node ${k.node}`, percent(k.active_ratio), perSecond(k.wakeups), perSecond(k.scanned_pages), perSecond(k.reclaimed_pages)]),
    ([name, ...cells]) => el("tr", {}, el("th", { scope: "row" }, name), ...cells.map((cell) => el("td", {}, cell))));
  const zones = byId("zones");
  zones.hidden = node.zones.length === 0;
  same(zones.tBodies[0], node.zones.map((zone) => [zone, Math.round((400 * zone.free) / zone.managed)]), ([zone]) => zoneRow(zone));
  const victims = [...node.oom_victims].reverse().slice(0, 5);
  byId("oom").hidden = victims.length === 0;
  same(byId("oom").querySelector("ul"), victims, (v) => el("li", {}, el("time", {}, clock(v.wall_time_ns / 1e6)), ` ${v.command} (process ${v.pid}) of `, el("code", {}, v.cgroup)));
}

/** Free pages of a zone as multiples of its high watermark: below 1 kswapd works, at `min` allocations stand still. */
function zoneRow(zone) {
  const state = zone.free < zone.min ? "below min" : zone.free < zone.low ? "below low" : zone.free < zone.high ? "below high" : "";
  const scale = Math.max(zone.high * 4, 1), x = (pages) => `${Math.min((100 * pages) / scale, 100)}%`;
  return el("tr", { "data-state": state ? "low" : "well" },
    el("th", { scope: "row" }, `${zone.node} ${zone.name}`),
    el("td", {}, percent(zone.free / zone.managed)),
    el("td", {}, state || (zone.high ? `${(zone.free / zone.high).toFixed(1)} × high` : "–")),
    el("td", { class: "gauge" }, svg("svg", { "aria-hidden": "true", width: "100%", height: "10" },
      svg("rect", { class: "gauge-free", x: 0, y: 2, height: 6, width: x(zone.free) }),
      ...["min", "low", "high"].map((mark) => svg("line", { class: "gauge-mark", x1: x(zone[mark]), x2: x(zone[mark]), y1: 0, y2: 10 })))));
}

export function showThreads(cgroups, names) {
  const known = cgroups.filter((c) => c.threads_by_state);
  const busy = (c) => c.threads_by_state.runnable + c.threads_by_state.uninterruptible;
  const shown = known.sort((a, b) => busy(b) - busy(a)).slice(0, MOST_LINES);
  const body = byId("threads").tBodies[0];
  byId("no-threads").hidden = shown.length > 0;
  byId("threads").hidden = shown.length === 0;
  const lines = shown.map((c) => {
    const s = c.threads_by_state;
    return [names(c.cgroup), c.cgroup, { runnable: s.runnable, iowait: s.iowait, uninterruptible: Math.max(s.uninterruptible - s.iowait, 0), sleeping: s.sleeping }, c.load?.[0] ?? null];
  });
  same(body, lines, ([name, cgroup, states, load]) => el("tr", {},
    el("th", { scope: "row", title: cgroup, class: pathClass(name) }, name),
    ...STATES.map(([state]) => el("td", { class: states[state] ? "" : "nil" }, integer(states[state]))),
    el("td", {}, cores(load)),
    el("td", { class: "gauge" }, bar(states))));
}

function bar(states) {
  const whole = Math.max(STATES.reduce((sum, [state]) => sum + states[state], 0), 1);
  let at = 0;
  return svg("svg", { "aria-hidden": "true", width: "100%", height: "10" }, ...STATES.map(([state, css]) => {
    const wide = (100 * states[state]) / whole;
    const part = svg("rect", { class: css, x: `${at}%`, y: 1, height: 8, width: `${wide}%` });
    at += wide;
    return part;
  }));
}
