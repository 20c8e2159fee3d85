// One View into the page's texts: header, limits, tiles, workloads, sources, and what is said while the agent is away.

import { byId, each, el, say, write } from "/static/dom.js";
import { bytes, chosen, clock, cores, duration, durationParts, integer, NONE, percent, quantile } from "/static/format.js";
import { gather, shorten } from "/static/model.js";

const ACTS = {
  on: "● on: writes to cgroups",
  "dry-run": "◌ dry-run: writes nothing",
  off: "○ off: decides nothing",
};
const ACTIONS = { grow: "▲ grow", hold: "= hold", shrink: "▼ shrink", freeze: "‖ freeze" };
const TRIGGERS = { wait: "Between ticks, because online pods waited too long.", psi: "Between ticks, because a pressure trigger fired." };
const TOPICS = { power: "Power", overcommit: "Overcommitment" };
const FORMS = { tp_btf: "BPF, typed tracepoint", raw_tp: "BPF, raw tracepoint", classic: "BPF, classic tracepoints", schedstat: "/proc/PID/schedstat, sums only" };

/** Whether nobody said what is a pod: then there is nothing to lend, and the page shows what there is to see. */
export const watching = (view) => view.containers.length === 0;

export function showHeader(view) {
  const act = byId("act");
  act.dataset.act = view.act;
  say(act, ACTS[view.act] ?? view.act);
  say(byId("policy"), view.policy || "none");
  const pools = Object.entries(view.pools).map(([name, cpus]) => `${name} ${cpus || "none"}`).join(" · ");
  byId("pools").hidden = pools === "";
  say(byId("pools"), `pools: ${pools}`);
  say(byId("live-text"), `round ${integer(view.seq)} · ${clock(view.wall_time_ms)}`);
  const action = byId("action");
  action.dataset.action = view.action || "none";
  say(action, ACTIONS[view.action] ?? (view.action || "no advice"));
  const silent = watching(view) ? "No pods are listed: every cgroup is watched, and nothing is decided." : view.act === "off" ? "The agent was told to decide nothing (--act off)." : "The policy gave no advice.";
  byId("shadow").hidden = view.shadow === null;
  if (view.shadow !== null) {
    say(byId("shadow"), `In the shadow, ${view.shadow.policy} would lend ${cores(view.shadow.lent_cores)} cores (${view.shadow.action}). ${view.shadow.reason}`);
  }
  byId("answers").hidden = view.answers.length === 0;
  say(byId("answers"), view.answers.map(({ topic, text }) => `${TOPICS[topic] ?? topic}: ${text}`).join(" "));
  const told = view.forecasts.filter((one) => one.forecast.peak !== null).map(foretold);
  byId("forecast").hidden = told.length === 0;
  say(byId("forecast"), told.length ? `Foretold for the next hour, all but batch work: ${told.join("; ")}.` : "");
  say(byId("reason"), [view.reason || silent, TRIGGERS[view.trigger]].filter(Boolean).join(" "));
}

function foretold({ resource, used, forecast, score, promised_miss_ratio: allowed }) {
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
  say(byId("latency-title"), watching(view) ? "Longest wait" : "Online latency and wait");
  const cpus = view.node_cpus;
  say(byId("lent"), cores(view.lent_cores));
  say(byId("lent-of"), `of ${cpus} cores`);
  bar("lent-bar", view.lent_cores, cpus);
  say(byId("lent-note"), view.lent_cores !== null && view.lent_cores >= cpus ? "all that online pods leave idle" : view.headroom === null || view.headroom.cores === null ? "" : `headroom ${cores(view.headroom.cores)}, use included`);
  const told = view.advertised === null ? null : view.advertised.cores;
  say(byId("told-note"), told === null ? "" : `advertised ${cores(told)}`);
  say(byId("used"), cores(view.reclaimed_cores));
  bar("used-bar", view.reclaimed_cores, cpus);
  say(byId("used-note"), view.reclaimed_cores !== null && view.lent_cores ? `${percent(view.reclaimed_cores / view.lent_cores)} of what is lent` : "");
  say(byId("need"), cores(view.requirement_cores));
  bar("need-bar", view.requirement_cores, cpus);
  say(byId("need-note"), row.online === null ? "" : `estimated; uses ${cores(row.online)}`);
  say(byId("busy"), cores(view.busy_cores));
  say(byId("busy-of"), `of ${cpus} cores`);
  bar("busy-bar", view.busy_cores, cpus);
  say(byId("busy-note"), `stolen ${cores(view.steal_cores)} · pressure ${percent(view.cpu_pressure_ratio)}`);
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
  say(byId("free-note"), total ? `of ${bytes(total)} could be had` : "");
  const worst = [...row.cgroups.values()].reduce((best, c) => ((c.throttled_ratio ?? 0) > (best?.throttled_ratio ?? 0) ? c : best), null);
  say(byId("throttled"), percent(worst?.throttled_ratio ?? (row.cgroups.size ? 0 : null)));
  say(byId("throttled-note"), worst ? `${duration(worst.throttled_ms * 1000)} in the latest round` : "no quota ran out");
  say(byId("throttled-who"), worst ? shorten(worst.cgroup) : "");
}

