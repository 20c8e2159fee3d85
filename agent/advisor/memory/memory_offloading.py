"""Memory offloading: containers and configured cgroups release memory that they do not use, in small steps.
Settings come in layers: default, QoS level, pool, service profile, block list. Laws: psi and refault (Katalyst,
after TMO, ASPLOS 2022), senpai (oomd's Senpai.cpp). A cgroup is evaluated once per interval and only on a new
reading.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from agent.advisor.memory.memory_inputs import (
    InputMissing,
    MemoryAdvisorState,
    MemoryInputs,
    OffloadState,
    SwapRequest,
    activated_pages,
    fresh_sample,
    has_elapsed,
    read_stat,
)
from agent.config.memory import MemoryConfig, OffloadingConfig, OffloadingLayerConfig
from api.advice import KnobRequest
from api.knobs import Knob, Reason, ReasonInputs
from api.pod import Pod
from api.qos import QoSLevel
from api.quantity import format_bytes
from api.snapshot import CgroupSample, Snapshot
from api.units import NS_PER_S, US_PER_S

_POOL_BY_QOS = {QoSLevel.RECLAIMED: "reclaim", QoSLevel.DEDICATED: "dedicated"}
_DEFAULT_POOL_BY_QOS = {QoSLevel.SHARED: "share", QoSLevel.SYSTEM: "reserve"}


class OffloadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Effective settings; the defaults are the lowest layer."""

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


def pod_offload_settings(pod: Pod, inputs: MemoryInputs, config: OffloadingConfig) -> OffloadSettings:
    """Return the settings of every container of the pod."""
    layers = [config.default, config.levels.get(pod.qos), config.pools.get(pod_pool(pod))]
    if pod.key in inputs.not_reclaimable:
        layers.append(OffloadingLayerConfig(enable=False))
    layers.append(inputs.profiles.get(pod.key))
    if _is_blocked(config.block.labels, pod.labels) or _is_blocked(config.block.annotations, pod.annotations):
        layers.append(OffloadingLayerConfig(enable=False))
    return merge_layers(*layers)


def cgroup_offload_settings(path: str, config: OffloadingConfig) -> OffloadSettings:
    """Return the settings of a cgroup that the configuration names by path."""
    return merge_layers(config.default, config.cgroups[path])


@lru_cache(maxsize=256)
def merge_layers(*layers: OffloadingLayerConfig | None) -> OffloadSettings:
    """Merge the layers, lowest first: each setting has the value of the highest layer that sets it."""
    values: dict[str, object] = {}
    for layer in layers:
        if layer is not None:
            settings = {name: getattr(layer, name) for name in layer.__struct_fields__}
            values.update((name, value) for name, value in settings.items() if value is not None)
    if values.get("policy") == "senpai":
        values.setdefault("interval_s", _SENPAI_INTERVAL_S)
    return msgspec.convert(values, OffloadSettings)


def pod_pool(pod: Pod) -> str:
    """Return the pool whose settings apply to the pod, without its NUMA node."""
    return _POOL_BY_QOS.get(pod.qos) or pod.enhancements.cpuset_pool or _DEFAULT_POOL_BY_QOS[pod.qos]


def _is_blocked(block: Mapping[str, tuple[str, ...]], present: Mapping[str, str]) -> bool:
    return any(name in present and (not values or present[name] in values) for name, values in block.items())


_REFAULT_GROWTH = 1.05
_INACTIVE_RATIO = 0.1
MAPPED_FACTOR = 2
"""Cache below this multiple of mapped files is in use."""
_MIN_CAP = 1 << 20


def psi_target(usage: float, avg60: float, max_probe: float, threshold: float) -> float:
    """Return a part of the use that falls to 0 as the pressure (some avg60, percent) rises to the threshold."""
    return max(0.0, 1 - avg60 / threshold) * max_probe * usage


class ReclaimedPages(NamedTuple):
    """Pages that reclaim handled in the cgroup during an interval."""

    scanned: int
    stolen: int
    activated: int
    """Reclaimed pages that were read back soon and became active."""

    @property
    def accuracy(self) -> float:
        """Return the part of reclaimed pages that was not needed; 1 without any."""
        return 1 - self.activated / self.stolen if self.stolen > 0 and self.scanned > 0 else 1.0

    @property
    def efficiency(self) -> float:
        """Return the part of scanned pages that was reclaimed; 1 without any."""
        return self.stolen / self.scanned if self.stolen > 0 and self.scanned > 0 else 1.0


class RefaultTargets(NamedTuple):
    """Settings of policy `refault`."""

    accuracy: float
    efficiency: float
    max_probe: float


