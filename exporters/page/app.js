// Ask the agent every second, keep five minutes, and draw. One View at a time: the object that the agent itself judged by.

import { SPAN_MS, Cursor, TimeChart } from "/static/charts.js";
import { Decisions, direction } from "/static/decisions.js";
import { byId } from "/static/dom.js";
import { chosen, cores, duration, percent } from "/static/format.js";
import { derive } from "/static/model.js";
import { showAway, showHeader, showLimits, showSources, showTiles, showWaits, showWorkloads } from "/static/panels.js";
import { WaitsChart } from "/static/waits.js";

const EVERY_MS = 1000;
const PATIENCE_MS = 4000; // of the agent's answer
const STALL_MS = 5000; // so long without a new round, and the numbers are called old

const cursor = new Cursor();
const decisions = new Decisions();
const charts = [
  new TimeChart(byId("cpu-chart"), {
    name: "CPU use in cores",
    series: [
      { key: "batch", label: "batch", kind: "area", css: "s-batch" },
      { key: "online", label: "online", kind: "area", css: "s-online" },
      { key: "rest", label: "other", kind: "area", css: "s-rest", quiet: true },
      { key: "lent", label: "lent", kind: "step", css: "s-lent" },
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
      { key: "throttledOnline", label: "online", kind: "line", css: "s-online" },
    ],
    top: () => 1,
    format: percent,
    tick: (value) => `${Math.round(value * 100)} %`,
  }, cursor),
];
const waitsChart = new WaitsChart(byId("waits-chart"));
const model = { rows: [], view: null, targetUs: null, heardMs: 0, roundMs: 0 };

async function get(path) {
  const response = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  const body = await response.json();
  if (!response.ok) throw new Error(body.error ? `${body.error}; ${body.remedy}` : `HTTP ${response.status}`);
  return body;
}

function forget() {
  model.rows = [];
  model.targetUs = null;
  decisions.clear();
}

function take(views) {
  for (const view of views) {
    const row = derive(view);
    if (row.seq <= (model.rows.at(-1)?.seq ?? -1)) continue;
    model.rows.push(row);
    model.targetUs = row.targetUs ?? model.targetUs;
  }
  const end = model.rows.at(-1)?.time ?? 0;
  model.rows = model.rows.filter((row) => end - row.time <= SPAN_MS);
}

/** Whatever happened since the last look, in as few requests as it takes. */
async function look() {
  const view = await get("/api/v1/view");
  const last = model.rows.at(-1);
  const restarted = last && (view.seq < last.seq || (view.seq === last.seq && view.wall_time_ms !== last.time));
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
  showWorkloads(view);
  showSources(view);
  const marks = decisions.entries
    .filter((entry) => entry.outcome.status === "applied")
    .map((entry) => ({ time: entry.wall_time_ns / 1e6, kind: direction(entry.outcome) }));
  charts[0].update(rows, marks);
  charts[1].update(rows);
  charts[2].update(rows);
  drawWaits();
}

function drawWaits() {
  if (!model.view) return;
  const span = Number(document.querySelector("#span input:checked").value);
  const end = model.rows.at(-1).time;
  const rows = span === 1 ? model.rows.slice(-1) : model.rows.filter((row) => end - row.time < span * 1000);
  showWaits(waitsChart, model.view, rows, model.targetUs);
}

async function round() {
  let failure = null;
  try {
    await look();
    model.heardMs = performance.now();
  } catch (error) {
    failure = error;
  }
  if (failure === null) draw();
  const stalledMs = performance.now() - model.roundMs;
  showAway({ failure, view: model.view, silentMs: performance.now() - model.heardMs, stalledMs: stalledMs > STALL_MS ? stalledMs : 0 });
  setTimeout(round, document.hidden ? 4 * EVERY_MS : EVERY_MS);
}

byId("span").addEventListener("change", drawWaits);
document.addEventListener("visibilitychange", () => { if (!document.hidden) draw(); });
round();
