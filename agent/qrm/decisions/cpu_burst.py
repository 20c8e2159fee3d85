"""Computes CPU bursts: Katalyst's static `cpu.max.burst`, and Koordinator's CPU and quota burst. Pure.
Koordinator's policy raises the quota of a throttled container above the owner's limit for a while, as long as the
shared CPUs are idle and the container has tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32

import msgspec

from agent.config.qrm import BurstConfig, KoordinatorBurstConfig
from agent.qrm.knobs.notation import DEFAULT_PERIOD_US
from api.advice import KnobRequest
from api.knobs import Knob, Reason
from api.pod import Container, Pod
from api.qos import BurstPolicy, QoSLevel
from api.rates import Rates
from api.snapshot import CgroupSample, Snapshot
from api.units import NS_PER_S

QUOTA_STEP_UP, QUOTA_STEP_DOWN = 1.2, 0.8
"""Factors by which Koordinator raises and lowers a quota."""
COOLING_RATIO = 0.9
"""Part of the load threshold from which on quotas are not raised any more."""
REFILL_BELOW_RATIO = 0.6
"""A container regains tokens while it uses less than this part of its limit."""


class BurstTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Token bucket of one container: CPU seconds above its limit, in percent of the limit."""

    tokens: float
    at_ns: int


class CpuBurstState(msgspec.Struct, frozen=True, kw_only=True):
    """State of Koordinator's policy: token buckets, quotas in force and recent loads."""

    buckets: Mapping[str, BurstTokens] = {}
    quotas_us: Mapping[str, int] = {}
    loads: tuple[tuple[int, float], ...] = ()
    """Time (ns) and load of the shared CPUs, 0 to 1, of the last seconds."""


class CpuBurstRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Knob requests, and the cgroups whose quota may exceed the owner's limit."""

    requests: tuple[KnobRequest, ...] = ()
    quota_exempt: frozenset[str] = frozenset()
    state: str = ""
    """Load state of the shared CPUs: `idle`, `cooling`, `overload` or `unknown`."""


def static_burst(snapshot: Snapshot, config: BurstConfig) -> tuple[KnobRequest, ...]:
    """Return Katalyst's static burst for each container whose pod or QoS level has a burst policy."""
    sole_shared_pod = sum(pod.qos is QoSLevel.SHARED for pod in snapshot.pods) == 1
    requests = []
    for pod in snapshot.pods:
        policy, why = _burst_policy(pod, config, sole_shared_pod)
        percent = pod.enhancements.burst_percent
        percent = config.percent if percent is None else percent
        for container in pod.containers:
            quota_us = _quota_us(snapshot.cgroups.get(container.cgroup))
            if policy is BurstPolicy.CLOSED:
                requests.append(_burst_request(container, 0, Reason(rule="burst_closed", text=f"No burst: {why}.")))
            elif policy is BurstPolicy.STATIC and quota_us is not None:
                value = int(quota_us * percent / 100)
                text = f"Burst of {value} us, {percent:g} % of the quota of {quota_us} us: {why}."
                inputs = {"quota_us": quota_us, "percent": percent}
                requests.append(_burst_request(container, value, Reason(rule="burst_static", text=text, inputs=inputs)))
    return tuple(requests)


def _burst_policy(pod: Pod, config: BurstConfig, sole_shared_pod: bool) -> tuple[BurstPolicy, str]:
    """Return the policy of the pod and the reason. DEFAULT, and DYNAMIC, which Katalyst does not implement, change
    nothing."""
    if pod.qos is QoSLevel.RECLAIMED:
        return BurstPolicy.CLOSED, "reclaimed pods have none"
    pod_policy = pod.enhancements.burst_policy
    if pod_policy is not BurstPolicy.DEFAULT:
        return pod_policy, f"cpu_burst_policy of {pod.key} is {pod_policy.value}"
    default = {QoSLevel.DEDICATED: config.dedicated, QoSLevel.SHARED: config.shared}.get(pod.qos)
    if default is None or (default and pod.qos is QoSLevel.SHARED and not sole_shared_pod):
        return BurstPolicy.DEFAULT, ""
    reason = f"the node's default for {pod.qos.value}"
    return (BurstPolicy.STATIC if default else BurstPolicy.CLOSED), reason


