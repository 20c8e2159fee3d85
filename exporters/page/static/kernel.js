// Memory and threads as the kernel reports them: zones and their watermarks, background reclaim, OOM kills, threads by state.

import { byId, each, el, hint, line, say, sayName, svg, write } from "/static/dom.js";
import { bytes, clock, cores, duration, integer, NONE, percent, perSecond } from "/static/format.js";

const MOST_LINES = 12;
const STATES = ["t-runnable", "t-iowait", "t-blocked", "t-sleeping"]; // in the order of the table's heads
const MARKS = ["min", "low", "high"];

/** Time in which tasks were stalled. */
const stalled = (ms) => (typeof ms !== "number" ? NONE : ms > 0 ? `${duration(ms * 1000)} a second` : "none");

export function showMemory(node, refaults) {
  const share = node.memory_total_bytes ? node.memory_available_bytes / node.memory_total_bytes : null;
  say(byId("memory-free"), `${bytes(node.memory_available_bytes)} of ${bytes(node.memory_total_bytes)} available${share === null ? "" : ` (${percent(share)})`}`);
  const facts = [
    ["direct reclaim", stalled(node.reclaim?.direct_ms)],
    ["reclaim at limits", stalled(node.reclaim?.limit_ms)],
    ["refaults", `${perSecond(refaults)} pages/s`],
  ];
  each(byId("memory-facts"), facts, () => el("div", {}, el("dt"), el("dd")), (fact, texts) => texts.forEach((text, k) => say(fact.children[k], text)));
  const kswapd = byId("kswapd");
  kswapd.hidden = node.kswapd.length === 0;
  each(kswapd.tBodies[0], node.kswapd, () => line(4), (row, k) =>
    write(row, [`NUMA node ${k.node}`, percent(k.active_ratio), perSecond(k.wakeups), perSecond(k.scanned_pages), perSecond(k.reclaimed_pages)]));
  const zones = byId("zones");
  zones.hidden = node.zones.length === 0;
  each(zones.tBodies[0], node.zones, zoneRow, showZone);
  const victims = [...node.oom_victims].reverse().slice(0, 5);
  byId("oom").hidden = victims.length === 0;
  each(byId("oom").querySelector("ul"), victims, () => el("li", {}, el("time"), el("span"), el("code")), (item, v) =>
    [clock(v.wall_time_ns / 1e6), ` ${v.command} (process ${v.pid}) of `, v.cgroup].forEach((text, k) => say(item.children[k], text)));
}

function zoneRow() {
  const row = line(3);
  row.lastChild.className = "gauge";
  row.lastChild.append(drawn([svg("rect", { class: "gauge-free", x: 0, y: 2, height: 6 }), ...MARKS.map(() => svg("line", { class: "gauge-mark", y1: 0, y2: 10 }))]));
  return row;
}

/** Free pages of a zone as multiples of its high watermark: below 1 kswapd works, at `min` allocations wait. */
function showZone(row, zone) {
  const state = zone.free < zone.min ? "below min" : zone.free < zone.low ? "below low" : zone.free < zone.high ? "below high" : "";
  const scale = Math.max(zone.high * 4, 1), x = (pages) => `${Math.min((100 * pages) / scale, 100)}%`;
  row.dataset.state = state ? "low" : "well";
  write(row, [`${zone.node} ${zone.name}`, percent(zone.free / zone.managed), state || (zone.high ? `${(zone.free / zone.high).toFixed(1)} × high` : NONE)]);
  const [free, ...marks] = row.querySelectorAll("rect, line");
  free.setAttribute("width", x(zone.free));
  for (const [k, mark] of MARKS.entries()) for (const end of ["x1", "x2"]) marks[k].setAttribute(end, x(zone[mark]));
}

export function showThreads(cgroups, names) {
  const known = cgroups.filter((c) => c.threads_by_state);
  const busy = (c) => c.threads_by_state.runnable + c.threads_by_state.uninterruptible;
  const shown = known.sort((a, b) => busy(b) - busy(a)).slice(0, MOST_LINES);
  byId("no-threads").hidden = shown.length > 0;
  byId("threads").hidden = shown.length === 0;
  each(byId("threads").tBodies[0], shown, threadsRow, (row, c) => {
    const { runnable, iowait, uninterruptible, sleeping } = c.threads_by_state;
    const counts = [runnable, iowait, Math.max(uninterruptible - iowait, 0), sleeping];
    const name = names(c.cgroup);
    sayName(row.cells[0], name);
    for (const [k, text] of [...counts.map(integer), cores(c.load?.[0])].entries()) say(row.cells[k + 1], text);
    row.cells[0].title = hint(name, c.cgroup);
    for (const [k, count] of counts.entries()) row.cells[k + 1].className = count ? "" : "nil";
    showBar(row, counts);
  });
}

function threadsRow() {
  const row = line(6);
  row.lastChild.className = "gauge";
  row.lastChild.append(drawn(STATES.map((css) => svg("rect", { class: css, y: 1, height: 8 }))));
  return row;
}

function showBar(row, counts) {
  const whole = Math.max(counts.reduce((a, b) => a + b, 0), 1);
  let at = 0;
  for (const [k, part] of row.querySelectorAll("rect").entries()) {
    const wide = (100 * counts[k]) / whole;
    part.setAttribute("x", `${at}%`);
    part.setAttribute("width", `${wide}%`);
    at += wide;
  }
}

const drawn = (parts) => svg("svg", { "aria-hidden": "true", width: "100%", height: "10" }, ...parts);
