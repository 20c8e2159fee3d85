"""Memory offloading: containers, and cgroups named by path, give up what they do not use, bit by bit and at their own pace.

Each is looked at once in its interval and on a new reading only, so that what was given is seen before more is asked for. One
that was made anew has no past. Where an input of the law is missing nothing is asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple, TypeVar

from agent.advisor.memory import laws
from agent.advisor.memory.layers import Offload, of_cgroup, of_pod
from agent.advisor.memory.situation import NS_PER_S, Situation, Unknown, elapsed
from agent.advisor.memory.state import MemoryState, Offloaded, SwapAsked
from agent.advisor.memory.stats import activated, human, sample_of, stat
from agent.config.memory import MemoryConfig, OffloadingConfig
from api.advice import Wish
from api.knobs import Knob, Verdict
from api.samples import CgroupSample, Snapshot

_LEAST_BYTES = 4096
US_PER_S = 1_000_000
T = TypeVar("T")


class Offloads(NamedTuple):
    """Who is to give up how much, and what to remember of it."""

    wishes: tuple[Wish, ...]
    past: Mapping[str, Offloaded]
    verdicts: tuple[Verdict, ...]
    swap: Mapping[str, SwapAsked] = {}


class _Result(NamedTuple):
    bytes: float
    past: Offloaded
    verdict: Verdict


def offload(situation: Situation, config: MemoryConfig, before: MemoryState, busy: Collection[str]) -> Offloads:
    """One round; `busy` are cgroups that were told to drop cache and have not been read since.

    What a cgroup may swap is asked for in every round, for what nobody asks for is given back: where it is not known how
    full swap is, what was asked for before is asked for again.
    """
    has_swap = situation.snapshot.node.meminfo.get("SwapTotal") != 0
    swap = _swap(situation.snapshot, config.offloading)
    asked: dict[str, SwapAsked] = {}
    wishes: list[Wish] = []
    verdicts: list[Verdict] = []
    past: dict[str, Offloaded] = {}
    missing: dict[str, list[str]] = {}
    for path, settings in _targets(situation, config.offloading):
        present = situation.snapshot.cgroups.get(path)
        if present is None:
            asked |= {path: before.swap[path]} if path in before.swap else {}
            continue
        known = before.offloaded.get(path)
        known = known if known is not None and known.cgroup_id == present.id else None
        if known is not None:
            past[path] = known
        last = before.swap.get(path)
        wish = _kept_swap(path, last, present.id) if swap is None else _swap_wish(path, settings, swap)
        if has_swap and wish is not None:
            asked[path] = SwapAsked(cgroup_id=present.id, value=wish.value)
            wishes.append(wish)
        sample = sample_of(situation.snapshot, path, config.stale_s)
        if sample is None:
            missing.setdefault("a reading of its memory files that is not too old", []).append(path)
            continue
        if path in busy or (known is not None and not _due(situation, settings, known, sample)):
            continue
        try:
            result = _advance(
                situation, settings, config.offloading, sample, known, bool(swap) and settings.enable_swap
            )
        except Unknown as what:
            missing.setdefault(str(what), []).append(path)
            continue
        past[path] = result.past
        verdicts.append(result.verdict)
        if result.bytes >= _LEAST_BYTES:
            value = str(int(result.bytes))
            wishes.append(Wish(cgroup=path, knob=Knob.MEMORY_RECLAIM, value=value, verdict=result.verdict))
    verdicts.extend(_unknown(what, paths) for what, paths in missing.items())
    return Offloads(tuple(wishes), past, tuple(verdicts), asked)


def _targets(situation: Situation, config: OffloadingConfig) -> Iterator[tuple[str, Offload]]:
    """Cgroups that are to give up memory, each once: a path in the settings counts more than the container there."""
    for path in config.cgroups:
        settings = of_cgroup(path, config)
        if settings.enable:
            yield path, settings
    if not (config.default.enable or config.levels or config.pools or situation.profiles):
        return
    for pod in situation.snapshot.pods:
        settings = of_pod(pod, situation, config)
        if settings.enable:
            for container in pod.containers:
                if container.cgroup not in config.cgroups:
                    yield container.cgroup, settings


def _due(situation: Situation, settings: Offload, known: Offloaded, sample: CgroupSample) -> bool:
    if not elapsed(situation.now_ns, known.at_ns, settings.interval_s):
        return False
    return sample.files_read_at_ns is None or sample.files_read_at_ns != known.read_at_ns


def _swap(snapshot: Snapshot, config: OffloadingConfig) -> bool | None:
    """Whether anything may be swapped out; None where that is unknown."""
    total, free = (snapshot.node.meminfo.get(name) for name in ("SwapTotal", "SwapFree"))
    if total is None or free is None:
        return None
    return total > 0 and (total - free) / total <= config.max_swap_used_ratio


def _kept_swap(path: str, last: SwapAsked | None, cgroup_id: int) -> Wish | None:
    if last is None or last.cgroup_id != cgroup_id:
        return None
    text = f"Memory of {path} is offloaded. How full swap is, is not known: its memory.swap.max stays {last.value}."
    verdict = Verdict(rule="memory_offload_swap_unknown", text=text)
    return Wish(cgroup=path, knob=Knob.SWAP_MAX, value=last.value, verdict=verdict)


def _swap_wish(path: str, settings: Offload, swap: bool) -> Wish:
    open_ = swap and settings.enable_swap
    why = "is allowed" if open_ else "is not allowed" if not settings.enable_swap else "is nearly full"
    verdict = Verdict(rule="memory_offload_swap", text=f"Memory of {path} is offloaded, and swap {why} for it.")
    return Wish(cgroup=path, knob=Knob.SWAP_MAX, value="max" if open_ else "0", verdict=verdict)


def _advance(
    situation: Situation,
    settings: Offload,
    config: OffloadingConfig,
    sample: CgroupSample,
    known: Offloaded | None,
    swap: bool,
) -> _Result:
    """The end of an interval: what the law asks for, within what can be given. Raises Unknown."""
    now = Offloaded(
        cgroup_id=sample.id,
        at_ns=situation.now_ns,
        read_at_ns=sample.files_read_at_ns,
        scanned=stat(sample, "pgscan"),
        stolen=stat(sample, "pgsteal"),
        activated=activated(sample),
        stall_us=None if sample.memory_pressure is None else sample.memory_pressure.some_us,
    )
    usage = _known(sample.memory_bytes, "its memory")
    size: float | None = None
    if settings.policy == "senpai":
        size, target = _senpai(situation, settings, config, sample, now, known)
        if swap:
            files = _known(stat(sample, "active_file"), "its cache") + _known(
                stat(sample, "inactive_file"), "its cache"
            )
            target = min(target, files + config.senpai_swap_bytes_per_s * settings.interval_s)
    else:
        target = _katalyst(settings, sample, now, known)
    asked = target
    if not swap:
        asked = laws.without_swap(
            target,
            _known(stat(sample, "file"), "its cache"),
            _known(stat(sample, "mapped"), "its mapped files"),
            _known(stat(sample, "inactive_file"), "its inactive files"),
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
    text = f"Policy {settings.policy} asks {sample.path} for {human(target)} of {human(usage)}; it can give {human(asked)}."
    verdict = Verdict(rule="memory_offload", text=text, threshold=settings.psi_avg60_threshold, inputs=inputs)
    past = Offloaded(
        **{name: getattr(now, name) for name in now.__struct_fields__ if name not in ("target_bytes", "size_bytes")},
        target_bytes=asked,
        size_bytes=size,
    )
    return _Result(asked, past, verdict)


def _katalyst(settings: Offload, sample: CgroupSample, now: Offloaded, known: Offloaded | None) -> float:
    usage = _known(sample.memory_bytes, "its memory")
    results = []
    if settings.policy in ("psi", "integrated"):
        avg60 = None if sample.memory_pressure is None else sample.memory_pressure.some_avg60
        law = (settings.psi_max_probe, settings.psi_avg60_threshold)
        results.append(laws.psi(usage, _known(avg60, "its memory pressure"), *law))
    if settings.policy in ("refault", "integrated"):
        inactive = _known(stat(sample, "inactive_anon"), "its inactive memory") + _known(
            stat(sample, "inactive_file"), "its inactive files"
        )
        targets = laws.Targets(
            settings.reclaim_accuracy_target, settings.reclaim_scan_efficiency_target, settings.refault_max_probe
        )
        if (pages := _pages(now, known)) is None:
            return 0.0  # counters start here: what reclaim did before is not the last request's doing
        results.append(laws.refault(known.target_bytes if known else 0.0, pages, inactive, usage, targets))
    return min(results)


def _pages(now: Offloaded, known: Offloaded | None) -> laws.Pages | None:
    """What reclaim did since the last interval; None in the first, and where a counter went backwards. Raises Unknown."""
    changes = []
    for name in ("scanned", "stolen", "activated"):
        after = _known(getattr(now, name), "what reclaim did to it")
        before = None if known is None else getattr(known, name)
        if before is None or after < before:
            return None
        changes.append(after - before)
    return laws.Pages(*changes)


def _senpai(
    situation: Situation,
    settings: Offload,
    config: OffloadingConfig,
    sample: CgroupSample,
    now: Offloaded,
    known: Offloaded | None,
) -> tuple[float, float]:
    """The size aimed at and what to give up. Raises Unknown."""
    usage = float(_known(sample.memory_bytes, "its memory"))
    stall_us = _known(now.stall_us, "its memory pressure")
    io = _known(None if sample.io_pressure is None else sample.io_pressure.some_avg10, "its pressure on disks")
    before = None if known is None else known.stall_us
    size = usage if known is None or known.size_bytes is None else known.size_bytes
    if known is None or before is None or stall_us < before or situation.now_ns <= known.at_ns:
        return size, 0.0
    law = laws.Senpai(
        # The aim is for one interval; a round that comes late has had more time to stall.
        config.senpai_stall_s * (situation.now_ns - known.at_ns) / (settings.interval_s * NS_PER_S),
        config.senpai_min_bytes,
        config.senpai_max_bytes,
        config.senpai_max_probe,
        config.senpai_max_backoff,
        config.senpai_probe,
        config.senpai_backoff,
    )
    size, target = laws.senpai(usage, size, (stall_us - before) / US_PER_S, law)
    pressure = 0.0 if sample.memory_pressure is None else sample.memory_pressure.some_avg10
    return size, target if max(pressure, io) < config.senpai_pressure else 0.0


def _known(value: T | None, what: str) -> T:
    if value is None:
        raise Unknown(what)
    return value


def _unknown(what: str, paths: list[str]) -> Verdict:
    others = f" and {len(paths) - 1} others" if len(paths) > 1 else ""
    text = f"Not known of {paths[0]}{others}: {what}. Nothing is asked of them."
    return Verdict(rule="memory_offload_unknown", text=text, inputs={"missing": what, "cgroups": len(paths)})
