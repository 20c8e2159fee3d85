// Numbers and names as text; the same formats as cli/formats.py. An absent value is a dash, never a zero.

export const NONE = "–";

const isNumber = (x) => typeof x === "number" && Number.isFinite(x);

/** Three figures at most: 123, 12.3, 1.23. */
function figures(x) {
  const size = Math.abs(x);
  return x.toFixed(size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2);
}

export const cores = (x) => (isNumber(x) ? x.toFixed(Math.abs(x) >= 99.95 ? 1 : 2) : NONE);

export const integer = (x) => (isNumber(x) ? Math.round(x).toLocaleString("en") : NONE);

/** Rate per second. */
export const perSecond = (x) => (isNumber(x) && x > 0 && x < 9.95 ? x.toFixed(1) : integer(x));

/** [number, unit] of a time in microseconds, so that a tile can set them in different sizes. */
export function durationParts(us) {
  if (!isNumber(us)) return [NONE, ""];
  if (us < 999.5) return [figures(us), "µs"];
  if (us < 999500) return [figures(us / 1e3), "ms"];
  return [figures(us / 1e6), "s"];
}

export const duration = (us) => durationParts(us).join(" ").trim();

/** A configured time: 10 ms, not 10.0 ms. */
export const chosen = (us) => duration(us).replace(/\.0+ /, " ");

/** A bound of a histogram: a power of two, so two figures before the point are sufficient. */
export function bound(us) {
  if (us < 1000) return `${us} µs`;
  return us < 1e6 ? `${Math.round(us / 1000)} ms` : `${Math.round(us / 1e6)} s`;
}

export function percent(ratio) {
  if (!isNumber(ratio)) return NONE;
  const value = ratio * 100;
  if (value > 0 && value < 0.1) return "< 0.1 %";
  return `${value.toFixed(value < 9.95 && value !== 0 ? 1 : 0)} %`;
}

export function bytes(x) {
  if (!isNumber(x)) return NONE;
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (x >= size) return `${figures(x / size)} ${unit}`;
  }
  return `${x} B`;
}

export function clock(ms) {
  return isNumber(ms) ? new Date(ms).toLocaleTimeString("en-GB", { hour12: false }) : NONE;
}

const LISTS = { "cpuset.cpus": "CPUs", "cpuset.mems": "NUMA nodes" };
const BYTES = new Set(["memory.max", "memory.high", "memory.low", "memory.min", "memory.swap.max", "memory.reclaim", "drop_cache"]);

/** Meaning of a knob's value; the kernel's notation is shown in addition if there is room. */
export function knobValue(knob, value) {
  if (value === null || value === undefined) return NONE;
  if (knob === "cpu.max") {
    const [quota, period] = value.split(" ");
    if (quota === "max") return "no limit";
    return Number(period) > 0 ? `${cores(Number(quota) / Number(period))} cores` : value;
  }
  if (knob in LISTS) return value === "" ? "all of its parent" : `${LISTS[knob]} ${value}`;
  if (BYTES.has(knob)) return value === "max" ? "no limit" : /^\d+$/.test(value) ? bytes(Number(value)) : value;
  if (knob === "cpu.idle") return value === "1" ? "yields to siblings" : value === "0" ? "normal" : value;
  if (knob === "sched_runtime") return value === "0" ? "default slice" : `slice of ${(Number(value) / 1e6).toPrecision(2)} ms`;
  return value;
}

/** Old and new value, with the unit once: ["0.20", "0.10 cores"]. */
export function change(knob, before, after) {
  const [from, to] = [knobValue(knob, before), knobValue(knob, after)];
  return [from.endsWith(" cores") && to.endsWith(" cores") ? from.slice(0, -6) : from, to];
}

export const online = (qos) => qos === "shared_cores" || qos === "dedicated_cores";

export const reclaimed = (qos) => qos === "reclaimed_cores";

/** The quantile as api.histogram.quantile_ns, in microseconds: interpolated inside the slot; the open slot gives its lower bound. */
export function quantile(slots, bounds, q) {
  const total = slots.reduce((sum, count) => sum + count, 0);
  if (total === 0) return null;
  let below = 0;
  for (let k = 0; k < slots.length; k += 1) {
    if (slots[k] && below + slots[k] >= q * total) {
      const low = k === 0 ? 0 : bounds[k - 1];
      return k >= bounds.length ? low : low + ((bounds[k] - low) * (q * total - below)) / slots[k];
    }
    below += slots[k];
  }
  return bounds[bounds.length - 1];
}
