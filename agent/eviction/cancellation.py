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
    """An eviction that was handed to the pod evictor."""

    plugin: str
    until_ns: int
    """The pod is excluded until then, or longer while it is blocked (CLOCK_MONOTONIC)."""


def track_pending_evictions(
    result: EvictionResult,
    before: Mapping[str, PendingEviction],
    blocked: Mapping[str, EvictionBlock],
    pods: Sequence[Pod],
    now_ns: int,
) -> dict[str, PendingEviction]:
    """Returns the pending evictions by pod: those of this cycle, and earlier ones that are blocked or not yet due."""
    retained = {pod: eviction for pod, eviction in before.items() if pod in blocked or now_ns < eviction.until_ns}
    for victim in result.victims:
        if not victim.dry_run and not victim.notify:
            until_ns = now_ns + exclusion_ns(victim, pods)
            retained[victim.pod] = PendingEviction(plugin=victim.plugin, until_ns=until_ns)
    return retained


def evictions_to_cancel(
    pending: Mapping[str, PendingEviction],
    blocked: Iterable[str],
    result: EvictionResult,
    pods: Iterable[Pod],
    config: EvictionConfig,
    excluded: Collection[str],
) -> Iterator[tuple[str, str]]:
    """Yields the blocked pods that need not leave any more, each with the reason.

    `excluded` are the pods whose memory and CPU the evaluation in `result` did not count.
    """
    met_plugins = {each.plugin for each in result.thresholds if each.met is not ThresholdMet.NOT_MET}
    evaluating = {each.plugin for each in result.thresholds}
    pods_by_key = {pod.key: pod for pod in pods}
    for key in blocked:
        eviction = pending.get(key)
        if eviction is None:
            yield key, "the reason of the eviction is no longer known"
        elif key in pods_by_key and is_protected(pods_by_key[key], config):
            yield key, "the pod is now protected"
        elif config.dry(eviction.plugin):
            yield key, f"{eviction.plugin} now runs dry"
        elif not (
            config.enabled(eviction.plugin) if eviction.plugin in PLUGIN_NAMES else eviction.plugin in evaluating
        ):
            yield key, f"{eviction.plugin} is disabled"
        elif key not in excluded and eviction.plugin not in met_plugins:
            yield key, f"{eviction.plugin} no longer meets its threshold, or has no inputs"
