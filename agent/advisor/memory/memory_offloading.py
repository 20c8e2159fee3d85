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

from agent.advisor.memory.memory_inputs import (
    NS_PER_S,
    InputMissing,
    MemoryAdvisorState,
    MemoryInputs,
    OffloadState,
    SwapRequest,
    activated_pages,
    format_bytes,
    fresh_sample,
    has_elapsed,
    read_stat,
)
from agent.config.memory import MemoryConfig, OffloadingConfig, OffloadingLayerConfig
from api.advice import KnobRequest
from api.knobs import Knob, Reason
from api.pod import Pod
from api.qos import QoSLevel
from api.snapshot import CgroupSample, Snapshot

_POOL_BY_QOS = {QoSLevel.RECLAIMED: "reclaim", QoSLevel.DEDICATED: "dedicated"}
_DEFAULT_POOL_BY_QOS = {QoSLevel.SHARED: "share", QoSLevel.SYSTEM: "reserve"}


class OffloadSettings(msgspec.Struct, frozen=True, kw_only=True):
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


def pod_offload_settings(pod: Pod, inputs: MemoryInputs, config: OffloadingConfig) -> OffloadSettings:
    """The settings that hold for every container of the pod."""
    layers = [config.default, config.levels.get(pod.qos), config.pools.get(pod_pool(pod))]
    if pod.key in inputs.not_reclaimable:
        layers.append(OffloadingLayerConfig(enable=False))
    layers.append(inputs.profiles.get(pod.key))
    if _is_blocked(config.block.labels, pod.labels) or _is_blocked(config.block.annotations, pod.annotations):
        layers.append(OffloadingLayerConfig(enable=False))
    return merge_layers(*layers)


def cgroup_offload_settings(path: str, config: OffloadingConfig) -> OffloadSettings:
    """The settings of a cgroup that is named by path."""
    return merge_layers(config.default, config.cgroups[path])


@lru_cache(maxsize=256)
def merge_layers(*layers: OffloadingLayerConfig | None) -> OffloadSettings:
    """The layers, the first at the bottom: each setting has the value of the highest layer that sets it."""
    values: dict[str, object] = {}
    for layer in layers:
        if layer is not None:
            found = {name: getattr(layer, name) for name in layer.__struct_fields__}
            values.update((name, value) for name, value in found.items() if value is not None)
    if values.get("policy") == "senpai":
        values.setdefault("interval_s", _SENPAI_INTERVAL_S)
    return msgspec.convert(values, OffloadSettings)


def pod_pool(pod: Pod) -> str:
    """The pool whose settings it has, whichever NUMA node that is on."""
    return _POOL_BY_QOS.get(pod.qos) or pod.enhancements.cpuset_pool or _DEFAULT_POOL_BY_QOS[pod.qos]


def _is_blocked(block: Mapping[str, tuple[str, ...]], has: Mapping[str, str]) -> bool:
    return any(name in has and (not values or has[name] in values) for name, values in block.items())


_REFAULT_GROWTH = 1.05
_INACTIVE_RATIO = 0.1
MAPPED_FACTOR = 2
"""Cache that is less than so many times what is mapped is in use."""
_MIN_CAP = 1 << 20


def psi_target(usage: float, avg60: float, max_probe: float, threshold: float) -> float:
    """A part of the use that shrinks to nothing as the pressure (some avg60, percent) comes up to the threshold."""
    return max(0.0, 1 - avg60 / threshold) * max_probe * usage


class ReclaimedPages(NamedTuple):
    """What reclaim did to the cgroup in an interval."""

    scanned: int
    stolen: int
    activated: int
    """Of the stolen ones and earlier ones: read back soon and wanted."""

    @property
    def accuracy(self) -> float:
        """The part of what was reclaimed that was not wanted; 1 where nothing was."""
        return 1 - self.activated / self.stolen if self.stolen > 0 and self.scanned > 0 else 1.0

    @property
    def efficiency(self) -> float:
        """The part of what was looked at that could be reclaimed; 1 where nothing was."""
        return self.stolen / self.scanned if self.stolen > 0 and self.scanned > 0 else 1.0


class RefaultTargets(NamedTuple):
    """Settings of `refault`."""

    accuracy: float
    efficiency: float
    max_probe: float


