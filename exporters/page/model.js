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

export function derive(view) {
  const on = view.containers.filter((c) => online(c.qos));
  const off = view.containers.filter((c) => reclaimed(c.qos));
  const onlineUse = sum(on.map((c) => c.cpu_cores));
  const rest = view.busy_cores === null ? null : Math.max(view.busy_cores - (onlineUse ?? 0) - (view.reclaimed_cores ?? 0), 0);
  const slowest = worst(on, (c) => c.latency?.p99_ms ?? null);
  const waiting = worst(on, (c) => c.wait?.p99_us ?? null) ?? worst(on, (c) => c.wait?.mean_us ?? null);
  const p50 = slowest?.container.latency.p50_ms ?? null;
  return {
    seq: view.seq,
    time: view.wall_time_ms,
    cpus: view.node_cpus,
    lent: view.lent_cores,
    batch: view.reclaimed_cores,
    online: onlineUse,
    rest,
    need: view.requirement_cores,
    slowest,
    waiting,
    latencyP99: slowest ? slowest.value * 1000 : null,
    latencyP50: p50 === null ? null : p50 * 1000,
    waitP99: waiting ? waiting.value : null,
    throttledOnline: worst(on, (c) => c.throttled_ratio)?.value ?? null,
    throttledBatch: worst(off, (c) => c.throttled_ratio)?.value ?? null,
    throttledMsOnline: sum(on.map((c) => c.throttled_ms)),
    throttledMsBatch: sum(off.map((c) => c.throttled_ms)),
    waits: { online: waits(on), batch: waits(off) },
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
