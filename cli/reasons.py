"""From a knob to why it is what it is: its decisions, the verdict behind the newest, and the sources behind that. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from api.decisions import JournalEntry, Status
from api.evictions import EvictionEntry
from api.forecasts import Outlook
from api.knobs import Knob
from api.memory_advice import MemoryAdvice
from api.pods import Pod
from api.samples import Snapshot, SourceStatus
from cli.advised import MEMORY, PodStory, PoolStory, memory, pods, pools, troubled
from cli.ages import Reading, readings
from exporters.evictions import ThresholdView
from exporters.view import AnswerView, ShadowView, View

EARLIER = 3
MOST_EVENTS = 8
IN_FORCE = (Status.APPLIED, Status.UNCHANGED)


class KnobStory(msgspec.Struct, frozen=True, kw_only=True):
    """One knob of one cgroup."""

    pod: str
    cgroup: str
    knob: str
    value: str | None
    """What the kernel holds as far as the agent saw; None where no decision ever read it."""
    newest: JournalEntry
    in_force: JournalEntry | None
    """The decision that made the value, where the newest did not: it was dry, refused or met another cgroup."""
    earlier: tuple[JournalEntry, ...]
    """Up to three before it, newest first."""
    later: JournalEntry | None = None
    """Where a decision was asked for by its number: the newest one on this knob, if that is another."""
    gone: bool = False
    """Whether that cgroup is not there any more: an earlier container's, or an earlier pod's that had the same name."""


class EvictionStory(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one pod's evictions."""

    pod: str
    leaving: bool
    """Whether it was asked to leave and is still here."""
    entries: tuple[EvictionEntry, ...]
    """The latest ones, newest first."""


class Now(msgspec.Struct, frozen=True, kw_only=True):
    """The latest round, which every explanation ends in."""

    seq: int
    wall_time_ns: int
    age_s: float
    act: str
    policy: str
    action: str
    rule: str
    text: str
    threshold: float | None
    shadow: ShadowView | None
    answers: tuple[AnswerView, ...]
    forecasts: tuple[Outlook, ...]
    sources: tuple[SourceStatus, ...]
    readings: tuple[Reading, ...]
    """What of them is older than the round."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was asked for."""

    now: Now
    knobs: tuple[KnobStory, ...] = ()
    pods: tuple[PodStory, ...] = ()
    """Those that were asked for; without a target those in trouble."""
    pools: tuple[PoolStory, ...] = ()
    memory: MemoryAdvice | None = None
    evictions: tuple[EvictionStory, ...] = ()
    thresholds: tuple[ThresholdView, ...] = ()
    """Of the eviction plugin that was asked for; else those that are met."""

    @property
    def found(self) -> bool:
        return bool(self.knobs or self.pods or self.pools or self.memory or self.evictions or self.thresholds)


def answer(
    target: str | None,
    view: View,
    entries: Sequence[JournalEntry],
    snapshot: Snapshot,
    now_ns: int,
    evicted: Sequence[EvictionEntry] = (),
) -> Answer:
    """What is known about a pod, a cgroup, a knob, a pool, a region, memory or an eviction plugin; of everything where no
    target is given.

    Entries are oldest first. `now_ns` is CLOCK_REALTIME.
    """
    known = stories(_until(target, entries), snapshot)
    here = {pod.key for pod in snapshot.pods}
    # Who asks about a pod that is here means this one: what was decided of another that had its name is told by itself.
    past = [story for story in known if story.gone and story.pod in here and target and _is_pod(story.pod, target)]
    knobs = tuple(story for story in known if (target is None or about(story, target)) and story not in past)
    if _event(target) is not None:
        knobs = tuple(msgspec.structs.replace(story, later=_later(story, entries)) for story in knobs)
    wanted = troubled(view, snapshot)
    if target is not None:
        wanted = frozenset(pod.key for pod in snapshot.pods if _is_about_pod(pod, target))
    age_s = (now_ns - snapshot.wall_time_ns) / 1e9
    now = Now(
        seq=snapshot.seq, wall_time_ns=snapshot.wall_time_ns, age_s=age_s, act=view.act, policy=view.policy,
        action=view.action, rule=view.rule, text=view.reason, threshold=view.threshold, shadow=view.shadow,
        answers=view.answers, forecasts=view.forecasts, sources=snapshot.sources, readings=readings(snapshot),
    )  # fmt: skip
    touched = {story.pod for story in knobs if not story.gone}
    thresholds = view.evictions.thresholds if view.evictions is not None else ()
    return Answer(
        now=now,
        knobs=knobs,
        pods=tuple(_with_past(each, past) for each in pods(wanted, touched, view, snapshot)),
        pools=pools(target, view),
        memory=memory(target, view),
        evictions=_evictions(target, view, evicted),
        thresholds=tuple(t for t in thresholds if target == t.plugin or (target is None and t.met != "not-met")),
    )


def _with_past(pod: PodStory, past: Sequence[KnobStory]) -> PodStory:
    """With the newest decision of those on cgroups of its name that are gone."""
    newest = max((story.newest.seq for story in past if story.pod == pod.pod), default=None)
    return msgspec.structs.replace(pod, past=newest)