def refault_target(last: float, pages: ReclaimedPages, inactive: float, usage: float, targets: RefaultTargets) -> float:
    """Less than the last time when reclaim hit the wrong pages or hardly any, and a little more when it went well.

    Where nothing is called inactive (the multi-generational LRU says so of all memory until it is first asked for some) it
    begins with a part of the most that may be asked: with nothing it would never begin.
    """
    if pages.accuracy < targets.accuracy or pages.efficiency < targets.efficiency:
        return max(0.0, last * pages.accuracy)
    most = usage * targets.max_probe
    return min(max(last * _REFAULT_GROWTH, (inactive or most) * _INACTIVE_RATIO), most)


class SenpaiLaw(NamedTuple):
    """Settings of `senpai`."""

    stall_s: float
    min_bytes: float
    max_bytes: float
    max_probe: float
    max_backoff: float
    probe: float
    backoff: float


def senpai_target(usage: float, size: float, stall_s: float, law: SenpaiLaw) -> tuple[float, float]:
    """The size to aim at from now on, and how much to give up for it, at most max_probe of the use.

    With more stall than is aimed at the size grows and nothing is asked for; with less it shrinks, the faster the less.
    """
    if stall_s >= law.stall_s:
        error = stall_s / law.stall_s
        grown = size * (1 + min((error / law.backoff) ** 2, 1.0) * law.max_backoff)
        return min(grown, max(law.max_bytes, usage)), 0.0
    error = law.stall_s / max(stall_s, 1e-6)
    part = min((error / law.probe) ** 2 * law.max_probe, law.max_probe)
    size = max(min(size, usage) * (1 - part), min(law.min_bytes, usage))
    return size, min(max(usage - size, 0.0), usage * law.max_probe)


def limit_without_swap(
    target: float, cache: float, mapped: float, inactive_file: float, reserved: float | None
) -> float:
    """No more than file cache can give where nothing can be swapped out."""
    if cache < MAPPED_FACTOR * mapped:
        return 0.0
    target = min(target, max(MAPPED_FACTOR * (cache - mapped), _MIN_CAP))
    if reserved is not None:
        target = min(target, inactive_file - MAPPED_FACTOR * mapped - reserved)
    return max(target, 0.0)


_MIN_RECLAIM_BYTES = 4096
US_PER_S = 1_000_000
ValueT = TypeVar("ValueT")


class OffloadResult(NamedTuple):
    """Who is to give up how much, and what to remember of it."""

    knob_requests: tuple[KnobRequest, ...]
    past: Mapping[str, OffloadState]
    reasons: tuple[Reason, ...]
    swap: Mapping[str, SwapRequest] = {}


class _OffloadStep(NamedTuple):
    bytes: float
    past: OffloadState
    reason: Reason


def offload_memory(
    inputs: MemoryInputs, config: MemoryConfig, before: MemoryAdvisorState, busy: Collection[str]
) -> OffloadResult:
    """One round; `busy` are cgroups that were told to drop cache and have not been read since.

    What a cgroup may swap is asked for in every round, for what nobody asks for is given back: where it is not known how
    full swap is, what was asked for before is asked for again.
    """
    has_swap = inputs.snapshot.node.meminfo.get("SwapTotal") != 0
    swap = _is_swap_allowed(inputs.snapshot, config.offloading)
    asked: dict[str, SwapRequest] = {}
    wishes: list[KnobRequest] = []
    verdicts: list[Reason] = []
    past: dict[str, OffloadState] = {}
    missing: dict[str, list[str]] = {}
    for path, settings in _offload_targets(inputs, config.offloading):
        present = inputs.snapshot.cgroups.get(path)
        if present is None:
            asked |= {path: before.swap[path]} if path in before.swap else {}
            continue
        known = before.offloaded.get(path)
        known = known if known is not None and known.cgroup_id == present.id else None
        if known is not None:
            past[path] = known
        last = before.swap.get(path)
        wish = (
            _repeat_swap_request(path, last, present.id) if swap is None else _build_swap_request(path, settings, swap)
        )
        if has_swap and wish is not None:
            asked[path] = SwapRequest(cgroup_id=present.id, value=wish.value)
            wishes.append(wish)
        sample = fresh_sample(inputs.snapshot, path, config.stale_s)
        if sample is None:
            missing.setdefault("a reading of its memory files that is not too old", []).append(path)
            continue
        if path in busy or (known is not None and not _is_due(inputs, settings, known, sample)):
            continue
        try:
            result = _advance_cgroup(
                inputs, settings, config.offloading, sample, known, bool(swap) and settings.enable_swap
            )
        except InputMissing as what:
            missing.setdefault(str(what), []).append(path)
            continue
        past[path] = result.past
        verdicts.append(result.reason)
        if result.bytes >= _MIN_RECLAIM_BYTES:
            value = str(int(result.bytes))
            wishes.append(KnobRequest(cgroup=path, knob=Knob.MEMORY_RECLAIM, value=value, reason=result.reason))
    verdicts.extend(_unknown_reason(what, paths) for what, paths in missing.items())
    return OffloadResult(tuple(wishes), past, tuple(verdicts), asked)


