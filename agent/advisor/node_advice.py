"""Advice for the whole node: the answer to a power alert, and overcommit ratios (Katalyst's realtime advisor).
ratio = ((allocatable x target - used) / load + requested) / allocatable, at least 1; load = used / requested.
The static ratios of the Node are upper bounds. A pod that is not measured counts as using its request
(Katalyst: nothing).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from agent.advisor.advisor_state import AdvisorState, ContainerDemand
from agent.advisor.pod_usage import pod_cpu_cores, sum_if_all_known, sum_if_any
from agent.advisor.power_capping import (
    PowerInputs,
    PowerSpec,
    PowerState,
    advise_power,
    domain_watts,
    node_watts,
    package_watts,
    parse_power_spec,
)
from agent.config.advisor import OvercommitConfig
from agent.config.config import AgentConfig
from api.advice import NodeAdvice, OvercommitAdvice, PowerAction
from api.knobs import Reason
from api.overcommit import CPU_RATIO_KEY, MEMORY_RATIO_KEY
from api.pod import Pod
from api.qos import QoSLevel
from api.quantity import format_bytes, format_cores
from api.rates import Rates
from api.snapshot import CgroupSample, Snapshot
from api.units import NS_PER_S


class PodLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Request and use of one pod; None without a request or a measurement."""

    cpu_request_cores: float | None = None
    cpu_used_cores: float | None = None
    """The largest of use, load1 and load5."""
    memory_request_bytes: float | None = None
    memory_used_bytes: float | None = None
    """Resident memory."""


class _ResourceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Sum of all pods for one resource; `used` is None if some pod has neither a measurement nor a request."""

    requested: float
    used: float | None


def compute_overcommit(
    pods: Sequence[PodLoad],
    allocatable_cores: float | None,
    allocatable_bytes: float | None,
    static: Mapping[str, str],
    config: OvercommitConfig,
) -> OvercommitAdvice:
    """Return the ratios of CPU and memory. `static` is the Node's annotations: a ratio that is absent or invalid there is 1."""
    cpu = _sum_loads([(pod.cpu_request_cores, pod.cpu_used_cores) for pod in pods])
    memory = _sum_loads([(pod.memory_request_bytes, pod.memory_used_bytes) for pod in pods])
    cpu_ratio = _resource_ratio(cpu, allocatable_cores, config.target_cpu, config.estimated_cpu)
    memory_ratio = _resource_ratio(memory, allocatable_bytes, config.target_memory, config.estimated_memory)
    max_cpu_ratio, max_memory_ratio = _static_ratio(static, CPU_RATIO_KEY), _static_ratio(static, MEMORY_RATIO_KEY)
    text = (
        f"{_ratio_text('CPU', cpu, allocatable_cores, cpu_ratio, max_cpu_ratio, format_cores)}"
        f" {_ratio_text('Memory', memory, allocatable_bytes, memory_ratio, max_memory_ratio, format_bytes)}"
    )
    reason = Reason(
        rule="overcommit_realtime",
        text=text,
        threshold=config.target_cpu,
        inputs={
            "cpu_requested_cores": cpu.requested,
            "cpu_used_cores": cpu.used,
            "cpu_allocatable_cores": allocatable_cores,
            "cpu_static_ratio": max_cpu_ratio,
            "memory_requested_bytes": memory.requested,
            "memory_used_bytes": memory.used,
            "memory_allocatable_bytes": allocatable_bytes,
            "memory_static_ratio": max_memory_ratio,
        },
    )
    return OvercommitAdvice(
        cpu_ratio=min(cpu_ratio, max_cpu_ratio), memory_ratio=min(memory_ratio, max_memory_ratio), reason=reason
    )