function showTimes(view, row, targetUs) {
  const [latency, latencyUnit] = durationParts(row.latencyP99);
  say(byId("latency"), latency);
  say(byId("latency-unit"), latencyUnit);
  const told = row.slowest?.container;
  say(byId("latency-note"), told ? `p50 ${duration(row.latencyP50)} · ${integer(told.latency.per_second)} requests/s` : "no online pod reports latency");
  say(byId("latency-who"), told ? told.pod : "");
  const [wait, waitUnit] = durationParts(row.waitP99);
  const waiter = row.waiting?.container;
  const mean = waiter && waiter.wait.p99_us === null;
  const who = watching(view) ? "Longest" : "Online run-queue";
  say(byId("wait-name"), mean ? `${who} wait, mean` : `${who} wait p99`);
  say(byId("wait"), wait);
  say(byId("wait-unit"), waitUnit);
  const goal = targetUs === null ? "" : `target ${chosen(targetUs)}`;
  say(byId("wait-note"), waiter ? [mean ? "" : `p50 ${duration(waiter.wait.p50_us)}`, goal].filter(Boolean).join(" · ") : row.noneEnded ? "no wait ended" : "not measured yet");
  say(byId("wait-who"), waiter ? waiter.pod || shorten(waiter.cgroup) : "");
}

export function showWaits(chart, view, rows, targetUs) {
  // Where no pods are listed: all cgroups above, the one that waits longest in each round below.
  const [first, second] = watching(view) ? ["node", "worst"] : ["online", "batch"];
  const sides = { online: gather(rows, first), batch: gather(rows, second) };
  const names = watching(view) ? ["all cgroups", "the slowest"] : ["online", "batch"];
  chart.update({ bounds: view.bounds_us, targetUs, names, ...sides });
  const form = view.sources.find((source) => source.detail.split(/\W/).some((word) => word in FORMS));
  const word = form?.detail.split(/\W/).find((part) => part in FORMS);
  say(byId("waits-form"), word ?? "");
  byId("waits-form").title = word ? `${form.name}: ${FORMS[word]}` : "";
  const last = rows.at(-1);
  const lines = [
    [sides.online, last?.throttledOnline ?? null, last?.throttledMsOnline ?? null],
    [sides.batch, last?.throttledBatch ?? null, last?.throttledMsBatch ?? null],
  ];
  for (const [i, line] of [...byId("waits-table").tBodies[0].rows].entries()) {
    const [side, ratio, ms] = lines[i];
    const at = (q) => (side.slots === null ? (q === 0.5 && side.meanUs !== null ? `mean ${duration(side.meanUs)}` : NONE) : duration(quantile(side.slots, view.bounds_us, q)));
    const throttled = ratio ? `${percent(ratio)}, ${duration(ms === null ? null : ms * 1000)}` : percent(ratio);
    write(line, [names[i], integer(side.count), at(0.5), at(0.99), throttled]);
  }
}

export function showSources(view) {
  const list = byId("sources");
  say(byId("sources-note"), `what the numbers come from; the latest round took ${duration(view.round_ms * 1000)}`);
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

/** Say that the page stands still, or that it goes on. */
export function showPaused(paused) {
  const text = byId("live-text");
  byId("live").dataset.live = "wait";
  say(text, paused ? `paused: ${text.textContent}` : "connecting");
  say(byId("pause"), paused ? "Go on" : "Pause");
  say(byId("pause-said"), paused ? "Paused: the page stands still." : "The page goes on.");
}

/** Say that the agent is away or stuck; say nothing while it is neither. */
export function showAway({ failure, view, silentMs, stalledMs }) {
  const alert = byId("alert"), live = byId("live");
  const state = failure ? "away" : stalledMs ? "stuck" : "live";
  live.dataset.live = state;
  document.body.dataset.live = state;
  document.title = state === "live" ? "Dioptase" : "Dioptase (no answer)";
  alert.hidden = state === "live";
  if (state === "live") return;
  const when = view ? `The numbers below are of ${clock(view.wall_time_ms)}.` : "";
  if (state === "stuck") {
    say(alert, `The agent answers, but finishes no round. ${when} Look at its log.`);
  } else if (failure instanceof TypeError || failure.name === "TimeoutError") {
    say(alert, `The agent at ${location.host} does not answer. ${when} Asking again every second; dioptase agent starts it.`);
  } else {
    say(alert, `The agent at ${location.host} answers, but not with numbers: ${failure.message}. ${when} Asking again every second.`);
  }
  const seconds = Math.round((state === "away" ? silentMs : stalledMs) / 1000);
  say(byId("live-text"), `${state === "away" ? "no answer" : "no new round"} for ${seconds} s`);
}
