// Writes one View into the page's texts: header, limits, tiles, sources, and the notice while the agent does not answer.

import { brief, byId, each, el, say, write } from "/static/dom.js";
import { bytes, chosen, clock, cores, duration, durationParts, integer, NONE, percent, quantile } from "/static/format.js";
import { shorten, watching } from "/static/model.js";

const ACTS = {
  on: "● on: writes to cgroups",
  "dry-run": "◌ dry-run: writes nothing",
  off: "○ off: decides nothing",
};
const ACTIONS = { grow: "▲ grow", hold: "= hold", shrink: "▼ shrink", freeze: "‖ freeze" };
const TRIGGERS = { wait: "Early cycle: run-queue latency of online pods exceeded its target.", psi: "Early cycle: a pressure trigger fired." };
const TOPICS = { power: "Power", overcommit: "Overcommitment" };

const HARM_MS = 10, HIGH_HARM_MS = 100; // a hundredth and a tenth of one task's time

/** How much online pods wait for reclaimed pods, as the colour of the verdict: low, some or high. */
const harmLevel = (ms) => (ms === null || ms < HARM_MS ? "low" : ms < HIGH_HARM_MS ? "some" : "high");

const harmText = (ms) => (ms < 9.95 ? ms.toFixed(1) : integer(ms));

function showHarm(ms) {
  for (const id of ["verdict", "harm-tile"]) byId(id).dataset.harm = harmLevel(ms);
  byId("harm-note").hidden = harmLevel(ms) === "low";
  say(byId("harm-note"), ms === null ? "" : `Online pods wait ${harmText(ms)} ms a second for reclaimed pods.`);
  say(byId("harm"), ms === null ? NONE : harmText(ms));
  say(byId("harm-unit"), ms === null ? "" : "ms/s");
  bar("harm-bar", ms, HIGH_HARM_MS);
  say(byId("harm-tile-note"), ms === null ? "not measured: no probe blame" : { low: `below ${HARM_MS} ms/s`, some: `above ${HARM_MS} ms/s`, high: `above ${HIGH_HARM_MS} ms/s` }[harmLevel(ms)]);
}

export function showHeader(view) {
  say(byId("node"), view.node_name ? ` · ${view.node_name}` : "");
  showHarm(view.interference_ms);
  const act = byId("act");
  act.dataset.act = view.act;
  say(act, ACTS[view.act] ?? view.act);
  say(byId("policy"), view.policy || "none");
  const pools = Object.entries(view.pools).map(([name, cpus]) => `${name} ${cpus || "none"}`).join(" · ");
  byId("pools").hidden = pools === "";
  say(byId("pools"), `pools: ${pools}`);
  say(byId("live-text"), `cycle ${integer(view.seq)} · ${clock(view.wall_time_ms)}`);
  const action = byId("action");
  action.dataset.action = view.action || "none";
  say(action, ACTIONS[view.action] ?? (view.action || "no advice"));
  const silent = watching(view) ? "No pods are listed: every cgroup is measured, and nothing is decided. List pods with --kubelet, or in a file with --pods." : view.act === "off" ? "Decisions are switched off (--act off). Use --act dry-run to see them, --act on to apply them." : "The policy gave no advice. Sources and the agent's log have the reason.";
  byId("quota-trial").hidden = view.quota_trial === "";
  say(byId("quota-trial"), view.quota_trial);
  byId("shadow").hidden = view.shadow === null;
  if (view.shadow !== null) {
    say(byId("shadow"), `Shadow policy ${view.shadow.policy}: ${cores(view.shadow.lent_cores)} reclaimable cores (${view.shadow.action}). ${view.shadow.reason}`);
  }
  byId("answers").hidden = view.answers.length === 0;
  say(byId("answers"), view.answers.map(({ topic, text }) => `${TOPICS[topic] ?? topic}: ${text}`).join(" "));
  const forecasts = view.forecasts.filter(({ forecast }) => forecast.peak !== null).map(forecastText);
  byId("forecast").hidden = forecasts.length === 0;
  say(byId("forecast"), forecasts.length ? `Forecast for the next hour, without batch work: ${forecasts.join("; ")}.` : "");
  say(byId("reason"), [view.reason || silent, TRIGGERS[view.trigger]].filter(Boolean).join(" "));
}

