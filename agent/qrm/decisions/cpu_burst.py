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

NS_PER_S = 1e9
QUOTA_STEP_UP, QUOTA_STEP_DOWN = 1.2, 0.8
"""Koordinator's steps of a quota."""
COOLING_RATIO = 0.9
"""Of the threshold: between this and it quotas are not raised."""
REFILL_BELOW_RATIO = 0.6
"""Tokens come back while a container uses less than this share of its limit."""


class BurstTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one container: seconds of CPU above its limit, in percent of the limit."""

    tokens: float
    at_ns: int


class CpuBurstState(msgspec.Struct, frozen=True, kw_only=True):
    """What Koordinator's policy remembers: tokens, quotas in force and the loads of the last seconds."""

    buckets: Mapping[str, BurstTokens] = {}
    quotas_us: Mapping[str, int] = {}
    loads: tuple[tuple[int, float], ...] = ()
    """When and how loaded the shared CPUs were, 0 to 1."""


class CpuBurstRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Wishes, and the cgroups whose quota may go above what the owner set."""

    knob_requests: tuple[KnobRequest, ...] = ()
    loosen: frozenset[str] = frozenset()
    state: str = ""
    """Of the shared CPUs: `idle`, `cooling`, `overload` or `unknown`."""


def static_burst(snapshot: Snapshot, config: BurstConfig) -> tuple[KnobRequest, ...]:
    """Katalyst's policy: a burst for each container whose pod or level says something about it."""
    sole = sum(pod.qos is QoSLevel.SHARED for pod in snapshot.pods) == 1
    wishes = []
    for pod in snapshot.pods:
        policy, why = _burst_policy(pod, config, sole)
        percent = pod.enhancements.burst_percent
        percent = config.percent if percent is None else percent
        for container in pod.containers:
            quota_us = _quota_us(snapshot.cgroups.get(container.cgroup))
            if policy is BurstPolicy.CLOSED:
                wishes.append(_burst_request(container, 0, Reason(rule="burst_closed", text=f"No burst: {why}.")))
            elif policy is BurstPolicy.STATIC and quota_us is not None:
                value = int(quota_us * percent / 100)
                text = f"Burst of {value} us, {percent:g} % of the quota of {quota_us} us: {why}."
                inputs = {"quota_us": quota_us, "percent": percent}
                wishes.append(_burst_request(container, value, Reason(rule="burst_static", text=text, inputs=inputs)))
    return tuple(wishes)


def _burst_policy(pod: Pod, config: BurstConfig, sole: bool) -> tuple[BurstPolicy, str]:
    """Which policy holds, and why. DEFAULT and DYNAMIC, which Katalyst has not made, leave the knob alone."""
    if pod.qos is QoSLevel.RECLAIMED:
        return BurstPolicy.CLOSED, "reclaimed pods have none"
    asked = pod.enhancements.burst_policy
    if asked is not BurstPolicy.DEFAULT:
        return asked, f"cpu_burst_policy of {pod.key} is {asked.value}"
    default = {QoSLevel.DEDICATED: config.dedicated, QoSLevel.SHARED: config.shared}.get(pod.qos)
    if default is None or (default and pod.qos is QoSLevel.SHARED and not sole):
        return BurstPolicy.DEFAULT, ""
    reason = f"the node's default for {pod.qos.value}"
    return (BurstPolicy.STATIC if default else BurstPolicy.CLOSED), reason


