"""Evictions and the thresholds of their plugins in words: label and text of each part. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from api.evictions import EvictionEntry, Victim, amount
from api.knobs import Verdict
from cli import words
from cli.reasons import EvictionStory
from cli.verdicts import verdict_text
from exporters.evictions import ThresholdView


def eviction_text(story: EvictionStory, now_ns: int) -> Iterator[tuple[str, str]]:
    """What became of one pod, newest first; the reason with its numbers once."""
    yield (
        "",
        f"Evictions of {words.clean(story.pod)}{': it was asked to leave, and is still here' if story.leaving else ''}",
    )
    newest = next((entry.victim for entry in story.entries if entry.victim is not None), None)
    why = newest.verdict.text if newest is not None else ""
    for i, entry in enumerate(story.entries):
        age = words.age((now_ns - entry.wall_time_ns) / 1e9)
        yield (
            "" if i else "evictions",
            f"#{entry.seq}, {words.clock(entry.wall_time_ns / 1e6)}, {age} ago: {_fate(entry, why)}",
        )
    if newest is not None:
        yield from verdict_text(newest.verdict)


def _fate(entry: EvictionEntry, why: str) -> str:
    """`why` is told by itself."""
    if entry.victim is None:
        if entry.kill is None:
            return ""
        message = entry.kill.message
        if why:
            message = message.replace(f"; reason: {why}", "").replace(why, "see below")
        return words.clean(f"{entry.kill.reason.value}: {message}")
    return f"{_sentence(entry.victim)}, says {words.clean(entry.victim.plugin)}"


def _sentence(victim: Victim) -> str:
    if victim.dry_run:
        return "it would have to leave, but the plugin runs dry"
    if victim.notify:
        return "it is told to leave, as it asked for, and stays"
    grace = "the pod's own grace" if victim.grace_s is None else f"{victim.grace_s:g} s of grace"
    return f"it has to leave, with {grace}"


def threshold_text(threshold: ThresholdView) -> Iterator[tuple[str, str]]:
    """One threshold of an eviction plugin, as the latest round judged it."""
    which = words.join([words.clean(threshold.scope), words.clean(threshold.subject)], " ")
    state = words.clean(threshold.met) if threshold.judged else "not judged"
    yield "", f"{words.clean(threshold.plugin)}: {state}"
    if which:
        yield "scope", which
    if threshold.observed is not None and threshold.value is not None:
        observed, value = (amount(n, threshold.scope, threshold.subject) for n in (threshold.observed, threshold.value))
        yield "observed", f"{observed}, met when {threshold.operator} {value}"
    if threshold.met_s is not None:
        yield "met for", f"{words.age(threshold.met_s)}; it acts after {threshold.tolerance_s:g} s"
    verdict = Verdict(rule=threshold.rule, text=threshold.text, threshold=threshold.value, inputs=threshold.inputs)
    yield from verdict_text(verdict)