function forecastText({ resource, used, forecast, score, promised_miss_ratio: allowed }) {
  const amount = (value) => (resource === "cpu" ? `${cores(value)} cores` : bytes(value));
  const missed = score === null || score.miss_ratio === null ? "" : `, missed ${percent(score.miss_ratio)} of the last day's (${percent(allowed)} allowed)`;
  return `at most ${amount(forecast.peak)}${resource === "cpu" ? "" : ` of ${resource}`}, ${amount(used)} now${missed}`;
}

export function showLimits(view) {
  const section = byId("limits");
  section.hidden = view.banner.length === 0;
  each(section.querySelector("ul"), view.banner, () => el("li"), say);
}

function bar(id, value, top) {
  byId(id).style.width = `${value === null || !top ? 0 : Math.min(Math.max(value / top, 0), 1) * 100}%`;
}

export function showTiles(view, row, targetUs) {
  document.body.dataset.watch = String(watching(view));
  say(byId("latency-title"), watching(view) ? "Highest run-queue latency" : "Request and run-queue latency");
  const cpus = view.node_cpus;
  say(byId("lent"), cores(view.lent_cores));
  say(byId("lent-of"), `of ${cpus} cores`);
  bar("lent-bar", view.lent_cores, cpus);
  say(byId("lent-note"), view.lent_cores !== null && view.lent_cores >= cpus ? "all idle cores" : view.headroom === null || view.headroom.cores === null ? "" : `headroom ${cores(view.headroom.cores)}, use included`);
  const reported = view.advertised === null ? null : view.advertised.cores;
  say(byId("reported-note"), reported === null ? "" : `reported ${cores(reported)}`);
  say(byId("used"), cores(view.reclaimed_cores));
  bar("used-bar", view.reclaimed_cores, cpus);
  say(byId("used-note"), view.reclaimed_cores !== null && view.lent_cores ? `${percent(view.reclaimed_cores / view.lent_cores)} of reclaimable` : "");
  say(byId("need"), cores(view.requirement_cores));
  bar("need-bar", view.requirement_cores, cpus);
  say(byId("need-note"), row.online === null ? "" : `estimated; uses ${cores(row.online)}`);
  say(byId("busy"), cores(view.busy_cores));
  say(byId("busy-of"), `of ${cpus} cores`);
  bar("busy-bar", view.busy_cores, cpus);
  say(byId("busy-note"), `steal ${cores(view.steal_cores)} · pressure ${percent(view.cpu_pressure_ratio)}`);
  showKernel(view, row);
  showTimes(view, row, targetUs);
}

/** The tiles of a node without listed pods. */
function showKernel(view, row) {
  const { pressure, memory_total_bytes: total, memory_available_bytes: free, load } = view.node;
  say(byId("waiting"), cores(row.waitingTasks));
  say(byId("waiting-note"), load ? `load ${load.map(cores).join(" ")}` : "");
  bar("waiting-bar", row.waitingTasks, view.node_cpus);
  say(byId("stalled"), percent(pressure.cpu?.some ?? null));
  bar("stalled-bar", pressure.cpu?.some ?? null, 1);
  say(byId("stalled-note"), `memory ${percent(pressure.memory?.some ?? null)} · I/O ${percent(pressure.io?.some ?? null)}`);
  say(byId("free"), bytes(free));
  bar("free-bar", total ? total - free : null, total);
  say(byId("free-note"), total ? `available of ${bytes(total)}` : "");
  const worst = [...row.cgroups.values()].reduce((best, c) => ((c.throttled_ratio ?? 0) > (best?.throttled_ratio ?? 0) ? c : best), null);
  say(byId("throttled"), percent(worst?.throttled_ratio ?? (row.cgroups.size ? 0 : null)));
  say(byId("throttled-note"), worst ? `${duration(worst.throttled_ms * 1000)} in the latest cycle` : "no cgroup was throttled");
  say(byId("throttled-cgroup"), worst ? shorten(worst.cgroup) : "");
}

/** Run-queue latency as the advisor evaluates it; the number above it includes the container's own throttling. */
function evaluatedText({ evaluated_wait: evaluated }) {
  if (!evaluated) return "";
  const value = evaluated.p99_us ?? evaluated.mean_us;
  return value === null ? "evaluated: no wait" : `evaluated: ${duration(value)}`;
}

