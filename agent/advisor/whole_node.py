"""Power and overcommitment in one round: what is known of the node as a whole in, the answers that stand out. Pure.

Without a cluster the settings say what the annotations of the Node would (`node.annotations`).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.advisor.headroom.gather import pod_loads
from agent.advisor.overcommit import overcommit
from agent.advisor.power import PowerMemory, PowerSituation, advise_power, parse_power_spec, watts
from agent.advisor.state import Memory
from agent.config import Config
from api.node_advice import NodeAdvice, Overcommit, PowerAction
from api.qos import QoSLevel
from api.rates import rates
from api.samples import Snapshot

NS_PER_S = 1_000_000_000
_SETTLING = "power_settling"


class NodeMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of earlier rounds."""

    power: PowerMemory = PowerMemory()
    answered: PowerAction | None = None
    overcommit: Overcommit | None = None
    overcommit_ns: int | None = None


def advise_node(
    snapshot: Snapshot, previous: Snapshot | None, advisor: Memory, config: Config, memory: NodeMemory, now_ns: int
) -> tuple[NodeAdvice, NodeMemory]:
    """What stands now. `advisor` is what CPU advice remembers after this round, `previous` the snapshot before this one."""
    power, kept = None, memory.power
    if config.power.enable:
        situation = _power_situation(snapshot, previous, config, now_ns)
        power, kept = advise_power(situation, memory.power, config.power)
        if power.verdict.rule == _SETTLING and memory.answered is not None:
            power = memory.answered
    found, found_ns = None, None
    if config.overcommit.enable:
        found, found_ns = memory.overcommit, memory.overcommit_ns
        due = found_ns is None or not 0 <= now_ns - found_ns < config.overcommit.period_s * NS_PER_S
        if due and previous is not None:
            found, found_ns = _overcommit(snapshot, previous, advisor, config), now_ns
    return NodeAdvice(power=power, overcommit=found), NodeMemory(
        power=kept, answered=power, overcommit=found, overcommit_ns=found_ns
    )


def _power_situation(snapshot: Snapshot, previous: Snapshot | None, config: Config, now_ns: int) -> PowerSituation:
    running = [pod for pod in snapshot.pods if any(c.cgroup in snapshot.cgroups for c in pod.containers)]
    change = None if previous is None else rates(_bare(previous), _bare(snapshot))
    busy = None if change is None else change.node.busy_cores
    cpus = len(snapshot.topology.cpus)
    return PowerSituation(
        now_ns=now_ns,
        wall_time_ns=snapshot.wall_time_ns,
        spec=parse_power_spec(config.node.annotations, config.power.annotation_prefix),
        watts=None if previous is None else watts(previous, snapshot),
        cpu_ratio=busy / cpus if busy is not None and cpus else None,
        pods=len(running),
        evictable=sum(pod.qos is QoSLevel.RECLAIMED for pod in running),
    )


def _bare(snapshot: Snapshot) -> Snapshot:
    """The node alone, of which rates cost nothing."""
    return msgspec.structs.replace(snapshot, cgroups={})


def _overcommit(snapshot: Snapshot, previous: Snapshot, advisor: Memory, config: Config) -> Overcommit:
    loads = pod_loads(snapshot, rates(previous, snapshot), advisor.containers)
    cpus = len(snapshot.topology.cpus) - len(advisor.pools.get("reserve", ()))
    return overcommit(
        loads,
        float(cpus) if snapshot.topology.cpus else None,
        _float(snapshot.node.memory_total_bytes),
        config.node.annotations,
        config.overcommit,
    )


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)


def annotations_problem(annotations: Mapping[str, str], prefix: str) -> str:
    """What is wrong with a power alert among the node's annotations; empty where all is well."""
    try:
        parse_power_spec(annotations, prefix)
    except ValueError as error:
        return str(error)
    return ""