def _evictions(target: str | None, view: View, evicted: Sequence[EvictionEntry]) -> tuple[EvictionStory, ...]:
    leaving = view.evictions.leaving if view.evictions is not None else ()
    by_pod: dict[str, list[EvictionEntry]] = {pod: [] for pod in leaving}
    for entry in evicted:
        by_pod.setdefault(entry.pod, []).append(entry)
    return tuple(
        EvictionStory(pod=pod, leaving=pod in leaving, entries=tuple(reversed(by_pod[pod][-MOST_EVENTS:])))
        for pod in sorted(by_pod)
        if target is None or _is_pod(pod, target) or any(e.victim and e.victim.plugin == target for e in by_pod[pod])
    )


def _event(target: str | None) -> int | None:
    """The number of a decision, as in `#17`."""
    digits = (target or "").removeprefix("#")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 18 else None


def _until(target: str | None, entries: Sequence[JournalEntry]) -> Sequence[JournalEntry]:
    """All entries, or those that one was preceded by where it is asked for by its number: its story as it was then."""
    event = _event(target)
    return entries if event is None else [entry for entry in entries if entry.seq <= event]


def _later(story: KnobStory, entries: Sequence[JournalEntry]) -> JournalEntry | None:
    """The newest decision on that knob after the story's own."""
    same = [entry for entry in entries if entry.seq > story.newest.seq and _key(entry) == _key(story.newest)]
    return same[-1] if same else None


def _key(entry: JournalEntry) -> tuple[str, str, str]:
    decision = entry.outcome.decision
    return (decision.pod, decision.cgroup, decision.knob.value)


def stories(entries: Sequence[JournalEntry], snapshot: Snapshot | None = None) -> list[KnobStory]:
    """One story per knob and cgroup, in order of pod and knob; of cgroups that the snapshot does not have any more, as such."""
    by_knob: dict[tuple[str, str, str], list[JournalEntry]] = {}
    for entry in entries:
        by_knob.setdefault(_key(entry), []).append(entry)
    found = [_story(key, by_knob[key]) for key in sorted(by_knob)]
    if snapshot is None:
        return found
    return [msgspec.structs.replace(story, gone=_is_gone(story.newest, snapshot)) for story in found]


def _is_gone(entry: JournalEntry, snapshot: Snapshot) -> bool:
    """Whether the cgroup of that entry was there once and is not now, or another one took its path."""
    decision = entry.outcome.decision
    # The node's knobs have no cgroup, and who read none knows of none. What is decided for a container that is just made has
    # the time of the latest round, which was too early to see it.
    if not decision.cgroup_id or not snapshot.cgroups or entry.wall_time_ns >= snapshot.wall_time_ns:
        return False
    there = snapshot.cgroups.get(decision.cgroup)
    return there is None or there.id != decision.cgroup_id


def _story(key: tuple[str, str, str], entries: Sequence[JournalEntry]) -> KnobStory:
    pod, cgroup, knob = key
    newest = entries[-1]
    made = next((entry for entry in reversed(entries) if entry.outcome.status in IN_FORCE), None)
    outcome = newest.outcome
    value = outcome.after if outcome.after is not None else outcome.before
    if value is None and made is not None and outcome.status is not Status.VANISHED:
        value = made.outcome.after if made.outcome.after is not None else made.outcome.decision.value
    return KnobStory(
        pod=pod,
        cgroup=cgroup,
        knob=knob,
        value=value,
        newest=newest,
        in_force=None if made is newest else made,
        earlier=tuple(reversed(entries[:-1]))[:EARLIER],
    )


def about(story: KnobStory, target: str) -> bool:
    """Whether a person who says `target` means this knob."""
    names = {knob.name.lower(): knob.value for knob in Knob}
    return (
        story.knob == names.get(target.lower(), target)
        or _is_pod(story.pod, target)
        or _is_cgroup(story.cgroup, target)
        or story.newest.seq == _event(target)
    )


def _is_about_pod(pod: Pod, target: str) -> bool:
    return _is_pod(pod.key, target) or any(_is_cgroup(container.cgroup, target) for container in pod.containers)


def _is_pod(pod: str, target: str) -> bool:
    return target in (pod, pod.partition("/")[2])


def _is_cgroup(cgroup: str, target: str) -> bool:
    """The cgroup itself or one above it."""
    return target.startswith("/") and (cgroup + "/").startswith(target.rstrip("/") + "/")


def askable(view: View, entries: Sequence[JournalEntry]) -> dict[str, list[str]]:
    """What there is to ask about, by kind."""
    return {
        "pods": sorted({c.pod for c in view.containers} | {e.outcome.decision.pod for e in entries} - {""}),
        "cgroups": sorted({c.cgroup for c in view.containers} | {e.outcome.decision.cgroup for e in entries}),
        "knobs": sorted({e.outcome.decision.knob.value for e in entries}) or [knob.value for knob in Knob],
        "pools": sorted({*view.pools, *(size.pool for size in view.sizes)}),
        "regions": sorted(one.region.name for one in view.regions),
        "plugins": sorted({t.plugin for t in view.evictions.thresholds}) if view.evictions is not None else [],
        "more": [] if view.memory is None else [MEMORY],
    }
