"""Plugin system-memory-pressure-eviction-plugin: the node's free memory, stalls or kswapd activity.
It is pure. Each of the three detectors is sufficient. Katalyst defines the kswapd detector and never calls it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.config.eviction import SystemMemoryConfig
from agent.eviction.eviction_inputs import NS_PER_S, EvictionInputs, memory_bytes
from agent.eviction.finding import (
    EvictionCandidate,
    EvictionFinding,
    ThresholdInput,
    make_threshold,
    mean,
    missing_input_finding,
    not_met_finding,
    rank_by_memory,
)
from api.eviction import EvictionThreshold, ThresholdMet
from api.pod import Pod
from api.quantity import format_bytes
from api.snapshot import Snapshot

NAME = "system-memory-pressure-eviction-plugin"
SCOPE = "SystemMemory"
CONDITION = "MemoryPressure"
FREE, KSWAPD, PSI = "free", "kswapd", "psi"
"""The detectors."""
PSI_ANY_FACTOR = 3
"""Stalling for so many times psi_s, any pod may have to leave."""
SCALE_PARTS = 10_000
"""Of watermark_scale_factor."""


class SystemMemoryPressureState(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered from round to round."""

    stolen_pages: int | None = None
    """By background reclaim, when it was last known, and when that was read."""
    stolen_at_ns: int | None = None
    pages_per_s: float = 0.0
    """Between the last two readings."""
    stealing_since_ns: int | None = None
    """CLOCK_REALTIME, like stolen_at_ns: the counter is not read every tick."""
    stalling_since_ns: int | None = None


def evaluate_system_memory(
    situation: EvictionInputs, memory: SystemMemoryPressureState, config: SystemMemoryConfig
) -> tuple[tuple[EvictionFinding, ...], SystemMemoryPressureState]:
    """One finding for each detector, those that are met first."""
    free = _evaluate_free(situation, config)
    stealing, memory = _evaluate_kswapd(situation, memory, config)
    stalling, memory = _evaluate_psi(situation, memory, config)
    return tuple(
        sorted((free, stealing, stalling), key=lambda each: each.threshold.met is ThresholdMet.NOT_MET)
    ), memory


def _make_finding(
    situation: EvictionInputs, config: SystemMemoryConfig, threshold: EvictionThreshold, *, any_level: bool
) -> EvictionFinding:
    candidates: tuple[EvictionCandidate, ...] = ()
    if threshold.met is ThresholdMet.HARD:
        candidates = rank_by_memory(
            situation.running_pods,
            lambda pod: memory_bytes(situation, pod),
            lambda _: config.grace_s,
            any_level=any_level,
        )
    return EvictionFinding(
        threshold=threshold,
        candidates=candidates,
        kind="memory",
        cool_down_s=config.cool_down_s,
        waits=threshold.reason.inputs.get("leaving_bytes") is None,
    )


def _evaluate_free(situation: EvictionInputs, config: SystemMemoryConfig) -> EvictionFinding:
    node = situation.snapshot.node
    free, total = node.meminfo.get("MemFree"), node.meminfo.get("MemTotal")
    scale = node.sysctl.get("vm.watermark_scale_factor")
    if free is None or total is None or scale is None or not situation.node_files_fresh:
        return missing_input_finding(NAME, "free memory or vm.watermark_scale_factor", SCOPE, FREE)
    bound = max(config.free_minimum_bytes, total * scale / SCALE_PARTS)
    going = sum(memory_bytes(situation, pod) or 0.0 for pod in situation.terminating_pods)
    observed = free + going
    text = f"{format_bytes(observed)} of memory are free or about to be; the watermark is {format_bytes(bound)}."
    inputs: dict[str, ThresholdInput] = {
        "free_bytes": free,
        "leaving_bytes": going,
        "total_bytes": total,
        "scale_factor": scale,
    }
    threshold = _detector_threshold(FREE, (bound, observed), observed < bound, text, inputs)
    return _make_finding(situation, config, threshold, any_level=False)


def _detector_threshold(
    detector: str,
    numbers: tuple[float, float],
    met: bool,
    text: str,
    inputs: Mapping[str, ThresholdInput],
) -> EvictionThreshold:
    """`numbers` are the threshold and what is held against it."""
    value, observed = numbers
    return make_threshold(
        NAME, ThresholdMet.HARD if met else ThresholdMet.NOT_MET, SCOPE, subject=detector, value=value, observed=observed,
        below=detector == FREE, condition=CONDITION, text=text, inputs=inputs,
    )  # fmt: skip


