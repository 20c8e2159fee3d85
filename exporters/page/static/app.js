// Polls the agent every second, keeps five minutes of views, and draws. The view is built from the snapshot that the agent evaluated.

import { showAdvice } from "/static/advice.js";
import { SPAN_MS, Cursor, TimeChart } from "/static/charts.js";
import { Decisions, direction } from "/static/decisions.js";
import { byId, say } from "/static/dom.js";
import { Evictions } from "/static/evictions.js";
import { chosen, cores, duration, percent } from "/static/format.js";
import { derive, label, latest, podDirectories, shorten, watching } from "/static/model.js";
import { HeatMap } from "/static/heat.js";
import { showMemory, showThreads } from "/static/kernel.js";
import { Matrix } from "/static/matrix.js";
import { showPlacements } from "/static/placements.js";
import { showAway, showHeader, showLimits, showPaused, showSources, showTiles } from "/static/panels.js";
import { RunqLatencyChart, showRunqLatency } from "/static/runq_latency.js";
import { Timeline } from "/static/timeline.js";
import { showWorth } from "/static/worth.js";
import { Workloads } from "/static/workloads.js";

const POLL_INTERVAL_MS = 1000;
const TIMEOUT_MS = 4000; // of a request
const MIN_STALL_MS = 5000; // after this time without a new cycle, or three intervals, the numbers are shown as outdated

const SHARE = { top: () => 1, format: percent, tick: (value) => `${Math.round(value * 100)} %` }; // chart of ratios

const cursor = new Cursor();
const decisions = new Decisions();
const evictions = new Evictions();
const charts = [
  new TimeChart(byId("cpu-chart"), {
    name: "CPU use in cores",
    series: [
      { key: "batch", label: "batch", kind: "area", css: "s-batch" },
      { key: "online", label: "online", kind: "area", css: "s-online" },
      { key: "rest", label: () => (watching(model.view) ? "busy" : "other"), kind: "area", css: "s-rest", quiet: true },
      { key: "lent", label: "reclaimable", kind: "step", css: "s-lent" },
      { key: "shadow", label: "shadow", kind: "step", css: "s-shadow thin", optional: true },
    ],
    top: (rows) => Math.max(rows.at(-1)?.cpus ?? 1, 1),
    format: cores,
    tick: (value) => `${value}`,
  }, cursor),
  new TimeChart(byId("latency-chart"), {
    name: "Request and run-queue latency",
    series: [
      { key: "latencyP99", label: "p99", kind: "line", css: "s-online" },
      { key: "latencyP50", label: "p50", kind: "line", css: "s-online thin" },
      { key: "waitP99", label: "queue p99", kind: "line", css: "s-wait" },
    ],
    log: true,
    format: duration,
    tick: chosen,
    axis: false,
    threshold: () => model.targetUs,
  }, cursor),
  new TimeChart(byId("throttle-chart"), {
    name: "Throttled periods",
    series: [
      { key: "throttledBatch", label: "batch", kind: "line", css: "s-batch" },
      { key: "throttledOnline", label: () => (watching(model.view) ? "worst" : "online"), kind: "line", css: "s-online" },
    ],
    ...SHARE,
  }, cursor),
  new TimeChart(byId("pressure-chart"), {
    name: "Pressure: share of time in which some task stalled",
    series: [
      { key: "cpuSome", label: "CPU", kind: "line", css: "s-online" },
      { key: "memorySome", label: "memory", kind: "line", css: "s-wait" },
      { key: "ioSome", label: "I/O", kind: "line", css: "s-batch" },
    ],
    ...SHARE,
    axis: false,
  }, cursor),
  new TimeChart(byId("reclaim-chart"), {
    name: "Reclaim, milliseconds per second",
    series: [
      { key: "directMs", label: "direct", kind: "line", css: "s-wait" },
      { key: "limitMs", label: "at limits", kind: "line", css: "s-batch" },
      { key: "kswapdMs", label: "kswapd", kind: "line", css: "s-rest" },
    ],
    top: (rows) => Math.max(10, ...rows.flatMap((row) => [row.directMs ?? 0, row.limitMs ?? 0, row.kswapdMs ?? 0])),
    format: (ms) => (ms === null ? "–" : `${ms < 9.95 ? ms.toFixed(1) : Math.round(ms)} ms`),
    tick: (value) => `${Math.round(value)} ms`,
  }, cursor),
  new TimeChart(byId("then-lent"), {
    name: "Reclaimable and used CPU, with the decisions",
    series: [
      { key: "batch", label: "used", kind: "area", css: "s-batch" },
      { key: "lent", label: "reclaimable", kind: "step", css: "s-lent" },
    ],
    top: (rows) => Math.max(rows.at(-1)?.cpus ?? 1, 1),
    format: cores,
    tick: (value) => `${value}`,
    axis: false,
  }, cursor),
  new TimeChart(byId("then-waits"), {
    name: "Online run-queue latency, with the decisions",
    series: [{ key: "waitP99", label: "p99", kind: "line", css: "s-wait" }],
    log: true,
    format: duration,
    tick: chosen,
    axis: false,
    threshold: () => model.targetUs,
  }, cursor),
];
const timeline = new Timeline(cursor, (seq) => decisions.open(seq));
const heat = new HeatMap(byId("heat"), cursor);
const matrix = new Matrix(byId("matrix"));
const workloads = new Workloads();
const waitsChart = new RunqLatencyChart(byId("waits-chart"));
const model = { rows: [], view: null, labels: new Map(), targetUs: null, heardMs: 0, roundMs: 0, pausedMs: null };

