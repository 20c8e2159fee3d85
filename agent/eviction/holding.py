"""Whether who could not be asked to leave still has to. Pure.

A pod that was sent may count as gone for a while, so that its plugin finds nothing wrong meanwhile. Where it counts as here,
as one does that a budget keeps, the plugin's word is the truth: where it finds nothing, or can tell nothing, the pod stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from agent.config.eviction import NAMES, EvictionConfig
from agent.eviction.choosing import protected
from agent.eviction.situation import counts_as_gone_ns
from api.evictions import Evictions, Held, Met
from api.pods import Pod


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """That a pod leaves."""

    plugin: str
    until_ns: int
    """So long it counts as gone, or longer where it is held (CLOCK_MONOTONIC)."""


def wished(
    found: Evictions, before: Mapping[str, Wish], held: Mapping[str, Held], pods: Sequence[Pod], now_ns: int
) -> dict[str, Wish]:
    """By pod, with those of this round, whose `pods` are given; those of earlier ones while they are held."""
    kept = {pod: wish for pod, wish in before.items() if pod in held or now_ns < wish.until_ns}
    for victim in found.victims:
        if not victim.dry_run and not victim.notify:
            until_ns = now_ns + counts_as_gone_ns(victim, pods)
            kept[victim.pod] = Wish(plugin=victim.plugin, until_ns=until_ns)
    return kept


def over(
    wishes: Mapping[str, Wish],
    held: Iterable[str],
    found: Evictions,
    pods: Iterable[Pod],
    config: EvictionConfig,
    gone: Collection[str],
) -> Iterator[tuple[str, str]]:
    """Pods that are held and need not leave any more, each with why; `gone` are those that counted as gone when that was
    `found`."""
    in_trouble = {each.plugin for each in found.thresholds if each.met is not Met.NOT_MET}
    judging = {each.plugin for each in found.thresholds}
    known = {pod.key: pod for pod in pods}
    for key in held:
        wish = wishes.get(key)
        if wish is None:
            yield key, "nobody knows any more what for"
        elif key in known and protected(known[key], config):
            yield key, "by now it is protected"
        elif config.dry(wish.plugin):
            yield key, f"{wish.plugin} runs dry by now"
        elif not (config.enabled(wish.plugin) if wish.plugin in NAMES else wish.plugin in judging):
            yield key, f"{wish.plugin} does not judge any more"
        elif key not in gone and wish.plugin not in in_trouble:
            yield key, f"{wish.plugin} finds no more trouble, or cannot tell"
