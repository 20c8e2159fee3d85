"""What removed cgroups left behind: memory that is still charged to the group above them, and that nobody living owns.

The kernel keeps a removed group as long as pages are charged to it (Documentation/admin-guide/cgroup-v2.rst, nr_dying_
descendants). Reclaim of the group above frees them, and some cache of its living members too: so it is off unless asked for,
happens seldom, and asks for no more than the difference between the group and its members.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from mmap import PAGESIZE
from typing import NamedTuple

from agent.advisor.memory.situation import Situation, elapsed
from agent.advisor.memory.stats import human
from agent.config.memory import MemoryConfig
from api.advice import Wish
from api.knobs import Knob, Verdict

_BATCH_PAGES = 64
"""What each CPU may have charged in advance (MEMCG_CHARGE_BATCH, include/linux/memcontrol.h): no sign of anything."""


class Dying(NamedTuple):
    """What is to be reclaimed, and when that was last looked at."""

    wishes: tuple[Wish, ...]
    at_ns: int | None
    verdicts: tuple[Verdict, ...] = ()


def reclaim_dying(situation: Situation, config: MemoryConfig, before_ns: int | None) -> Dying:
    """Groups whose removed members still hold memory, once in the interval."""
    settings, snapshot = config.offloading, situation.snapshot
    if not settings.dying or not elapsed(situation.now_ns, before_ns, settings.dying_interval_s):
        return Dying((), before_ns)
    groups = [path for path in snapshot.cgroups if is_named(path, config)]
    members: dict[str, list[int | None]] = {path: [] for path in groups}
    for path, sample in snapshot.cgroups.items():
        above = members.get(path.rpartition("/")[0])
        if above is not None:
            above.append(sample.memory_bytes)
    noise = _BATCH_PAGES * PAGESIZE * len(snapshot.topology.cpus)
    wishes, unknown = [], []
    for path, sizes in sorted(members.items()):
        whole = snapshot.cgroups[path].memory_bytes
        known = [size for size in sizes if size is not None]
        if whole is None or len(known) < len(sizes):
            unknown.append(_unmeasured(path))  # a member that is not measured is not dead
            continue
        left = whole - sum(known)
        if left > noise:
            text = f"{path} is charged with {human(left)} that no living member has: it is reclaimed."
            inputs: dict[str, float | int | str | None] = {"group_bytes": whole, "members_bytes": sum(known)}
            verdict = Verdict(rule="memory_dying_reclaim", text=text, threshold=noise, inputs=inputs)
            wishes.append(Wish(cgroup=path, knob=Knob.MEMORY_RECLAIM, value=str(left), verdict=verdict))
    return Dying(tuple(wishes), situation.now_ns, (*(wish.verdict for wish in wishes), *unknown))


def _unmeasured(path: str) -> Verdict:
    text = f"Not known: the memory of {path} or of a member. What removed members left there is not reclaimed."
    return Verdict(rule="memory_dying_unknown", text=text, inputs={"missing": "memory", "cgroup": path})


def is_named(path: str, config: MemoryConfig) -> bool:
    """Whether the settings say that what removed members left in this cgroup is to be reclaimed."""
    settings = config.offloading
    return settings.dying and any(_matches(path, each) for each in settings.dying_cgroups)


def _matches(path: str, pattern: str) -> bool:
    return path.count("/") == pattern.count("/") and fnmatchcase(path, pattern)