def koordinator_burst(
    snapshot: Snapshot, rates: Rates | None, config: KoordinatorBurstConfig, memory: CpuBurstState
) -> tuple[CpuBurstRequests, CpuBurstState]:
    """Koordinator's policy for the shared pods with a limit; the time is the snapshot's."""
    now_ns = snapshot.taken_at_ns
    load = _share_pool_load(snapshot, rates)
    since = now_ns - int(config.average_s * NS_PER_S)
    recent = tuple(one for one in memory.loads if one[0] > since)
    loads = recent if load is None else (*recent, (now_ns, load))
    average = sum(value for _, value in loads) / len(loads) if loads and load is not None else None
    state = _share_pool_state(average, config)
    wishes: list[KnobRequest] = []
    buckets, quotas = dict[str, BurstTokens](), dict[str, int]()
    for container, limit in _limited_containers(snapshot) if config.policy != "none" else ():
        base_us = round(limit * DEFAULT_PERIOD_US)
        if config.policy in ("auto", "cpuBurstOnly"):
            burst_us = int(base_us * config.cpu_burst_percent / 100)
            text = f"Burst of {burst_us} us, {config.cpu_burst_percent:g} % of the limit of {limit:g} CPUs a period."
            wishes.append(_burst_request(container, burst_us, Reason(rule="koordinator_burst", text=text)))
        if config.policy in ("auto", "cfsQuotaBurstOnly"):
            usage = _used_cores(rates, container.cgroup)
            bucket = _update_tokens(
                memory.buckets.get(container.cgroup), container.cgroup, usage, limit, (config, now_ns)
            )
            buckets[container.cgroup] = bucket
            quota_us, verdict = _next_quota(
                base_us, memory.quotas_us.get(container.cgroup, base_us), _is_throttled(rates, container.cgroup),
                (config.quota_burst_period_s < 0 or bucket.tokens > 0, state, average), config,
            )  # fmt: skip
            quotas[container.cgroup] = quota_us
            wishes.append(_knob_request(container, Knob.QUOTA, f"{quota_us} {DEFAULT_PERIOD_US}", verdict))
    advice = CpuBurstRequests(knob_requests=tuple(wishes), loosen=frozenset(quotas), state=state)
    return advice, CpuBurstState(buckets=buckets, quotas_us=quotas, loads=loads)


def _limited_containers(snapshot: Snapshot) -> list[tuple[Container, float]]:
    return [
        (container, container.cpu_limit_cores)
        for pod in snapshot.pods
        if pod.qos is QoSLevel.SHARED
        for container in pod.containers
        if container.cpu_limit_cores and container.cgroup in snapshot.cgroups
    ]


def _share_pool_load(snapshot: Snapshot, rates: Rates | None) -> float | None:
    """(Use of the node - of dedicated and reclaimed pods) / (CPUs - requests of dedicated pods); None where one is unknown."""
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
    now_us: int,
    throttled: bool | None,
    node: tuple[bool, str, float | None],
    config: KoordinatorBurstConfig,
) -> tuple[int, Reason]:
    """The next quota: up when throttled, down without tokens or on an overloaded node, never up unless it is idle."""
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
    most_us = int(base_us * config.quota_burst_percent / 100)
    quota_us = min(max(round(now_us * factor), base_us), most_us)
    words = {QUOTA_STEP_UP: "up: it was throttled", QUOTA_STEP_DOWN: "down: its tokens are spent", 1.0: "as it was"}
    move = "down: the shared CPUs are overloaded" if state == "overload" else words[factor]
    load = "unknown" if average is None else f"{average:.0%}"
    text = f"Quota {move}; {quota_us} us between {base_us} and {most_us} us, load of the shared CPUs {load} ({state})."
    inputs = {"before_us": now_us, "base_us": base_us, "throttled": throttled, "tokens_left": allowed, "load": average}
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
        # Koordinator begins with a random part up to a half, so that not all of them run out together.
        return BurstTokens(tokens=capacity * (crc32(cgroup.encode()) % 51) / 100, at_ns=now_ns)
    if usage is None:
        return bucket
    scale, seconds = usage / limit, (now_ns - bucket.at_ns) / NS_PER_S
    change = (1 - scale) * 100 * seconds if scale > 1 or scale < REFILL_BELOW_RATIO else 0.0
    return BurstTokens(tokens=min(max(bucket.tokens + change, 0.0), capacity), at_ns=now_ns)


def _used_cores(rates: Rates | None, cgroup: str) -> float | None:
    found = rates.cgroups.get(cgroup) if rates is not None else None
    return None if found is None else found.cpu_cores


def _is_throttled(rates: Rates | None, cgroup: str) -> bool | None:
    found = rates.cgroups.get(cgroup) if rates is not None else None
    return None if found is None or found.throttled_periods is None else found.throttled_periods > 0


def _quota_us(sample: CgroupSample | None) -> int | None:
    quota = None if sample is None else sample.limits.quota_us
    return quota if quota is not None and quota > 0 else None


def _burst_request(container: Container, burst_us: int, reason: Reason) -> KnobRequest:
    return _knob_request(container, Knob.BURST, str(burst_us), reason)


def _knob_request(container: Container, knob: Knob, value: str, reason: Reason) -> KnobRequest:
    return KnobRequest(cgroup=container.cgroup, knob=knob, value=value, reason=reason)
