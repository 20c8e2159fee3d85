// Details of the latest advice: pools with their sizes, regions with policies and reasons, rejected pods, and memory.

import { byId, each, el, line, say, write } from "/static/dom.js";
import { bytes, cores, NONE } from "/static/format.js";

const STATES = { no_risk: "✓ no risk", tune_memcg: "▲ tune memcg", drop_cache: "■ drop cache", unknown: "? unknown" };

/** Number of CPUs of a pool, with NUMA node, overlap and quota. */
function size({ numa, cpus, overlap, quota_cores: quota }) {
  const shared = Object.entries(overlap).filter(([, n]) => n).map(([name, n]) => `+ ${n} of ${name}`);
  return [`${cpus}${numa < 0 ? "" : ` on NUMA ${numa}`}`, ...shared, ...(quota === null ? [] : [`at most ${cores(quota)} cores`])].join(", ");
}

export function showAdvice(view) {
  const names = [...new Set([...Object.keys(view.pools), ...view.sizes.map(({ pool }) => pool)])].sort();
  each(byId("pool-rows").tBodies[0], names, () => line(2), (row, name) => {
    write(row, [name, view.pools[name] || "none", view.sizes.filter(({ pool }) => pool === name).map(size).join("; ") || NONE]);
  });
  byId("pool-rows").hidden = names.length === 0;
  byId("no-pools").hidden = names.length > 0;
  each(byId("regions"), view.regions, regionItem, (item, region) => {
    const [name, policy, why] = item.children;
    say(name, region.region.name);
    const controls = Object.entries(region.controls).map(([control, value]) => `${control} ${cores(value)}`);
    const signals = region.signals.map(({ name: indicator, current, target }) => `${indicator} ${+current.toPrecision(4)} of ${+target.toPrecision(4)}`);
    say(policy, [region.policy, `${cores(region.lower_cores)} to ${cores(region.upper_cores)} cores`, ...controls, ...signals].join(" · "));
    say(why, region.verdict.text);
  });
  const rejected = Object.entries(view.rejected).sort(([a], [b]) => a.localeCompare(b));
  byId("rejected").hidden = rejected.length === 0;
  each(byId("rejected").querySelector("ul"), rejected, () => el("li", {}, el("b"), el("span")), (item, [pod, verdict]) => {
    say(item.firstChild, pod);
    say(item.lastChild, ` ${verdict.text}`);
  });
  showMemoryAdvice(view.memory);
}

const regionItem = () => el("li", {}, el("b"), el("span", { class: "note" }), el("span"));

function showMemoryAdvice(memory) {
  byId("memory-advice").hidden = memory === null;
  if (memory === null) return;
  const places = [["node", memory.headroom_bytes, null, memory.condition],
    ...Object.entries(memory.numa_conditions).map(([numa, condition]) => [`NUMA ${numa}`, memory.headroom_by_numa[numa] ?? null, memory.provision_by_numa[numa] ?? null, condition])];
  each(byId("memory-rows").tBodies[0], places, () => line(3), (row, [name, headroom, provision, { state, target_bytes: short }]) => {
    row.dataset.state = state;
    write(row, [name, bytes(headroom), bytes(provision), (STATES[state] ?? state) + (short ? `, ${bytes(short)} short` : "")]);
  });
  const reasons = [memory.headroom_verdict, memory.condition.verdict, ...memory.verdicts];
  each(byId("memory-reasons"), reasons, () => el("li"), (item, verdict) => say(item, verdict.text));
}
