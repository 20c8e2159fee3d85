// One View in, one row of what the charts and tiles show out. Pure.

import { online, reclaimed } from "/static/format.js";

const sum = (values) => {
  const known = values.filter((x) => x !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) : null;
};

/** The container with the largest value; null where none has one. */
function worst(containers, value) {
  let found = null;
  for (const c of containers) {
    const x = value(c);
    if (x !== null && x !== undefined && (found === null || x > found.value)) found = { value: x, container: c };
  }
  return found;
}

function addSlots(containers) {
  const all = containers.map((c) => c.wait?.slots ?? null).filter((slots) => slots !== null);
  return all.length ? all[0].map((_, k) => all.reduce((n, slots) => n + slots[k], 0)) : null;
}

/** Waits of all containers of one kind: slots where the source has them, sum and count always. */
function waits(containers) {
  const counts = containers.filter((c) => c.wait !== null);
  return {
    slots: addSlots(containers),
    count: sum(counts.map((c) => c.wait.count)),
    totalUs: sum(counts.map((c) => (c.wait.mean_us === null ? null : c.wait.mean_us * c.wait.count))),
  };
}

/** What five minutes of a cgroup are kept of here; the agent keeps a little more. */
function slim({ cgroup, qos, wait, wait_cores, throttled_ratio, throttled_ms, cpu_pressure_ratio, blame }) {
  const { p99_us, mean_us, count } = wait ?? {};
  return { cgroup, qos, wait: wait && { p99_us, mean_us, count }, wait_cores, throttled_ratio, throttled_ms, cpu_pressure_ratio, blame };
}

/** One WaitView as a side of the histogram. */
function together(wait) {
  return { slots: wait?.slots ?? null, count: wait?.count ?? null, totalUs: wait && wait.mean_us !== null ? wait.mean_us * wait.count : null };
}

export function derive(view) {
  const cgroups = [...view.containers, ...view.others];
  const { pressure, reclaim, kswapd } = view.node;
  const watching = view.containers.length === 0;
  const on = view.containers.filter((c) => online(c.qos));
  const off = view.containers.filter((c) => reclaimed(c.qos));
  const onlineUse = sum(on.map((c) => c.cpu_cores));
  const rest = view.busy_cores === null ? null : Math.max(view.busy_cores - (onlineUse ?? 0) - (view.reclaimed_cores ?? 0), 0);
  const slowest = worst(on, (c) => c.latency?.p99_ms ?? null);
  const those = watching ? view.others : on;
  const waiting = worst(those, (c) => c.wait?.p99_us ?? null) ?? worst(those, (c) => c.wait?.mean_us ?? null);
  const p50 = slowest?.container.latency.p50_ms ?? null;
  return {
    seq: view.seq,
    time: view.taken_at_ms, // only goes forwards, so it is what axes and ages are told by
    wall: view.wall_time_ms, // to be shown: it may be set back
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
    waits: { online: waits(on), batch: waits(off), node: together(view.node.wait), worst: together(watching ? waiting?.container.wait ?? null : null) },
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

/** The wait target, where the latest verdict compared with it (rules of policy `latency` that begin with wait_). */
function target(view) {
  const compares = view.rule.startsWith("wait_") && !view.rule.startsWith("wait_unknown");
  return compares && typeof view.threshold === "number" ? view.threshold * 1000 : null;
}

/** Waits of several rows together. */
export function gather(rows, kind) {
  const parts = rows.map((row) => row.waits[kind]);
  const slots = parts.map((p) => p.slots).filter((s) => s !== null);
  const count = sum(parts.map((p) => p.count));
  const totalUs = sum(parts.map((p) => p.totalUs));
  return {
    slots: slots.length ? slots[0].map((_, k) => slots.reduce((n, s) => n + s[k], 0)) : null,
    count,
    meanUs: count && totalUs !== null ? totalUs / count : null,
  };
}

/** The newest value that is known: some files are read every few rounds only. */
export function latest(rows, key, within = 15) {
  for (const row of rows.slice(-within).reverse()) if (row[key] !== null) return row[key];
  return null;
}

/** What people call a cgroup: its pod and container where one is listed, else the end of its path. */
export function label(c) {
  if (!c.pod) return shorten(c.cgroup);
  return c.pod.endsWith(`/${c.container}`) ? c.pod : `${c.pod} ${c.container}`;
}

/** Paths differ at their ends. */
export function shorten(path) {
  return path.length > 34 ? `…${path.slice(-32)}` : path;
}

/** Mean number of tasks that could run and did not, of the whole node. */
function waitingTasks({ node: { wait }, interval_ms: ms }) {
  if (wait === null || ms === null) return null;
  return wait.count ? (wait.mean_us * wait.count) / 1000 / ms : 0;
}