function showTimes(view, row, targetUs) {
  const [latency, latencyUnit] = durationParts(row.latencyP99);
  say(byId("latency"), latency);
  say(byId("latency-unit"), latencyUnit);
  const slowest = row.slowest?.container;
  say(byId("latency-note"), slowest ? `p50 ${duration(row.latencyP50)} · ${integer(slowest.latency.per_second)} req/s` : "no pod reports latency");
  say(byId("latency-pod"), slowest ? brief(slowest.pod, 26) : "dioptase.io/latency-metric");
  const [wait, waitUnit] = durationParts(row.waitP99);
  const waiter = row.waiting?.container;
  const mean = waiter && waiter.wait.p99_us === null;
  const scope = watching(view) ? "cgroup" : "online container";
  say(byId("wait-name"), `Run-queue latency${mean ? ", mean" : " p99"}`);
  byId("wait-name").title = `Of the ${scope} with the highest one, as measured: time throttled by its own quota counts as waiting`;
  say(byId("wait"), wait);
  say(byId("wait-unit"), waitUnit);
  const goal = targetUs === null ? "" : `target ${chosen(targetUs)}`;
  say(byId("wait-note"), waiter ? [mean ? "" : `p50 ${duration(waiter.wait.p50_us)}`, goal].filter(Boolean).join(" · ") : row.noneEnded ? "no wait ended" : "not measured yet");
  say(byId("wait-evaluated"), waiter ? evaluatedText(waiter) : "");
  say(byId("wait-pod"), waiter ? brief(waiter.pod || shorten(waiter.cgroup), 26) : "");
}

export function showSources(view) {
  const list = byId("sources"), ok = view.sources.filter((s) => s.ok).length;
  say(byId("sources-note"), `origin of the numbers; the latest cycle took ${duration(view.round_ms * 1000)}`);
  const working = `${ok} working ${ok === 1 ? "source" : "sources"}`;
  say(byId("sources-ok"), `${list.dataset.all === "true" ? "hide" : "show"} ${working}`);
  byId("sources-ok").hidden = ok === 0;
  each(list, view.sources, sourceItem, (item, s) => {
    item.dataset.ok = String(s.ok);
    const [sign, name] = item.firstChild.children;
    const [, detail, time, remedy] = item.children;
    say(sign, s.ok ? "✓ " : "✕ ");
    say(name, s.name);
    say(detail, s.ok ? s.detail || "ok" : `failed: ${s.error || s.detail}`);
    say(time, duration(s.duration_ns / 1000));
    remedy.hidden = s.ok || !s.remedy;
    say(remedy, s.ok ? "" : s.remedy);
  });
}

const sourceItem = () => el("li", {}, el("b", {}, el("span", { "aria-hidden": "true" }), el("span")), el("span"), el("span", { class: "time" }), el("em"));

/** Announce that the page is paused or resumed. */
export function showPaused(paused) {
  const text = byId("live-text");
  byId("live").dataset.live = "wait";
  say(text, paused ? `paused: ${text.textContent}` : "connecting");
  say(byId("pause"), paused ? "Resume" : "Pause");
  say(byId("pause-status"), paused ? "Paused: the page is not updated." : "Resumed: the page is updated.");
}

/** Show a notice while the agent does not answer or finishes no cycle. */
export function showAway({ failure, view, silentMs, stalledMs }) {
  const alert = byId("alert"), live = byId("live");
  const state = failure ? "away" : stalledMs ? "stuck" : "live";
  live.dataset.live = state;
  document.body.dataset.live = state;
  const name = view?.node_name ? `${view.node_name} · Dioptase` : "Dioptase";
  document.title = state === "live" ? name : `${name} (no answer)`;
  alert.hidden = state === "live";
  if (state === "live") return;
  const when = view ? `The numbers below are of ${clock(view.wall_time_ms)}.` : "";
  if (state === "stuck") {
    say(alert, `The agent answers, but completes no cycle. ${when} Check its log.`);
  } else if (failure instanceof TypeError || failure.name === "TimeoutError") {
    say(alert, `The agent at ${location.host} does not answer. ${when} Retrying every second; start it with dioptase agent.`);
  } else {
    say(alert, `The agent at ${location.host} answers with an error: ${failure.message}. ${when} Retrying every second.`);
  }
  const seconds = Math.round((state === "away" ? silentMs : stalledMs) / 1000);
  say(byId("live-text"), `${state === "away" ? "no answer" : "no new cycle"} for ${seconds} s`);
}
