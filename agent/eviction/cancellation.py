"""Decides which evictions that could not be requested yet are cancelled, because their reason no longer holds.
It is pure. Applies to pods that a disruption budget, a refusal or an unreachable API server holds back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from agent.config.eviction import PLUGIN_NAMES, EvictionConfig
from agent.eviction.eviction_inputs import exclusion_ns
from agent.eviction.victims import is_protected
from api.eviction import EvictionBlock, EvictionResult, ThresholdMet
from api.pod import Pod


class PendingEviction(msgspec.Struct, frozen=True, kw_only=True):
    """That a pod leaves."""

    plugin: str
    until_ns: int
    """So long it counts as gone, or longer where it is held (CLOCK_MONOTONIC)."""


def track_pending_evictions(
    found: EvictionResult,
    before: Mapping[str, PendingEviction],
    held: Mapping[str, EvictionBlock],
    pods: Sequence[Pod],
    now_ns: int,
) -> dict[str, PendingEviction]:
    """By pod, with those of this round, whose `pods` are given; those of earlier ones while they are held."""
    kept = {pod: wish for pod, wish in before.items() if pod in held or now_ns < wish.until_ns}
    for victim in found.victims:
        if not victim.dry_run and not victim.notify:
            until_ns = now_ns + exclusion_ns(victim, pods)
            kept[victim.pod] = PendingEviction(plugin=victim.plugin, until_ns=until_ns)
    return kept


def evictions_to_cancel(
    pending: Mapping[str, PendingEviction],
    held: Iterable[str],
    found: EvictionResult,
    pods: Iterable[Pod],
    config: EvictionConfig,
    excluded: Collection[str],
) -> Iterator[tuple[str, str]]:
    """Pods that are held and need not leave any more, each with why; `gone` are those that counted as gone when that was
    `found`."""
    in_trouble = {each.plugin for each in found.thresholds if each.met is not ThresholdMet.NOT_MET}
    judging = {each.plugin for each in found.thresholds}
    known = {pod.key: pod for pod in pods}
    for key in held:
        wish = pending.get(key)
        if wish is None:
            yield key, "nobody knows any more what for"
        elif key in known and is_protected(known[key], config):
            yield key, "by now it is protected"
        elif config.dry(wish.plugin):
            yield key, f"{wish.plugin} runs dry by now"
        elif not (config.enabled(wish.plugin) if wish.plugin in PLUGIN_NAMES else wish.plugin in judging):
            yield key, f"{wish.plugin} does not judge any more"
        elif key not in excluded and wish.plugin not in in_trouble:
            yield key, f"{wish.plugin} finds no more trouble, or cannot tell"
