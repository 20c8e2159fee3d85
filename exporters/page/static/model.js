// Derives one row of the values of charts and tiles from one View. Pure.

import { online, reclaimed } from "/static/format.js";

export const sum = (values) => {
  const numbers = values.filter((x) => x !== null);
  return numbers.length ? numbers.reduce((a, b) => a + b, 0) : null;
};

/** The container with the largest value; null where none has one. */
function worst(containers, value) {
  let largest = null;
  for (const c of containers) {
    const x = value(c);
    if (x !== null && x !== undefined && (largest === null || x > largest.value)) largest = { value: x, container: c };
  }
  return largest;
}

function addSlots(containers) {
  const all = containers.map((c) => c.wait?.slots ?? null).filter((slots) => slots !== null);
  return all.length ? all[0].map((_, k) => all.reduce((n, slots) => n + slots[k], 0)) : null;
}

/** Run-queue latency of all containers of one kind: slots if the source has them, sum and count always. */
function waits(containers) {
  const counts = containers.filter((c) => c.wait !== null);
  return {
    slots: addSlots(containers),
    count: sum(counts.map((c) => c.wait.count)),
    totalUs: sum(counts.map((c) => (c.wait.mean_us === null ? null : c.wait.mean_us * c.wait.count))),
  };
}

/** Fields of a cgroup that are kept for five minutes. */
function slim({ cgroup, qos, wait, wait_cores, throttled_ratio, throttled_ms, cpu_pressure_ratio, blame }) {
  const { p99_us, mean_us, count } = wait ?? {};
  return { cgroup, qos, wait: wait && { p99_us, mean_us, count }, wait_cores, throttled_ratio, throttled_ms, cpu_pressure_ratio, blame };
}

/** One run-queue latency as a side of the histogram. */
function latencySide(wait) {
  return { slots: wait?.slots ?? null, count: wait?.count ?? null, totalUs: wait && wait.mean_us !== null ? wait.mean_us * wait.count : null };
}

/** Whether no pods are listed: the agent then decides nothing, and the page shows every cgroup. */
export const watching = (view) => view.containers.length === 0;

export function derive(view) {
  const cgroups = [...view.containers, ...view.others];
  const { pressure, reclaim, kswapd } = view.node;
  const on = view.containers.filter((c) => online(c.qos));
  const off = view.containers.filter((c) => reclaimed(c.qos));
  const onlineUse = sum(on.map((c) => c.cpu_cores));
  const rest = view.busy_cores === null ? null : Math.max(view.busy_cores - (onlineUse ?? 0) - (view.reclaimed_cores ?? 0), 0);
  const slowest = worst(on, (c) => c.latency?.p99_ms ?? null);
  const those = watching(view) ? view.others : on;
  const waiting = worst(those, (c) => c.wait?.p99_us ?? null) ?? worst(those, (c) => c.wait?.mean_us ?? null);
  const p50 = slowest?.container.latency.p50_ms ?? null;
  return {
    seq: view.seq,
    time: view.taken_at_ms, // monotonic: axes and ages use it
    wall: view.wall_time_ms, // shown only: it may be set back
    cpus: view.node_cpus,
    lent: view.lent_cores,
    shadow: view.shadow?.lent_cores ?? null,
    batch: view.reclaimed_cores,
    online: onlineUse,
    rest,
    need: view.requirement_cores,
    slowest,
    waiting,
    noneEnded: waiting === null && those.some((c) => c.wait?.count === 0),
    latencyP99: slowest ? slowest.value * 1000 : null,
    latencyP50: p50 === null ? null : p50 * 1000,
    waitP99: waiting ? waiting.value : null,
    throttledOnline: worst(those, (c) => c.throttled_ratio)?.value ?? null,
    throttledBatch: worst(off, (c) => c.throttled_ratio)?.value ?? null,
    throttledMsOnline: sum(those.map((c) => c.throttled_ms)),
    throttledMsBatch: sum(off.map((c) => c.throttled_ms)),
    waits: { online: waits(on), batch: waits(off), node: latencySide(view.node.wait), worst: latencySide(watching(view) ? waiting?.container.wait ?? null : null) },
    cgroups: new Map(cgroups.map((c) => [c.cgroup, slim(c)])),
    intervalS: view.interval_ms === null ? null : view.interval_ms / 1000,
    cpuSome: pressure.cpu?.some ?? null,
    memorySome: pressure.memory?.some ?? null,
    ioSome: pressure.io?.some ?? null,
    directMs: reclaim?.direct_ms ?? null,
    limitMs: reclaim?.limit_ms ?? null,
    kswapdMs: sum(kswapd.map((k) => k.active_ratio * 1000)),
    refaults: view.node.refaults,
    waitingTasks: waitingTasks(view),
    targetUs: target(view),
  };
}

/** Target of run-queue latency, if the latest rule compared with it (rules of policy `latency` that begin with wait_). */
function target(view) {
  const compares = view.rule.startsWith("wait_") && !view.rule.startsWith("wait_unknown");
  return compares && typeof view.threshold === "number" ? view.threshold * 1000 : null;
}

/** The newest known value: some files are not read in every cycle. */
export function latest(rows, key, within = 15) {
  for (const row of rows.slice(-within).reverse()) if (row[key] !== null) return row[key];
  return null;
}

/** Label of a cgroup: pod and container if one is listed, else what is known of its path. */
export function label(c, pods, only) {
  if (!c.pod) return unlisted(c.cgroup, pods);
  if (only && c.pod.length + c.container.length > LONG_LABEL) return c.pod; // its end, which tells pods apart, is not cut then
  return c.pod.endsWith(`/${c.container}`) ? c.pod : `${c.pod} ${c.container}`;
}

const LONG_LABEL = 40;
const POD_DIRECTORY = /\/[^/]*pod[0-9a-f]{8}[-_][0-9a-f-_]{20,}[^/]*$/;

/** Pods by the cgroup of the pod, which the kubelet names by its uid. */
export function podDirectories(containers) {
  const found = new Map();
  for (const { pod, cgroup } of containers) {
    const directory = cgroup.slice(0, Math.max(cgroup.lastIndexOf("/"), 0));
    if (POD_DIRECTORY.test(directory)) found.set(directory, pod);
  }
  return found;
}

/** Label of a cgroup without a listed container. Beside its containers a pod has the pause container, which holds its namespaces. */
function unlisted(path, pods) {
  if (path === "/") return "/ (the node)";
  const parent = path.slice(0, path.lastIndexOf("/"));
  if (pods?.has(path)) return `${pods.get(path)} (pod)`;
  if (pods?.has(parent)) return `${pods.get(parent)} pause`;
  return shorten(path);
}

/** Paths differ at their ends. */
export function shorten(path) {
  return path.length > 34 ? `…${path.slice(-32)}` : path;
}

/** Mean number of runnable tasks of the node that waited for a CPU. */
function waitingTasks({ node: { wait }, interval_ms: ms }) {
  if (wait === null || ms === null) return null;
  return wait.count ? (wait.mean_us * wait.count) / 1000 / ms : 0;
}