def koordinator_burst(
    snapshot: Snapshot, rates: Rates | None, config: KoordinatorBurstConfig, state: CpuBurstState
) -> tuple[CpuBurstRequests, CpuBurstState]:
    """Apply Koordinator's policy to shared pods with a CPU limit, at the time of the snapshot."""
    now_ns = snapshot.taken_at_ns
    load = _share_pool_load(snapshot, rates)
    since = now_ns - int(config.average_s * NS_PER_S)
    recent = tuple(entry for entry in state.loads if entry[0] > since)
    loads = recent if load is None else (*recent, (now_ns, load))
    average = sum(value for _, value in loads) / len(loads) if loads and load is not None else None
    load_state = _share_pool_state(average, config)
    requests: list[KnobRequest] = []
    buckets, quotas_us = dict[str, BurstTokens](), dict[str, int]()
    for container, limit in _limited_containers(snapshot) if config.policy != "none" else ():
        base_us = round(limit * DEFAULT_PERIOD_US)
        if config.policy in ("auto", "cpuBurstOnly"):
            burst_us = int(base_us * config.cpu_burst_percent / 100)
            text = f"Burst of {burst_us} us, {config.cpu_burst_percent:g} % of the limit of {limit:g} CPUs a period."
            requests.append(_burst_request(container, burst_us, Reason(rule="koordinator_burst", text=text)))
        if config.policy in ("auto", "cfsQuotaBurstOnly"):
            usage = _used_cores(rates, container.cgroup)
            bucket = _update_tokens(
                state.buckets.get(container.cgroup), container.cgroup, usage, limit, (config, now_ns)
            )
            buckets[container.cgroup] = bucket
            quota_us, reason = _next_quota(
                base_us, state.quotas_us.get(container.cgroup, base_us), _is_throttled(rates, container.cgroup),
                (config.quota_burst_period_s < 0 or bucket.tokens > 0, load_state, average), config,
            )  # fmt: skip
            quotas_us[container.cgroup] = quota_us
            requests.append(
                KnobRequest(
                    cgroup=container.cgroup, knob=Knob.QUOTA, value=f"{quota_us} {DEFAULT_PERIOD_US}", reason=reason
                )
            )
    advice = CpuBurstRequests(requests=tuple(requests), quota_exempt=frozenset(quotas_us), state=load_state)
    return advice, CpuBurstState(buckets=buckets, quotas_us=quotas_us, loads=loads)


def _limited_containers(snapshot: Snapshot) -> list[tuple[Container, float]]:
    return [
        (container, container.cpu_limit_cores)
        for pod in snapshot.pods
        if pod.qos is QoSLevel.SHARED
        for container in pod.containers
        if container.cpu_limit_cores and container.cgroup in snapshot.cgroups
    ]


def _share_pool_load(snapshot: Snapshot, rates: Rates | None) -> float | None:
    """Return (CPU usage of the node - of dedicated and reclaimed pods) / (CPUs - requests of dedicated pods); None
    if any is unknown."""
    if rates is None or rates.node.busy_cores is None:
        return None
    used, cpus = rates.node.busy_cores, float(len(snapshot.topology.cpus))
    for pod in snapshot.pods:
        if pod.qos not in (QoSLevel.DEDICATED, QoSLevel.RECLAIMED):
            continue
        for container in pod.containers:
            usage = _used_cores(rates, container.cgroup)
            if usage is None:
                return None
            used -= usage
            cpus -= (container.cpu_request_cores or 0.0) if pod.qos is QoSLevel.DEDICATED else 0.0
    return max(used, 0.0) / cpus if cpus > 0 else None


