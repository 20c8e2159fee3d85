"""Plugin system-memory-pressure-eviction-plugin: the node's free memory, stalls or kswapd activity.
It is pure. Each of the three detectors is sufficient. Katalyst defines the kswapd detector and never calls it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.config.eviction import SystemMemoryConfig
from agent.eviction.eviction_inputs import EvictionInputs, memory_bytes
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
from api.units import NS_PER_S

NAME = "system-memory-pressure-eviction-plugin"
SCOPE = "SystemMemory"
CONDITION = "MemoryPressure"
FREE, KSWAPD, PSI = "free", "kswapd", "psi"
"""Names of the three detectors."""
PSI_ANY_FACTOR = 3
"""After stalls for so many times psi_s, pods of any QoS level are candidates."""
SCALE_PARTS = 10_000
"""Divisor of vm.watermark_scale_factor, which is in units of 1/10000."""


class SystemMemoryPressureState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the detectors between two cycles."""

    stolen_pages: int | None = None
    """Pages that background reclaim had freed (pgsteal_kswapd) at the latest reading, and the time of that reading."""
    stolen_at_ns: int | None = None
    pages_per_s: float = 0.0
    """Rate between the latest two readings."""
    stealing_since_ns: int | None = None
    """CLOCK_REALTIME, like stolen_at_ns, because the counter is not read in every cycle."""
    stalling_since_ns: int | None = None


def evaluate_system_memory(
    inputs: EvictionInputs, state: SystemMemoryPressureState, config: SystemMemoryConfig
) -> tuple[tuple[EvictionFinding, ...], SystemMemoryPressureState]:
    """Return one finding per detector, those that are met first."""
    free = _evaluate_free(inputs, config)
    stealing, state = _evaluate_kswapd(inputs, state, config)
    stalling, state = _evaluate_psi(inputs, state, config)
    return tuple(sorted((free, stealing, stalling), key=lambda each: each.threshold.met is ThresholdMet.NOT_MET)), state


def _make_finding(
    inputs: EvictionInputs, config: SystemMemoryConfig, threshold: EvictionThreshold, *, any_level: bool
) -> EvictionFinding:
    candidates: tuple[EvictionCandidate, ...] = ()
    if threshold.met is ThresholdMet.HARD:
        candidates = rank_by_memory(
            inputs.running_pods,
            lambda pod: memory_bytes(inputs, pod),
            lambda _: config.grace_s,
            any_level=any_level,
        )
    return EvictionFinding(
        threshold=threshold,
        candidates=candidates,
        kind="memory",
        cool_down_s=config.cool_down_s,
        awaits_termination=threshold.reason.inputs.get("leaving_bytes") is None,
    )


def _evaluate_free(inputs: EvictionInputs, config: SystemMemoryConfig) -> EvictionFinding:
    node = inputs.snapshot.node
    free, total = node.meminfo.get("MemFree"), node.meminfo.get("MemTotal")
    scale = node.sysctl.get("vm.watermark_scale_factor")
    if free is None or total is None or scale is None or not inputs.node_files_fresh:
        return missing_input_finding(NAME, "free memory or vm.watermark_scale_factor", SCOPE, FREE)
    bound = max(config.free_minimum_bytes, total * scale / SCALE_PARTS)
    terminating_bytes = sum(memory_bytes(inputs, pod) or 0.0 for pod in inputs.terminating_pods)
    observed = free + terminating_bytes
    text = (
        f"Free memory, including that of terminating pods, is {format_bytes(observed)}; the watermark is "
        f"{format_bytes(bound)}."
    )
    facts: dict[str, ThresholdInput] = {
        "free_bytes": free,
        "leaving_bytes": terminating_bytes,
        "total_bytes": total,
        "scale_factor": scale,
    }
    threshold = _detector_threshold(FREE, (bound, observed), observed < bound, text, facts)
    return _make_finding(inputs, config, threshold, any_level=False)


def _detector_threshold(
    detector: str,
    numbers: tuple[float, float],
    met: bool,
    text: str,
    facts: Mapping[str, ThresholdInput],
) -> EvictionThreshold:
    """Return the threshold of a detector; `numbers` are its value and the observation."""
    value, observed = numbers
    return make_threshold(
        NAME, ThresholdMet.HARD if met else ThresholdMet.NOT_MET, SCOPE, subject=detector, value=value, observed=observed,
        below=detector == FREE, condition=CONDITION, text=text, inputs=facts,
    )  # fmt: skip