async function get(path) {
  // Relative to the origin: the address of the page may contain a user and a password, which fetch refuses.
  const response = await fetch(location.origin + path, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  const body = await response.json();
  if (!response.ok) throw new Error(body.error ? `${body.error}; ${body.remedy}` : `HTTP ${response.status}`);
  return body;
}

function forget() {
  model.rows = [];
  model.targetUs = null;
  model.labels.clear();
  decisions.clear();
  evictions.clear();
}

function addViews(views) {
  for (const view of views) {
    const row = derive(view);
    if (row.seq <= (model.rows.at(-1)?.seq ?? -1)) continue;
    model.rows.push(row);
    const pods = podDirectories(view.containers);
    const counts = new Map();
    for (const { pod } of view.containers) counts.set(pod, (counts.get(pod) ?? 0) + 1);
    for (const c of [...view.containers, ...view.others]) model.labels.set(c.cgroup, label(c, pods, counts.get(c.pod) === 1));
    model.targetUs = row.targetUs ?? model.targetUs;
  }
  const end = model.rows.at(-1)?.time ?? 0;
  model.rows = model.rows.filter((row) => end - row.time <= SPAN_MS);
}

/** Whether another agent drawn this View, perhaps after a reboot: seq and the agent's monotonic time only grow. */
const isRestarted = (last, { seq, taken_at_ms: time }) => (seq === last.seq ? time !== last.time : seq < last.seq || time < last.time);

/** Fetch everything since the previous poll, in as few requests as possible. */
async function poll() {
  const view = await get("/api/v1/view");
  const last = model.rows.at(-1);
  const restarted = last && isRestarted(last, view);
  if (restarted) forget();
  if (model.view === null) {
    // Draw the first view at once; five minutes of a full node take longer.
    addViews([view]);
    model.view = view;
    draw();
    model.rows = [];
  }
  const lastSeq = model.rows.at(-1)?.seq ?? 0;
  const fresh = view.seq > lastSeq;
  if (fresh) addViews(view.seq === lastSeq + 1 && lastSeq > 0 ? [view] : await get(`/api/v1/history?after=${lastSeq}`));
  if (fresh && model.rows.at(-1)?.seq !== view.seq) addViews([view]);
  decisions.add(await get(`/api/v1/decisions?after=${decisions.last}&limit=500`));
  if (view.evictions !== null) evictions.add(await get(`/api/v1/evictions?after=${evictions.last}&limit=100`));
  if (fresh || restarted) model.roundMs = performance.now();
  model.view = view;
}

function draw() {
  const { view, rows } = model;
  const row = rows.at(-1);
  if (!view || !row) return;
  byId("main").dataset.state = "live";
  showHeader(view);
  showLimits(view);
  showTiles(view, row, model.targetUs);
  showSources(view);
  evictions.show(view.evictions);
  showAdvice(view);
  showWorth(view);
  showPlacements(view);
  const drawn = marks(rows);
  charts[0].update(rows, drawn.filter(({ entry }) => entry.outcome.status === "applied"));
  for (const chart of charts.slice(1)) chart.update(rows);
  timeline.update(rows, drawn);
  showMemory(view.node, latest(rows, "refaults"));
  drawWaits();
  drawCgroups();
}

/** Decisions of the drawn cycles, oldest first. The journal outlives agents: the wall clock distinguishes cycles of equal
 * number. */
function marks(rows) {
  const bySeq = new Map(rows.map((row) => [row.seq, row]));
  return decisions.entries.reverse().flatMap((entry) => {
    const row = bySeq.get(entry.round_seq);
    const matches = row !== undefined && Math.abs(row.wall - entry.wall_time_ns / 1e6) < 2;
    return matches ? [{ time: row.time, kind: direction(entry.outcome), entry }] : [];
  });
}

function drawWaits() {
  if (!model.view) return;
  showRunqLatency(waitsChart, model.view, recent(), model.targetUs);
}

const names = (cgroup) => model.labels.get(cgroup) ?? shorten(cgroup);

/** Predicate of the filter: every word must occur in the pod, the container, the QoS level or the path. */
function filter() {
  const words = byId("filter").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const listed = byId("whose").value;
  const cache = new Map();
  return ({ cgroup, qos }) => {
    const key = `${cgroup}\n${qos}`;
    if (!cache.has(key)) {
      const text = `${names(cgroup)}\n${key}`.toLowerCase();
      cache.set(key, (listed === "" || (listed === "listed") === (qos !== "")) && words.every((word) => text.includes(word)));
    }
    return cache.get(key);
  };
}

/** Draw everything that depends on the filter and the choices of the panel Cgroups. */
function drawCgroups() {
  const { view, rows } = model;
  if (!view || rows.length === 0) return;
  const fits = filter();
  heat.update(rows, fits, names, byId("order").value);
  matrix.update(recent(), fits, names);
  const all = [...view.containers, ...view.others];
  showThreads(all.filter(fits), names);
  workloads.update(all, view.other_cgroups - view.others.length, fits, names);
}

/** Announce the number of matching cgroups when the filter changes, not every second. */
function announceMatches() {
  if (!model.view) return;
  const all = [...model.view.containers, ...model.view.others];
  const found = all.filter(filter()).length;
  say(byId("matches"), found === all.length ? "" : `${found} of ${all.length}`);
}

/** The rows of the chosen time. */
function recent() {
  const span = Number(document.querySelector("#span input:checked").value);
  const end = model.rows.at(-1).time;
  return span === 1 ? model.rows.slice(-1) : model.rows.filter((row) => end - row.time < span * 1000);
}

async function follow() {
  let failure = null;
  try {
    await poll();
    model.heardMs = performance.now();
  } catch (error) {
    failure = error;
  }
  if (model.pausedMs !== null) return;
  if (failure === null) draw();
  const stalledMs = performance.now() - model.roundMs;
  // Alarms shorten single intervals, so the longest of the last ten counts.
  const maxMs = Math.max(MIN_STALL_MS, ...model.rows.slice(-10).map((row) => 3000 * (row.intervalS ?? 0)));
  showAway({ failure, view: model.view, silentMs: performance.now() - model.heardMs, stalledMs: stalledMs > maxMs ? stalledMs : 0 });
}

async function loop() {
  if (model.pausedMs === null) await follow();
  setTimeout(loop, document.hidden ? 4 * POLL_INTERVAL_MS : POLL_INTERVAL_MS);
}

/** Pause or resume; the time of a pause does not count as silence of the agent. */
function pause() {
  const now = performance.now();
  if (model.pausedMs === null) {
    model.pausedMs = now;
  } else {
    model.heardMs += now - model.pausedMs;
    model.roundMs += now - model.pausedMs;
    model.pausedMs = null;
  }
  showPaused(model.pausedMs !== null);
}

byId("pause").addEventListener("click", pause);
byId("sources-ok").addEventListener("click", () => {
  const { dataset } = byId("sources"), all = dataset.all !== "true";
  dataset.all = String(all);
  byId("sources-ok").setAttribute("aria-expanded", String(all));
  if (model.view) showSources(model.view);
});
byId("span").addEventListener("change", () => { drawWaits(); drawCgroups(); });
byId("order").addEventListener("input", drawCgroups);
for (const id of ["filter", "whose"]) byId(id).addEventListener("input", () => { drawCgroups(); announceMatches(); });
byId("metric").addEventListener("input", (event) => { heat.metric = event.target.value; drawCgroups(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden && model.pausedMs === null) draw(); });
loop();