def _share_pool_state(average: float | None, config: KoordinatorBurstConfig) -> str:
    threshold = config.share_pool_threshold_percent / 100
    if average is None:
        return "unknown"
    if average >= threshold:
        return "overload"
    return "cooling" if average >= threshold * COOLING_RATIO else "idle"


def _next_quota(
    base_us: int,
    current_us: int,
    throttled: bool | None,
    node: tuple[bool, str, float | None],
    config: KoordinatorBurstConfig,
) -> tuple[int, Reason]:
    """Return the next quota: raised if throttled, lowered without tokens or on overload, raised only on idle CPUs."""
    allowed, state, average = node
    factor = 1.0
    if not allowed:
        factor = QUOTA_STEP_DOWN
    elif throttled:
        factor = QUOTA_STEP_UP
    if state == "overload":
        factor = QUOTA_STEP_DOWN
    elif state in ("cooling", "unknown") and factor == QUOTA_STEP_UP:
        factor = 1.0
    max_us = int(base_us * config.quota_burst_percent / 100)
    quota_us = min(max(round(current_us * factor), base_us), max_us)
    words = {
        QUOTA_STEP_UP: "raised: the container was throttled",
        QUOTA_STEP_DOWN: "lowered: its tokens are spent",
        1.0: "unchanged",
    }
    move = "lowered: the shared CPUs are overloaded" if state == "overload" else words[factor]
    load = "unknown" if average is None else f"{average:.0%}"
    text = f"Quota {move}; {quota_us} us between {base_us} and {max_us} us, load of the shared CPUs {load} ({state})."
    inputs = {
        "before_us": current_us,
        "base_us": base_us,
        "throttled": throttled,
        "tokens_left": allowed,
        "load": average,
    }
    return quota_us, Reason(
        rule="koordinator_quota_burst", text=text, threshold=config.share_pool_threshold_percent / 100, inputs=inputs
    )


def _update_tokens(
    bucket: BurstTokens | None,
    cgroup: str,
    usage: float | None,
    limit: float,
    context: tuple[KoordinatorBurstConfig, int],
) -> BurstTokens:
    config, now_ns = context
    capacity = max(config.quota_burst_period_s, 0) * (config.quota_burst_percent - 100)
    if bucket is None:
        # Koordinator starts with a random fill of up to one half, so that containers do not run out simultaneously.
        return BurstTokens(tokens=capacity * (crc32(cgroup.encode()) % 51) / 100, at_ns=now_ns)
    if usage is None:
        return bucket
    scale, seconds = usage / limit, (now_ns - bucket.at_ns) / NS_PER_S
    change = (1 - scale) * 100 * seconds if scale > 1 or scale < REFILL_BELOW_RATIO else 0.0
    return BurstTokens(tokens=min(max(bucket.tokens + change, 0.0), capacity), at_ns=now_ns)


def _used_cores(rates: Rates | None, cgroup: str) -> float | None:
    cgroup_rates = rates.cgroups.get(cgroup) if rates is not None else None
    return None if cgroup_rates is None else cgroup_rates.cpu_cores


def _is_throttled(rates: Rates | None, cgroup: str) -> bool | None:
    cgroup_rates = rates.cgroups.get(cgroup) if rates is not None else None
    return (
        None if cgroup_rates is None or cgroup_rates.throttled_periods is None else cgroup_rates.throttled_periods > 0
    )


def _quota_us(sample: CgroupSample | None) -> int | None:
    quota = None if sample is None else sample.limits.quota_us
    return quota if quota is not None and quota > 0 else None


def _burst_request(container: Container, burst_us: int, reason: Reason) -> KnobRequest:
    return KnobRequest(cgroup=container.cgroup, knob=Knob.BURST, value=str(burst_us), reason=reason)