def refault_target(last: float, pages: ReclaimedPages, inactive: float, usage: float, targets: RefaultTargets) -> float:
    """Return less than the last time if reclaim was inaccurate or inefficient, and slightly more if it went well.

    Without inactive pages it starts with a part of the maximum: the multi-generational LRU counts no page as inactive
    until memory is first reclaimed, so that starting from 0 would never start.
    """
    if pages.accuracy < targets.accuracy or pages.efficiency < targets.efficiency:
        return max(0.0, last * pages.accuracy)
    maximum = usage * targets.max_probe
    return min(max(last * _REFAULT_GROWTH, (inactive or maximum) * _INACTIVE_RATIO), maximum)


class SenpaiLaw(NamedTuple):
    """Settings of policy `senpai`."""

    stall_s: float
    min_bytes: float
    max_bytes: float
    max_probe: float
    max_backoff: float
    probe: float
    backoff: float


def senpai_target(usage: float, size: float, stall_s: float, law: SenpaiLaw) -> tuple[float, float]:
    """Return the new target size and the bytes to release, at most max_probe of the use.

    With more stall than targeted the size grows and nothing is released; with less it shrinks, the faster the less stall.
    """
    if stall_s >= law.stall_s:
        error = stall_s / law.stall_s
        increased = size * (1 + min((error / law.backoff) ** 2, 1.0) * law.max_backoff)
        return min(increased, max(law.max_bytes, usage)), 0.0
    error = law.stall_s / max(stall_s, 1e-6)
    part = min((error / law.probe) ** 2 * law.max_probe, law.max_probe)
    size = max(min(size, usage) * (1 - part), min(law.min_bytes, usage))
    return size, min(max(usage - size, 0.0), usage * law.max_probe)


def limit_without_swap(
    target: float, cache: float, mapped: float, inactive_file: float, reserved: float | None
) -> float:
    """Return at most what file cache can release while nothing can be swapped out."""
    if cache < MAPPED_FACTOR * mapped:
        return 0.0
    target = min(target, max(MAPPED_FACTOR * (cache - mapped), _MIN_CAP))
    if reserved is not None:
        target = min(target, inactive_file - MAPPED_FACTOR * mapped - reserved)
    return max(target, 0.0)


_MIN_RECLAIM_BYTES = 4096
ValueT = TypeVar("ValueT")


class OffloadResult(NamedTuple):
    """Offload and swap requests, and the state for the next cycle."""

    knob_requests: tuple[KnobRequest, ...]
    past: Mapping[str, OffloadState]
    reasons: tuple[Reason, ...]
    swap: Mapping[str, SwapRequest] = {}


class _OffloadStep(NamedTuple):
    bytes: float
    past: OffloadState
    reason: Reason


def offload_memory(
    inputs: MemoryInputs, config: MemoryConfig, state: MemoryAdvisorState, busy: Collection[str]
) -> OffloadResult:
    """Evaluate one cycle; `busy` are cgroups with a cache drop request whose effect is not visible yet.

    memory.swap.max is requested in every cycle, because a value without a request is restored. If swap use is unknown,
    the previous request is repeated.
    """
    has_swap = inputs.snapshot.node.meminfo.get("SwapTotal") != 0
    swap = _is_swap_allowed(inputs.snapshot, config.offloading)
    swap_requests: dict[str, SwapRequest] = {}
    requests: list[KnobRequest] = []
    reasons: list[Reason] = []
    states: dict[str, OffloadState] = {}
    missing: dict[str, list[str]] = {}
    for path, settings in _offload_targets(inputs, config.offloading):
        sample_now = inputs.snapshot.cgroups.get(path)
        if sample_now is None:
            swap_requests |= {path: state.swap[path]} if path in state.swap else {}
            continue
        previous = state.offloaded.get(path)
        previous = previous if previous is not None and previous.cgroup_id == sample_now.id else None
        if previous is not None:
            states[path] = previous
        last = state.swap.get(path)
        request = (
            _repeat_swap_request(path, last, sample_now.id)
            if swap is None
            else _build_swap_request(path, settings, swap)
        )
        if has_swap and request is not None:
            swap_requests[path] = SwapRequest(cgroup_id=sample_now.id, value=request.value)
            requests.append(request)
        sample = fresh_sample(inputs.snapshot, path, config.stale_s)
        if sample is None:
            missing.setdefault("a recent reading of its memory files", []).append(path)
            continue
        if path in busy or (previous is not None and not _is_due(inputs, settings, previous, sample)):
            continue
        try:
            result = _advance_cgroup(
                inputs, settings, config.offloading, sample, previous, bool(swap) and settings.enable_swap
            )
        except InputMissing as error:
            missing.setdefault(str(error), []).append(path)
            continue
        states[path] = result.past
        reasons.append(result.reason)
        if result.bytes >= _MIN_RECLAIM_BYTES:
            value = str(int(result.bytes))
            requests.append(KnobRequest(cgroup=path, knob=Knob.MEMORY_RECLAIM, value=value, reason=result.reason))
    reasons.extend(_unknown_reason(error, paths) for error, paths in missing.items())
    return OffloadResult(tuple(requests), states, tuple(reasons), swap_requests)