def _offload_targets(inputs: MemoryInputs, config: OffloadingConfig) -> Iterator[tuple[str, OffloadSettings]]:
    """Cgroups that are to give up memory, each once: a path in the settings counts more than the container there."""
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


def _is_due(inputs: MemoryInputs, settings: OffloadSettings, known: OffloadState, sample: CgroupSample) -> bool:
    if not has_elapsed(inputs.now_ns, known.at_ns, settings.interval_s):
        return False
    return sample.files_read_at_ns is None or sample.files_read_at_ns != known.read_at_ns


def _is_swap_allowed(snapshot: Snapshot, config: OffloadingConfig) -> bool | None:
    """Whether anything may be swapped out; None where that is unknown."""
    total, free = (snapshot.node.meminfo.get(name) for name in ("SwapTotal", "SwapFree"))
    if total is None or free is None:
        return None
    return total > 0 and (total - free) / total <= config.max_swap_used_ratio


def _repeat_swap_request(path: str, last: SwapRequest | None, cgroup_id: int) -> KnobRequest | None:
    if last is None or last.cgroup_id != cgroup_id:
        return None
    text = f"Memory of {path} is offloaded. How full swap is, is not known: its memory.swap.max stays {last.value}."
    verdict = Reason(rule="memory_offload_swap_unknown", text=text)
    return KnobRequest(cgroup=path, knob=Knob.SWAP_MAX, value=last.value, reason=verdict)


def _build_swap_request(path: str, settings: OffloadSettings, swap: bool) -> KnobRequest:
    open_ = swap and settings.enable_swap
    why = "is allowed" if open_ else "is not allowed" if not settings.enable_swap else "is nearly full"
    verdict = Reason(rule="memory_offload_swap", text=f"Memory of {path} is offloaded, and swap {why} for it.")
    return KnobRequest(cgroup=path, knob=Knob.SWAP_MAX, value="max" if open_ else "0", reason=verdict)


def _advance_cgroup(
    situation: MemoryInputs,
    settings: OffloadSettings,
    config: OffloadingConfig,
    sample: CgroupSample,
    known: OffloadState | None,
    swap: bool,
) -> _OffloadStep:
    """The end of an interval: what the law asks for, within what can be given. Raises Unknown."""
    now = OffloadState(
        cgroup_id=sample.id,
        at_ns=situation.now_ns,
        read_at_ns=sample.files_read_at_ns,
        scanned=read_stat(sample, "pgscan"),
        stolen=read_stat(sample, "pgsteal"),
        activated=activated_pages(sample),
        stall_us=None if sample.memory_pressure is None else sample.memory_pressure.some_us,
    )
    usage = _require_known(sample.memory_bytes, "its memory")
    size: float | None = None
    if settings.policy == "senpai":
        size, target = _senpai_step(situation, settings, config, sample, now, known)
        if swap:
            files = _require_known(read_stat(sample, "active_file"), "its cache") + _require_known(
                read_stat(sample, "inactive_file"), "its cache"
            )
            target = min(target, files + config.senpai_swap_bytes_per_s * settings.interval_s)
    else:
        target = _katalyst_target(settings, sample, now, known)
    asked = target
    if not swap:
        asked = limit_without_swap(
            target,
            _require_known(read_stat(sample, "file"), "its cache"),
            _require_known(read_stat(sample, "mapped"), "its mapped files"),
            _require_known(read_stat(sample, "inactive_file"), "its inactive files"),
            settings.reserved_inactive_file_bytes,
        )
    if settings.max_reclaim_bytes is not None:
        asked = min(asked, settings.max_reclaim_bytes)
    inputs: dict[str, float | int | str | None] = {
        "usage_bytes": usage,
        "law_bytes": round(target),
        "asked_bytes": round(asked),
        "last_bytes": None if known is None else round(known.target_bytes),
        "psi_some_avg60": None if sample.memory_pressure is None else sample.memory_pressure.some_avg60,
        "size_bytes": None if size is None else round(size),
        "swap": int(swap),
    }
    text = f"Policy {settings.policy} asks {sample.path} for {format_bytes(target)} of {format_bytes(usage)}; it can give {format_bytes(asked)}."
    verdict = Reason(rule="memory_offload", text=text, threshold=settings.psi_avg60_threshold, inputs=inputs)
    past = OffloadState(
        **{name: getattr(now, name) for name in now.__struct_fields__ if name not in ("target_bytes", "size_bytes")},
        target_bytes=asked,
        size_bytes=size,
    )
    return _OffloadStep(asked, past, verdict)


