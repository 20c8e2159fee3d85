"""The result of one cycle of the policy, which decisions, sinks and Katalyst's peers read. Pure data."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.qrm.cpuset.allowed_cpus import AllowedCpus
from agent.qrm.cpuset.state import CpusetAllocation
from agent.qrm.decisions.knob_requests import KnobRequests
from api.advice import MemoryAdvice, NodeAdvice
from api.decision import Advice
from api.forecast import Forecast
from api.interfaces import Unavailable
from api.snapshot import RunqLatency


class PolicyResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one cycle of the policy computed. Advice and placement are None with the policy `none`."""

    advice: Advice | None = None
    """CPU advice, with the CPUs of the pools."""
    placement: CpusetAllocation | None = None
    memory: MemoryAdvice | None = None
    extra_cgroups: frozenset[str] = frozenset()
    """Cgroups that belong to no pod and that the settings allow the agent to change."""
    knob_requests: KnobRequests = KnobRequests()
    node: NodeAdvice | None = None
    """Advice about the whole node; None if no such feature is enabled."""
    forecasts: tuple[Forecast, ...] = ()
    allowed_cpus: AllowedCpus | None = None
    reclaim_roots: tuple[str, ...] = ()
    """Cgroups that contain listed reclaimed pods and no other listed pods, of the node or of one NUMA node."""
    idle_class_obstacles: Mapping[str, Unavailable | None] = {}
    """QoS classes that contain reclaimed pods; by cgroup why it must not be idle, None if it may be."""
    short_slices: bool = False
    """Whether threads of a BestEffort class that is not idle get short slices."""
    evaluated_latency: Mapping[str, RunqLatency | None] = {}
    """Run-queue latency by online container's cgroup, as the policy evaluated it."""