def _offload_targets(inputs: MemoryInputs, config: OffloadingConfig) -> Iterator[tuple[str, OffloadSettings]]:
    """Cgroups to offload, each once: a path in the settings takes precedence over the container's own settings."""
    for path in config.cgroups:
        settings = cgroup_offload_settings(path, config)
        if settings.enable:
            yield path, settings
    if not (config.default.enable or config.levels or config.pools or inputs.profiles):
        return
    for pod in inputs.snapshot.pods:
        settings = pod_offload_settings(pod, inputs, config)
        if settings.enable:
            for container in pod.containers:
                if container.cgroup not in config.cgroups:
                    yield container.cgroup, settings


def _is_due(inputs: MemoryInputs, settings: OffloadSettings, previous: OffloadState, sample: CgroupSample) -> bool:
    if not has_elapsed(inputs.now_ns, previous.at_ns, settings.interval_s):
        return False
    return sample.files_read_at_ns is None or sample.files_read_at_ns != previous.read_at_ns


def _is_swap_allowed(snapshot: Snapshot, config: OffloadingConfig) -> bool | None:
    """Whether anything may be swapped out; None if swap use is unknown."""
    total, free = (snapshot.node.meminfo.get(name) for name in ("SwapTotal", "SwapFree"))
    if total is None or free is None:
        return None
    return total > 0 and (total - free) / total <= config.max_swap_used_ratio


def _repeat_swap_request(path: str, last: SwapRequest | None, cgroup_id: int) -> KnobRequest | None:
    if last is None or last.cgroup_id != cgroup_id:
        return None
    text = f"Memory of {path} is offloaded. Swap use is not known: memory.swap.max stays {last.value}."
    reason = Reason(rule="memory_offload_swap_unknown", text=text)
    return KnobRequest(cgroup=path, knob=Knob.SWAP_MAX, value=last.value, reason=reason)


def _build_swap_request(path: str, settings: OffloadSettings, swap: bool) -> KnobRequest:
    allowed = swap and settings.enable_swap
    cause = "is allowed" if allowed else "is not allowed" if not settings.enable_swap else "is nearly full"
    reason = Reason(rule="memory_offload_swap", text=f"Memory of {path} is offloaded, and its swap {cause}.")
    return KnobRequest(cgroup=path, knob=Knob.SWAP_MAX, value="max" if allowed else "0", reason=reason)


def _advance_cgroup(
    inputs: MemoryInputs,
    settings: OffloadSettings,
    config: OffloadingConfig,
    sample: CgroupSample,
    previous: OffloadState | None,
    swap: bool,
) -> _OffloadStep:
    """Finish an interval: the result of the policy, within what can be released. Raises InputMissing."""
    now = OffloadState(
        cgroup_id=sample.id,
        at_ns=inputs.now_ns,
        read_at_ns=sample.files_read_at_ns,
        scanned=read_stat(sample, "pgscan"),
        stolen=read_stat(sample, "pgsteal"),
        activated=activated_pages(sample),
        stall_us=None if sample.memory_pressure is None else sample.memory_pressure.some_us,
    )
    usage = _require_known(sample.memory_bytes, "its memory")
    size: float | None = None
    if settings.policy == "senpai":
        size, target = _senpai_step(inputs, settings, config, sample, now, previous)
        if swap:
            files = _require_stat(sample, "active_file") + _require_stat(sample, "inactive_file")
            target = min(target, files + config.senpai_swap_bytes_per_s * settings.interval_s)
    else:
        target = _katalyst_target(settings, sample, now, previous)
    requested = target
    if not swap:
        requested = limit_without_swap(
            target,
            _require_stat(sample, "file"),
            _require_stat(sample, "mapped"),
            _require_stat(sample, "inactive_file"),
            settings.reserved_inactive_file_bytes,
        )
    if settings.max_reclaim_bytes is not None:
        requested = min(requested, settings.max_reclaim_bytes)
    observed: ReasonInputs = {
        "usage_bytes": usage,
        "law_bytes": round(target),
        "asked_bytes": round(requested),
        "last_bytes": None if previous is None else round(previous.target_bytes),
        "psi_some_avg60": None if sample.memory_pressure is None else sample.memory_pressure.some_avg60,
        "size_bytes": None if size is None else round(size),
        "swap": int(swap),
    }
    text = f"Policy {settings.policy} requests {format_bytes(target)} of {format_bytes(usage)} from {sample.path};"
    text += f" {format_bytes(requested)} can be released."
    reason = Reason(rule="memory_offload", text=text, threshold=settings.psi_avg60_threshold, inputs=observed)
    return _OffloadStep(requested, replace(now, target_bytes=requested, size_bytes=size), reason)