def _katalyst_target(
    settings: OffloadSettings, sample: CgroupSample, now: OffloadState, known: OffloadState | None
) -> float:
    usage = _require_known(sample.memory_bytes, "its memory")
    results = []
    if settings.policy in ("psi", "integrated"):
        avg60 = None if sample.memory_pressure is None else sample.memory_pressure.some_avg60
        law = (settings.psi_max_probe, settings.psi_avg60_threshold)
        results.append(psi_target(usage, _require_known(avg60, "its memory pressure"), *law))
    if settings.policy in ("refault", "integrated"):
        inactive = _require_known(read_stat(sample, "inactive_anon"), "its inactive memory") + _require_known(
            read_stat(sample, "inactive_file"), "its inactive files"
        )
        targets = RefaultTargets(
            settings.reclaim_accuracy_target, settings.reclaim_scan_efficiency_target, settings.refault_max_probe
        )
        if (pages := _pages_since(now, known)) is None:
            return 0.0  # counters start here: what reclaim did before is not the last request's doing
        results.append(refault_target(known.target_bytes if known else 0.0, pages, inactive, usage, targets))
    return min(results)


def _pages_since(now: OffloadState, known: OffloadState | None) -> ReclaimedPages | None:
    """What reclaim did since the last interval; None in the first, and where a counter went backwards. Raises Unknown."""
    changes = []
    for name in ("scanned", "stolen", "activated"):
        after = _require_known(getattr(now, name), "what reclaim did to it")
        before = None if known is None else getattr(known, name)
        if before is None or after < before:
            return None
        changes.append(after - before)
    return ReclaimedPages(*changes)


def _senpai_step(
    inputs: MemoryInputs,
    settings: OffloadSettings,
    config: OffloadingConfig,
    sample: CgroupSample,
    now: OffloadState,
    known: OffloadState | None,
) -> tuple[float, float]:
    """The size aimed at and what to give up. Raises Unknown."""
    usage = float(_require_known(sample.memory_bytes, "its memory"))
    stall_us = _require_known(now.stall_us, "its memory pressure")
    io = _require_known(None if sample.io_pressure is None else sample.io_pressure.some_avg10, "its pressure on disks")
    before = None if known is None else known.stall_us
    size = usage if known is None or known.size_bytes is None else known.size_bytes
    if known is None or before is None or stall_us < before or inputs.now_ns <= known.at_ns:
        return size, 0.0
    law = SenpaiLaw(
        # The aim is for one interval; a round that comes late has had more time to stall.
        config.senpai_stall_s * (inputs.now_ns - known.at_ns) / (settings.interval_s * NS_PER_S),
        config.senpai_min_bytes,
        config.senpai_max_bytes,
        config.senpai_max_probe,
        config.senpai_max_backoff,
        config.senpai_probe,
        config.senpai_backoff,
    )
    size, target = senpai_target(usage, size, (stall_us - before) / US_PER_S, law)
    pressure = 0.0 if sample.memory_pressure is None else sample.memory_pressure.some_avg10
    return size, target if max(pressure, io) < config.senpai_pressure else 0.0


def _require_known(value: ValueT | None, what: str) -> ValueT:
    if value is None:
        raise InputMissing(what)
    return value


def _unknown_reason(what: str, paths: list[str]) -> Reason:
    others = f" and {len(paths) - 1} others" if len(paths) > 1 else ""
    text = f"Not known of {paths[0]}{others}: {what}. Nothing is asked of them."
    return Reason(rule="memory_offload_unknown", text=text, inputs={"missing": what, "cgroups": len(paths)})