def _evaluate_kswapd(
    inputs: EvictionInputs, state: SystemMemoryPressureState, config: SystemMemoryConfig
) -> tuple[EvictionFinding, SystemMemoryPressureState]:
    """Evaluate whether background reclaim works without a break."""
    node, at_ns = inputs.snapshot.node, inputs.snapshot.node.files_read_at_ns
    stolen = node.vmstat.get("pgsteal_kswapd")
    if stolen is None or at_ns is None or not inputs.node_files_fresh:
        forgotten = SystemMemoryPressureState(stalling_since_ns=state.stalling_since_ns)
        return missing_input_finding(NAME, "pgsteal_kswapd", SCOPE, KSWAPD), forgotten
    before, before_ns, since = state.stolen_pages, state.stolen_at_ns, state.stealing_since_ns
    if before is None or before_ns is None or stolen < before or at_ns < before_ns:
        first = msgspec.structs.replace(state, stolen_pages=stolen, stolen_at_ns=at_ns, stealing_since_ns=None)
        text = "The rate of background reclaim is unknown: its counter was read once, and a rate needs two readings."
        return not_met_finding(NAME, "kswapd_first_look", text, SCOPE, KSWAPD), first
    rate, since_s = state.pages_per_s, 0.0
    if at_ns > before_ns:
        rate = (stolen - before) * NS_PER_S / (at_ns - before_ns)
        since = (before_ns if since is None else since) if rate >= config.kswapd_pages_per_s else None
        state = SystemMemoryPressureState(
            stolen_pages=stolen,
            stolen_at_ns=at_ns,
            pages_per_s=rate,
            stealing_since_ns=since,
            stalling_since_ns=state.stalling_since_ns,
        )
    if since is not None:
        since_s = (at_ns - since) / NS_PER_S
    text = (
        f"kswapd reclaimed at least {config.kswapd_pages_per_s:g} pages a second for {since_s:.0f} s, {rate:.0f} in the latest "
        f"interval; pods are evicted after {config.kswapd_s:g} s."
    )
    facts: dict[str, ThresholdInput] = {"pages_per_s": round(rate, 1), "for_s": round(since_s, 1)}
    met = since is not None and since_s >= config.kswapd_s
    threshold = _detector_threshold(KSWAPD, (config.kswapd_s, since_s), met, text, facts)
    return _make_finding(inputs, config, threshold, any_level=True), state


def _evaluate_psi(
    inputs: EvictionInputs, state: SystemMemoryPressureState, config: SystemMemoryConfig
) -> tuple[EvictionFinding, SystemMemoryPressureState]:
    """Evaluate whether several burstable pods stall for memory."""
    snapshot = inputs.snapshot
    root = next((path for path in config.psi_roots if path in snapshot.cgroups), None)
    pressure = None if root is None else snapshot.cgroups[root].memory_pressure
    if root is None or pressure is None:
        calm = msgspec.structs.replace(state, stalling_since_ns=None)
        return missing_input_finding(NAME, "memory pressure of the burstable pods' root", SCOPE, PSI), calm
    stalls = [stall for pod in snapshot.pods if (stall := _pod_stall(snapshot, pod, root)) is not None]
    stalling = [stall for stall in stalls if stall > config.psi_pod_avg10]
    average = mean(stalling)
    met = (
        pressure.some_avg10 >= config.psi_avg10 and len(stalling) >= config.psi_pods and average >= config.psi_pods_mean
    )
    since = None
    if met:
        since = inputs.now_ns if state.stalling_since_ns is None else state.stalling_since_ns
    for_s = 0.0 if since is None else (inputs.now_ns - since) / NS_PER_S
    text = (
        f"Tasks of {root} stalled on memory {pressure.some_avg10:g} % of the time (threshold {config.psi_avg10:g} %). "
        f"{len(stalling)} of its pods (threshold {config.psi_pods}) stalled {average:.1f} % of the time on average (threshold "
        f"{config.psi_pods_mean:g} %). All three values exceeded their thresholds for {for_s:.0f} s; pods are evicted after "
        f"{config.psi_s:g} s."
    )
    facts: dict[str, ThresholdInput] = {
        "avg10": pressure.some_avg10,
        "pods": len(stalling),
        "mean": round(average, 3),
        "for_s": for_s,
    }
    threshold = _detector_threshold(
        PSI, (config.psi_s, for_s), since is not None and for_s >= config.psi_s, text, facts
    )
    state = msgspec.structs.replace(state, stalling_since_ns=since)
    return _make_finding(inputs, config, threshold, any_level=for_s >= PSI_ANY_FACTOR * config.psi_s), state


def _pod_stall(snapshot: Snapshot, pod: Pod, root: str) -> float | None:
    """Return the stall of a burstable pod: that of its cgroup, else that of its worst container."""
    stalls = []
    for container in pod.containers:
        if not container.cgroup.startswith(f"{root}/"):
            continue
        above = container.cgroup.rpartition("/")[0]
        sample = snapshot.cgroups.get(container.cgroup if above == root else above)
        if sample is not None and sample.memory_pressure is not None:
            stalls.append(sample.memory_pressure.some_avg10)
    return max(stalls, default=None)
