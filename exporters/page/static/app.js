// Ask the agent every second, keep five minutes, and draw. One View at a time: the object that the agent itself judged by.

import { showAdvice } from "/static/advice.js";
import { SPAN_MS, Cursor, TimeChart } from "/static/charts.js";
import { Decisions, direction } from "/static/decisions.js";
import { byId, say } from "/static/dom.js";
import { Evictions } from "/static/evictions.js";
import { chosen, cores, duration, percent } from "/static/format.js";
import { derive, label, latest, shorten } from "/static/model.js";
import { HeatMap } from "/static/heat.js";
import { showMemory, showThreads } from "/static/kernel.js";
import { Matrix } from "/static/matrix.js";
import { showAway, showHeader, showLimits, showPaused, showSources, showTiles, showWaits, watching } from "/static/panels.js";
import { Timeline } from "/static/timeline.js";
import { WaitsChart } from "/static/waits.js";
import { Workloads } from "/static/workloads.js";

const EVERY_MS = 1000;
const PATIENCE_MS = 4000; // of the agent's answer
const STALL_MS = 5000; // so long without a new round, and the numbers are called old

const SHARE = { top: () => 1, format: percent, tick: (value) => `${Math.round(value * 100)} %` }; // of a chart's values

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
      { key: "lent", label: "lent", kind: "step", css: "s-lent" },
      { key: "shadow", label: "shadow", kind: "step", css: "s-shadow thin", optional: true },
    ],
    top: (rows) => Math.max(rows.at(-1)?.cpus ?? 1, 1),
    format: cores,
    tick: (value) => `${value}`,
  }, cursor),
  new TimeChart(byId("latency-chart"), {
    name: "Online latency and wait",
    series: [
      { key: "latencyP99", label: "p99", kind: "line", css: "s-online" },
      { key: "latencyP50", label: "p50", kind: "line", css: "s-online thin" },
      { key: "waitP99", label: "wait p99", kind: "line", css: "s-wait" },
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
    name: "Reclaim, milliseconds a second",
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
    name: "Lent and used, beside the decisions",
    series: [
      { key: "batch", label: "used", kind: "area", css: "s-batch" },
      { key: "lent", label: "lent", kind: "step", css: "s-lent" },
    ],
    top: (rows) => Math.max(rows.at(-1)?.cpus ?? 1, 1),
    format: cores,
    tick: (value) => `${value}`,
    axis: false,
  }, cursor),
  new TimeChart(byId("then-waits"), {
    name: "Online wait, beside the decisions",
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
const waitsChart = new WaitsChart(byId("waits-chart"));
const model = { rows: [], view: null, labels: new Map(), targetUs: null, heardMs: 0, roundMs: 0, pausedMs: null };

async function get(path) {
  // Against the origin: the page's own address may hold a user and a password, which fetch refuses.
  const response = await fetch(location.origin + path, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
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

function take(views) {
  for (const view of views) {
    const row = derive(view);
    if (row.seq <= (model.rows.at(-1)?.seq ?? -1)) continue;
    model.rows.push(row);
    for (const c of [...view.containers, ...view.others]) model.labels.set(c.cgroup, label(c));
    model.targetUs = row.targetUs ?? model.targetUs;
  }
  const end = model.rows.at(-1)?.time ?? 0;
  model.rows = model.rows.filter((row) => end - row.time <= SPAN_MS);
}

/** Whether another agent made this View, perhaps after a reboot: rounds and the agent's own time only go forwards. */
const begunAnew = (last, { seq, taken_at_ms: time }) => (seq === last.seq ? time !== last.time : seq < last.seq || time < last.time);

/** Whatever happened since the last look, in as few requests as it takes. */
async function look() {
  const view = await get("/api/v1/view");
  const last = model.rows.at(-1);
  const restarted = last && begunAnew(last, view);
  if (restarted) forget();
  if (model.view === null) {
    // The first numbers at once; five minutes of a full node take a moment longer.
    take([view]);
    model.view = view;
    draw();
    model.rows = [];
  }
  const seen = model.rows.at(-1)?.seq ?? 0;
  const fresh = view.seq > seen;
  if (fresh) take(view.seq === seen + 1 && seen > 0 ? [view] : await get(`/api/v1/history?after=${seen}`));
  if (fresh && model.rows.at(-1)?.seq !== view.seq) take([view]);
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
  const made = marks(rows);
  charts[0].update(rows, made.filter(({ entry }) => entry.outcome.status === "applied"));
  for (const chart of charts.slice(1)) chart.update(rows);
  timeline.update(rows, made);
  showMemory(view.node, latest(rows, "refaults"));
  drawWaits();
  drawCgroups();
}

/** The decisions of the rounds that are drawn, oldest first. The journal outlives agents: the wall clock tells rounds of one
 * number apart. */
function marks(rows) {
  const bySeq = new Map(rows.map((row) => [row.seq, row]));
  return decisions.entries.reverse().flatMap((entry) => {
    const row = bySeq.get(entry.round_seq);
    const drawn = row !== undefined && Math.abs(row.wall - entry.wall_time_ns / 1e6) < 2;
    return drawn ? [{ time: row.time, kind: direction(entry.outcome), entry }] : [];
  });
}

function drawWaits() {
  if (!model.view) return;
  showWaits(waitsChart, model.view, recent(), model.targetUs);
}

const names = (cgroup) => model.labels.get(cgroup) ?? shorten(cgroup);

/** What the filter lets through: every word must be in the pod, the container, the QoS level or the path. */
function filter() {
  const asked = byId("filter").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const listed = byId("whose").value;
  const known = new Map();
  return ({ cgroup, qos }) => {
    const key = `${cgroup}\n${qos}`;
    if (!known.has(key)) {
      const text = `${names(cgroup)}\n${key}`.toLowerCase();
      known.set(key, (listed === "" || (listed === "listed") === (qos !== "")) && asked.every((word) => text.includes(word)));
    }
    return known.get(key);
  };
}

/** Everything that the filter and the choices of "Who waits" govern. */
function drawCgroups() {
  const { view, rows } = model;
  if (!view || rows.length === 0) return;
  const fits = filter();
  heat.update(rows, fits, names, byId("order").value);
  matrix.update(recent(), fits, names);
  const all = [...view.containers, ...view.others];
  showThreads(all.filter(fits), names);
  workloads.update(all, view.other_cgroups - view.others.length, fits);
}

/** How many cgroups the filter finds: said when it is used, not every second. */
function sayFound() {
  if (!model.view) return;
  const all = [...model.view.containers, ...model.view.others];
  const found = all.filter(filter()).length;
  say(byId("found"), found === all.length ? "" : `${found} of ${all.length}`);
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
    await look();
    model.heardMs = performance.now();
  } catch (error) {
    failure = error;
  }
  if (model.pausedMs !== null) return;
  if (failure === null) draw();
  const stalledMs = performance.now() - model.roundMs;
  showAway({ failure, view: model.view, silentMs: performance.now() - model.heardMs, stalledMs: stalledMs > STALL_MS ? stalledMs : 0 });
}

async function round() {
  if (model.pausedMs === null) await follow();
  setTimeout(round, document.hidden ? 4 * EVERY_MS : EVERY_MS);
}

/** Stand still, or go on: what happened meanwhile is asked for then, and the agent was not silent in that time. */
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
byId("span").addEventListener("change", () => { drawWaits(); drawCgroups(); });
byId("order").addEventListener("input", drawCgroups);
for (const id of ["filter", "whose"]) byId(id).addEventListener("input", () => { drawCgroups(); sayFound(); });
byId("metric").addEventListener("input", (event) => { heat.metric = event.target.value; drawCgroups(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden && model.pausedMs === null) draw(); });
round();
