"""Which settings of memory offloading a pod or a cgroup has: layer over layer, each setting by itself.

The default, the pod's level and its pool; a pod that lends nothing gives up nothing; then its service profile, and last the
block list. A cgroup that is named by path has the default and its own settings, and nothing else has a say.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import msgspec

from agent.advisor.memory.situation import Situation
from agent.config.memory import OffloadConfig, OffloadingConfig
from api.pods import Pod
from api.qos import QoSLevel

_POOLS = {QoSLevel.RECLAIMED: "reclaim", QoSLevel.DEDICATED: "dedicated"}
_NAMED_POOLS = {QoSLevel.SHARED: "share", QoSLevel.SYSTEM: "reserve"}


class Offload(msgspec.Struct, frozen=True, kw_only=True):
    """Settings in force; the values here are the bottom layer."""

    enable: bool = False
    enable_swap: bool = False
    policy: str = "psi"
    interval_s: float = 30.0
    max_reclaim_bytes: int | None = None
    reserved_inactive_file_bytes: int | None = None
    psi_max_probe: float = 0.01
    psi_avg60_threshold: float = 0.1
    refault_max_probe: float = 0.01
    reclaim_accuracy_target: float = 0.99
    reclaim_scan_efficiency_target: float = 0.6


_SENPAI_INTERVAL_S = 6.0


def of_pod(pod: Pod, situation: Situation, config: OffloadingConfig) -> Offload:
    """The settings that hold for every container of the pod."""
    layers = [config.default, config.levels.get(pod.qos), config.pools.get(pool_of(pod))]
    if pod.key in situation.not_reclaimable:
        layers.append(OffloadConfig(enable=False))
    layers.append(situation.profiles.get(pod.key))
    if _blocked(config.block.labels, pod.labels) or _blocked(config.block.annotations, pod.annotations):
        layers.append(OffloadConfig(enable=False))
    return merged(*layers)


def of_cgroup(path: str, config: OffloadingConfig) -> Offload:
    """The settings of a cgroup that is named by path."""
    return merged(config.default, config.cgroups[path])


@lru_cache(maxsize=256)
def merged(*layers: OffloadConfig | None) -> Offload:
    """The layers, the first at the bottom: each setting has the value of the highest layer that sets it."""
    values: dict[str, object] = {}
    for layer in layers:
        if layer is not None:
            found = {name: getattr(layer, name) for name in layer.__struct_fields__}
            values.update((name, value) for name, value in found.items() if value is not None)
    if values.get("policy") == "senpai":
        values.setdefault("interval_s", _SENPAI_INTERVAL_S)
    return msgspec.convert(values, Offload)


def pool_of(pod: Pod) -> str:
    """The pool whose settings it has, whichever NUMA node that is on."""
    return _POOLS.get(pod.qos) or pod.enhancements.cpuset_pool or _NAMED_POOLS[pod.qos]


def _blocked(block: Mapping[str, tuple[str, ...]], has: Mapping[str, str]) -> bool:
    return any(name in has and (not values or has[name] in values) for name, values in block.items())
