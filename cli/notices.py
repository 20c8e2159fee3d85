"""What the overview of `dioptase top` says only while there is something to say: pods that leave, wishes for CPUs that were
rejected, memory that is short. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from api.memory_advice import MemoryPressure
from cli import words
from exporters.view import View

SHORT = (MemoryPressure.TUNE_MEMCG, MemoryPressure.DROP_CACHE)


def notices(view: View) -> Iterator[Text]:
    """A line of any length each; none where all is well."""
    yield from _evictions(view)
    yield from _rejected(view)
    yield from _memory(view)


def _evictions(view: View) -> Iterator[Text]:
    """While a threshold of an eviction plugin is met, a condition is in force or a pod is leaving."""
    found = view.evictions
    if found is None:
        return
    met = [threshold for threshold in found.thresholds if threshold.met != "not-met"]
    parts = [f"leaving: {', '.join(map(words.clean, found.leaving))}"] if found.leaving else []
    parts += [
        f"{words.clean(pod)} has to leave and stays for now ({words.clean(why)})" for pod, why in found.held.items()
    ]
    if met:
        more = f" (and {len(met) - 1} more)" if len(met) > 1 else ""
        parts.append(f"{words.clean(met[0].met)} {words.clean(met[0].plugin)}: {words.clean(met[0].text)}{more}")
    parts += [f"condition {words.clean(each.name)}" for each in found.conditions]
    if parts:
        yield Text(f"✕ evictions: {words.join(parts)}", style="bold red")


def _rejected(view: View) -> Iterator[Text]:
    for pod, verdict in sorted(view.rejected.items())[:1]:
        more = f" (and {len(view.rejected) - 1} more)" if len(view.rejected) > 1 else ""
        yield Text(f"! rejected {words.clean(pod)}: {words.clean(verdict.text)}{more}", style="yellow")


def _memory(view: View) -> Iterator[Text]:
    if view.memory is not None and view.memory.condition.state in SHORT:
        condition = view.memory.condition
        yield Text(f"! memory {condition.state.value}: {words.clean(condition.verdict.text)}", style="yellow")