def _katalyst_target(
    settings: OffloadSettings, sample: CgroupSample, now: OffloadState, previous: OffloadState | None
) -> float:
    usage = _require_known(sample.memory_bytes, "its memory")
    results = []
    if settings.policy in ("psi", "integrated"):
        avg60 = None if sample.memory_pressure is None else sample.memory_pressure.some_avg60
        law = (settings.psi_max_probe, settings.psi_avg60_threshold)
        results.append(psi_target(usage, _require_known(avg60, "its memory pressure"), *law))
    if settings.policy in ("refault", "integrated"):
        inactive = _require_stat(sample, "inactive_anon") + _require_stat(sample, "inactive_file")
        targets = RefaultTargets(
            settings.reclaim_accuracy_target, settings.reclaim_scan_efficiency_target, settings.refault_max_probe
        )
        if (pages := _pages_since(now, previous)) is None:
            return 0.0  # counters start here: earlier reclaim was not caused by a request
        results.append(refault_target(previous.target_bytes if previous else 0.0, pages, inactive, usage, targets))
    return min(results)


def _pages_since(now: OffloadState, previous: OffloadState | None) -> ReclaimedPages | None:
    """Pages reclaimed since the last interval; None in the first, and if a counter went backwards. Raises InputMissing."""
    changes = []
    for name in ("scanned", "stolen", "activated"):
        after = _require_known(getattr(now, name), "its reclaim counters")
        earlier = None if previous is None else getattr(previous, name)
        if earlier is None or after < earlier:
            return None
        changes.append(after - earlier)
    return ReclaimedPages(*changes)


def _senpai_step(
    inputs: MemoryInputs,
    settings: OffloadSettings,
    config: OffloadingConfig,
    sample: CgroupSample,
    now: OffloadState,
    previous: OffloadState | None,
) -> tuple[float, float]:
    """The target size and the bytes to release. Raises InputMissing."""
    usage = float(_require_known(sample.memory_bytes, "its memory"))
    stall_us = _require_known(now.stall_us, "its memory pressure")
    io = _require_known(None if sample.io_pressure is None else sample.io_pressure.some_avg10, "its I/O pressure")
    stalled_us = None if previous is None else previous.stall_us
    size = usage if previous is None or previous.size_bytes is None else previous.size_bytes
    if previous is None or stalled_us is None or stall_us < stalled_us or inputs.now_ns <= previous.at_ns:
        return size, 0.0
    law = SenpaiLaw(
        # The target is for one interval; a late cycle has had more time to stall.
        config.senpai_stall_s * (inputs.now_ns - previous.at_ns) / (settings.interval_s * NS_PER_S),
        config.senpai_min_bytes,
        config.senpai_max_bytes,
        config.senpai_max_probe,
        config.senpai_max_backoff,
        config.senpai_probe,
        config.senpai_backoff,
    )
    size, target = senpai_target(usage, size, (stall_us - stalled_us) / US_PER_S, law)
    pressure = 0.0 if sample.memory_pressure is None else sample.memory_pressure.some_avg10
    return size, target if max(pressure, io) < config.senpai_pressure else 0.0


_STAT_INPUTS = {
    "file": "its cache",
    "active_file": "its active files",
    "inactive_file": "its inactive files",
    "inactive_anon": "its inactive memory",
    "mapped": "its mapped files",
}
"""Names of counters in messages."""


def _require_stat(sample: CgroupSample, name: str) -> int:
    return _require_known(read_stat(sample, name), _STAT_INPUTS[name])


def _require_known(value: ValueT | None, missing_input: str) -> ValueT:
    if value is None:
        raise InputMissing(missing_input)
    return value


def _unknown_reason(missing_input: str, paths: list[str]) -> Reason:
    others = f" and {len(paths) - 1} others" if len(paths) > 1 else ""
    text = f"Not known for {paths[0]}{others}: {missing_input}. No memory is offloaded there."
    return Reason(rule="memory_offload_unknown", text=text, inputs={"missing": missing_input, "cgroups": len(paths)})