def _evaluate_kswapd(
    situation: EvictionInputs, memory: SystemMemoryPressureState, config: SystemMemoryConfig
) -> tuple[EvictionFinding, SystemMemoryPressureState]:
    """Background reclaim at work without a break."""
    node, at_ns = situation.snapshot.node, situation.snapshot.node.files_read_at_ns
    stolen = node.vmstat.get("pgsteal_kswapd")
    if stolen is None or at_ns is None or not situation.node_files_fresh:
        forgotten = SystemMemoryPressureState(stalling_since_ns=memory.stalling_since_ns)
        return missing_input_finding(NAME, "pgsteal_kswapd", SCOPE, KSWAPD), forgotten
    before, before_ns, since = memory.stolen_pages, memory.stolen_at_ns, memory.stealing_since_ns
    if before is None or before_ns is None or stolen < before or at_ns < before_ns:
        first = msgspec.structs.replace(memory, stolen_pages=stolen, stolen_at_ns=at_ns, stealing_since_ns=None)
        text = "Background reclaim has been seen once: no rate yet."
        return not_met_finding(NAME, "kswapd_first_look", text, SCOPE, KSWAPD), first
    rate, since_s = memory.pages_per_s, 0.0
    if at_ns > before_ns:
        rate = (stolen - before) * NS_PER_S / (at_ns - before_ns)
        since = (before_ns if since is None else since) if rate >= config.kswapd_pages_per_s else None
        memory = SystemMemoryPressureState(
            stolen_pages=stolen,
            stolen_at_ns=at_ns,
            pages_per_s=rate,
            stealing_since_ns=since,
            stalling_since_ns=memory.stalling_since_ns,
        )
    if since is not None:
        since_s = (at_ns - since) / NS_PER_S
    text = (
        f"Background reclaim has taken away {config.kswapd_pages_per_s:g} pages a second or more for {since_s:.0f} s, now "
        f"{rate:.0f}; the threshold is {config.kswapd_s:g} s."
    )
    inputs: dict[str, ThresholdInput] = {"pages_per_s": round(rate, 1), "for_s": round(since_s, 1)}
    met = since is not None and since_s >= config.kswapd_s
    threshold = _detector_threshold(KSWAPD, (config.kswapd_s, since_s), met, text, inputs)
    return _make_finding(situation, config, threshold, any_level=True), memory


def _evaluate_psi(
    situation: EvictionInputs, memory: SystemMemoryPressureState, config: SystemMemoryConfig
) -> tuple[EvictionFinding, SystemMemoryPressureState]:
    """The burstable pods stall for memory, several of them."""
    snapshot = situation.snapshot
    root = next((path for path in config.psi_roots if path in snapshot.cgroups), None)
    pressure = None if root is None else snapshot.cgroups[root].memory_pressure
    if root is None or pressure is None:
        calm = msgspec.structs.replace(memory, stalling_since_ns=None)
        return missing_input_finding(NAME, "memory pressure of the burstable pods' root", SCOPE, PSI), calm
    stalls = [stall for pod in snapshot.pods if (stall := _pod_stall(snapshot, pod, root)) is not None]
    stalling = [stall for stall in stalls if stall > config.psi_pod_avg10]
    average = mean(stalling)
    met = (
        pressure.some_avg10 >= config.psi_avg10 and len(stalling) >= config.psi_pods and average >= config.psi_pods_mean
    )
    since = None
    if met:
        since = situation.now_ns if memory.stalling_since_ns is None else memory.stalling_since_ns
    for_s = 0.0 if since is None else (situation.now_ns - since) / NS_PER_S
    text = (
        f"{root} stalls for memory {pressure.some_avg10:g} % of the time (threshold {config.psi_avg10:g} %), {len(stalling)} "
        f"pods of {config.psi_pods} by {average:.1f} % on average (threshold {config.psi_pods_mean:g} %), for {for_s:.0f} s of "
        f"{config.psi_s:g} s."
    )
    inputs: dict[str, ThresholdInput] = {
        "avg10": pressure.some_avg10,
        "pods": len(stalling),
        "mean": round(average, 3),
        "for_s": for_s,
    }
    threshold = _detector_threshold(
        PSI, (config.psi_s, for_s), since is not None and for_s >= config.psi_s, text, inputs
    )
    memory = msgspec.structs.replace(memory, stalling_since_ns=since)
    return _make_finding(situation, config, threshold, any_level=for_s >= PSI_ANY_FACTOR * config.psi_s), memory


def _pod_stall(snapshot: Snapshot, pod: Pod, root: str) -> float | None:
    """A burstable pod's stall: of its own cgroup where it has one, else of its worst container."""
    found = []
    for container in pod.containers:
        if not container.cgroup.startswith(f"{root}/"):
            continue
        above = container.cgroup.rpartition("/")[0]
        sample = snapshot.cgroups.get(container.cgroup if above == root else above)
        if sample is not None and sample.memory_pressure is not None:
            found.append(sample.memory_pressure.some_avg10)
    return max(found, default=None)