def overcommit_ratio(allocatable: float, requested: float, used: float, target: float, estimated: float) -> float:
    """Return Katalyst's overcommit ratio; 1 without requests or without capacity."""
    if requested <= 0 or allocatable <= 0:
        return 1.0
    load = max(min(used / requested, 1.0), estimated)
    return max(((allocatable * target - used) / load + requested) / allocatable, 1.0)


def _sum_loads(pods: Sequence[tuple[float | None, float | None]]) -> _ResourceLoad:
    used: float | None = 0.0
    for request, measured in pods:
        counted = request if measured is None else measured
        used = None if used is None or counted is None else used + counted
    return _ResourceLoad(requested=sum(request or 0.0 for request, _ in pods), used=used)


def _resource_ratio(load: _ResourceLoad, allocatable: float | None, target: float, estimated: float) -> float:
    if allocatable is None or load.used is None:
        return 1.0
    return overcommit_ratio(allocatable, load.requested, load.used, target, estimated)


def _static_ratio(node: Mapping[str, str], key: str) -> float:
    try:
        value = float(node.get(key, "1"))
    except ValueError:
        return 1.0
    return value if 1.0 <= value < float("inf") else 1.0


def _ratio_text(
    name: str,
    load: _ResourceLoad,
    allocatable: float | None,
    ratio: float,
    max_ratio: float,
    show: Callable[[float], str],
) -> str:
    if allocatable is None or load.used is None:
        return f"{name}: the capacity or the use is not known, so it is not overcommitted."
    text = f"{name}: {show(load.used)} used of {show(load.requested)} requested and {show(allocatable)} allocatable"
    bound = f", bounded by the node's {max_ratio:.2f}" if max_ratio < ratio else ""
    return f"{text}: overcommit ratio {min(ratio, max_ratio):.2f}{bound}."


_RESIDENT_COUNTERS = ("anon", "total_rss", "rss")
"""Resident memory in memory.stat: of version 2, and of version 1 with and without descendants."""


def pod_loads(
    snapshot: Snapshot, change: Rates | None, containers: Mapping[str, ContainerDemand]
) -> tuple[PodLoad, ...]:
    """Return request and use of every pod for `compute_overcommit`; load counts as use where the advisor has it."""
    return tuple(
        PodLoad(
            cpu_request_cores=sum_if_any(c.cpu_request_cores for c in pod.containers),
            cpu_used_cores=_pod_load_cores(pod, snapshot, change, containers),
            memory_request_bytes=sum_if_any(c.memory_request_bytes for c in pod.containers),
            memory_used_bytes=sum_if_all_known(_resident_bytes(snapshot.cgroups.get(c.cgroup)) for c in pod.containers),
        )
        for pod in snapshot.pods
    )


def _pod_load_cores(
    pod: Pod, snapshot: Snapshot, change: Rates | None, containers: Mapping[str, ContainerDemand]
) -> float | None:
    """Use of a pod, or its load over one or five minutes if that is higher."""
    demands = [containers[c.cgroup] for c in pod.containers if c.cgroup in containers]
    sums = [
        pod_cpu_cores(pod, snapshot, change, absent=None),
        sum_if_any(demand.load1 for demand in demands),
        sum_if_any(demand.load5 for demand in demands),
    ]
    return None if sums[0] is None else max(value for value in sums if value is not None)


def _resident_bytes(sample: CgroupSample | None) -> float | None:
    if sample is None:
        return None
    return next((float(sample.memory_stat[name]) for name in _RESIDENT_COUNTERS if name in sample.memory_stat), None)


_SETTLING_RULE = "power_settling"
_UNKNOWN_RULES = _NOT_READ, _INVALID = "power_alert_unknown", "power_alert_invalid"


class NodeAdviceState(msgspec.Struct, frozen=True, kw_only=True):
    """State kept from one cycle to the next."""

    power: PowerState = PowerState()
    last_action: PowerAction | None = None
    overcommit: OvercommitAdvice | None = None
    overcommit_ns: int | None = None


class NodeAdviceInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one cycle, and the rates since the previous one."""

    snapshot: Snapshot
    previous: Snapshot | None
    rates: Rates | None
    now_ns: int


def advise_node(
    measured: NodeAdviceInputs, advisor: AdvisorState, config: AgentConfig, state: NodeAdviceState
) -> tuple[NodeAdvice, NodeAdviceState]:
    """Return power and overcommit advice. `advisor` is the state after this cycle's CPU advice."""
    power, power_state, releases = None, PowerState(), True
    if config.power.enable:
        inputs = _build_power_inputs(measured, config)
        releases = not config.power.capping or (inputs.spec is None and inputs.unknown is None)
        power, power_state = advise_power(inputs, state.power, config.power)
        last = state.last_action
        if power.reason.rule == _SETTLING_RULE and last is not None and last.reason.rule not in _UNKNOWN_RULES:
            power = last
    overcommit, overcommit_ns = None, None
    if config.overcommit.enable:
        overcommit, overcommit_ns = state.overcommit, state.overcommit_ns
        now_ns = measured.now_ns
        due = overcommit_ns is None or not 0 <= now_ns - overcommit_ns < config.overcommit.period_s * NS_PER_S
        # Without the Node's own ratios, which bound these, nothing is known.
        if due and measured.previous is not None and measured.snapshot.node.annotations is not None:
            overcommit, overcommit_ns = _measure_overcommit(measured, advisor, config), now_ns
    advice = NodeAdvice(
        power=power,
        power_cap=power_state.cap if config.power.capping else None,
        releases_power_cap=releases,
        overcommit=overcommit,
    )
    return advice, NodeAdviceState(
        power=power_state, last_action=power, overcommit=overcommit, overcommit_ns=overcommit_ns
    )


def _build_power_inputs(measured: NodeAdviceInputs, config: AgentConfig) -> PowerInputs:
    snapshot, rates = measured.snapshot, measured.rates
    running = [pod for pod in snapshot.pods if any(c.cgroup in snapshot.cgroups for c in pod.containers)]
    busy = None if rates is None else rates.node.busy_cores
    cpus = len(snapshot.topology.cpus)
    spec, unknown = _read_alert(snapshot, config.power.annotation_prefix)
    watts = {} if measured.previous is None else domain_watts(measured.previous, snapshot)
    return PowerInputs(
        now_ns=measured.now_ns,
        wall_time_ns=snapshot.wall_time_ns,
        spec=spec,
        unknown=unknown,
        watts=node_watts(watts),
        package_watts=package_watts(watts),
        cpu_ratio=busy / cpus if busy is not None and cpus else None,
        pods=len(running),
        evictable=sum(pod.qos is QoSLevel.RECLAIMED for pod in running),
    )


def _read_alert(snapshot: Snapshot, prefix: str) -> tuple[PowerSpec | None, Reason | None]:
    """Return the alert of the Node, and why it is not known. An invalid alert changes nothing, as in Katalyst."""
    if snapshot.node.annotations is None:
        text = "The annotations of the Node are not known yet: no action is taken."
        return None, Reason(rule=_NOT_READ, text=text)
    try:
        return parse_power_spec(snapshot.node.annotations, prefix), None
    except ValueError as error:
        return None, Reason(rule=_INVALID, text=f"The power alert is invalid: {error}.")


def _measure_overcommit(measured: NodeAdviceInputs, advisor: AdvisorState, config: AgentConfig) -> OvercommitAdvice:
    snapshot = measured.snapshot
    loads = pod_loads(snapshot, measured.rates, advisor.containers)
    cpus = len(snapshot.topology.cpus) - len(advisor.pools.get("reserve", ()))
    memory = snapshot.node.memory_total_bytes
    return compute_overcommit(
        loads,
        float(cpus) if snapshot.topology.cpus else None,
        None if memory is None else float(memory),
        snapshot.node.annotations or {},
        config.overcommit,
    )
