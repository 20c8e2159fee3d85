"""Puts originals back into the kernel, in an order in which it can accept them.

cpu.idle goes first: leaving it resets the weight to its default, and while it is set the weight cannot be written.
Then weights, quotas with bursts, lists of CPUs and NUMA nodes, memory and disks. On version 1 a quota or a list must fit
between those of the cgroups above and below, a burst never exceeds its quota, and memory never what it and swap may have
together: so what is refused is tried again after the others, and lists are widened before anything is narrowed.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Sequence

from agent.qrm.knobs import KnobFiles, Original, RawValue, Refused
from api.cpus import format_cpu_list, parse_cpu_list
from api.decisions import Decision, Outcome, Status
from api.knobs import Knob, Verdict
from api.ports import Unavailable, Vanished

Key = tuple[str, Knob]
"""A cgroup and one of its knobs."""
GROUPS = (
    (Knob.IDLE,),
    (Knob.WEIGHT,),
    (Knob.QUOTA, Knob.BURST),
    (Knob.CPUSET,),
    (Knob.MEMS,),
    (Knob.MEMORY_MAX, Knob.SWAP_MAX, Knob.MEMORY_HIGH, Knob.MEMORY_LOW, Knob.MEMORY_MIN),
    (Knob.IO_WEIGHT,),
    (Knob.IO_MAX,),
    (Knob.NET_CLASS,),
)
"""Knobs whose values depend on one another, in the order in which these groups are written."""
ORDER = tuple(knob for group in GROUPS for knob in group)
GROUP_OF = {knob: number for number, group in enumerate(GROUPS) for knob in group}
CHANGED_BY = {Knob.WEIGHT: Knob.IDLE, Knob.BURST: Knob.QUOTA}
"""A knob that changes with another, also where nobody decides on it: its original is needed as long as the other's."""
LISTS = (Knob.CPUSET, Knob.MEMS)
SETTLED = (Status.APPLIED, Status.UNCHANGED, Status.VANISHED)
"""Nothing is left to put back after these."""
VERDICT = Verdict(rule="restore", text="put back what the knob held before the agent first wrote it")
PINNED = "cpu.idle=1 pins the weight"


def key_of(entry: Original) -> Key:
    """The knob that the entry is about."""
    return entry.cgroup, entry.knob


def still_needed(
    entries: Sequence[Original], decided: Collection[Key], unseen: Collection[str], version: str
) -> frozenset[Key]:
    """Of these originals those that must not be put back yet: the knob is decided, or was changed by one that is, or its
    cgroup could not be seen."""
    keys = [key_of(entry) for entry in entries]
    keep = {key for key in keys if key in decided or key[0] in unseen}
    if version == "v1":
        # Memory cannot have more than it and swap together: where its limit goes, that one has to go before it.
        keep -= {
            (cgroup, Knob.SWAP_MAX) for cgroup, knob in keys if knob is Knob.MEMORY_MAX and (cgroup, knob) not in keep
        }
    return frozenset(keep | {key for key in keys if (key[0], CHANGED_BY.get(key[1])) in keep})


def put_back(
    entries: Sequence[Original], files: KnobFiles, keep: Collection[Key] = ()
) -> tuple[tuple[Outcome, ...], frozenset[Key]]:
    """Restore all but the kept ones: what came of each, and which are settled."""
    outcomes: list[Outcome] = []
    settled: set[Key] = set()
    for group in GROUPS:
        due = [entry for entry in entries if entry.knob in group and not _kept(entry, keep)]
        unsettled = {entry.cgroup for entry in entries if entry.knob is Knob.IDLE and key_of(entry) not in settled}
        if Knob.WEIGHT in group:
            results = {key_of(entry): _weight(entry, files, entry.cgroup in unsettled) for entry in due}
        else:
            results = _until_no_progress(due, files)
        settled.update(key for key, outcome in results.items() if outcome.status in SETTLED)
        outcomes.extend(results.values())
    return tuple(outcomes), frozenset(settled)


def _kept(entry: Original, keep: Collection[Key]) -> bool:
    return key_of(entry) in keep or (entry.cgroup, CHANGED_BY.get(entry.knob)) in keep


def _until_no_progress(due: Sequence[Original], files: KnobFiles) -> dict[Key, Outcome]:
    """Parents first; what is refused again while others succeed, with lists widened once in between."""
    pending = sorted(due, key=lambda entry: (entry.cgroup.count("/"), ORDER.index(entry.knob)))
    results: dict[Key, Outcome] = {}
    widened = False
    while pending:
        results.update((key_of(entry), _restore(entry, files)) for entry in pending)
        refused = [entry for entry in pending if results[key_of(entry)].status is Status.REFUSED]
        if len(refused) == len(pending):
            if widened or pending[0].knob not in LISTS:
                break
            widened = True
            for entry in pending:
                _widen(entry, files)
            refused.reverse()
        pending = refused
    return results


def _weight(entry: Original, files: KnobFiles, idle_is_ours: bool) -> Outcome:
    if not idle_is_ours and is_idle(entry, files):
        # Whoever made it idle lost the old weight for good: the kernel will start from the default.
        return _outcome(entry, files, Status.UNCHANGED, error=f"{PINNED}; there is nothing to put back")
    return _restore(entry, files)


def is_idle(entry: Original, files: KnobFiles) -> bool:
    """Whether the entry's cgroup is idle now."""
    try:
        return files.read(entry.cgroup, entry.cgroup_id, Knob.IDLE) == "1"
    except (Unavailable, Vanished):
        return False


def _write(entry: Original, files: KnobFiles) -> bool:
    """Write the original, or what stands for it: whether it is the latter.

    With tasks in the group the kernel takes no empty list any more (validate_change, kernel/cgroup/cpuset.c): then the group
    has all that the one above has, which is what an empty one means on version 2.
    """
    try:
        files.write_raw(entry.cgroup, entry.cgroup_id, entry.knob, entry.raw.texts)
    except Refused as error:
        above = files.ceiling(entry.cgroup, entry.knob) if entry.knob in LISTS else None
        if error.code != errno.ENOSPC or above is None or "".join(entry.raw.texts.values()).strip():
            raise
        files.write(entry.cgroup, entry.cgroup_id, entry.knob, format_cpu_list(above))
        return True
    return False


def _restore(entry: Original, files: KnobFiles) -> Outcome:
    before = after = None
    try:
        current = _current(entry, files)
        before = _shown(entry, files, current)
        if current.texts == entry.raw.texts:
            return _outcome(entry, files, Status.UNCHANGED, before=before, after=before)
        stands_for = _write(entry, files)
        written = _current(entry, files)
        after = _shown(entry, files, written)
    except Vanished as error:
        return _outcome(entry, files, Status.VANISHED, before=before, error=str(error))
    except Unavailable as error:
        return _outcome(entry, files, Status.REFUSED, before=before, error=f"{error.reason}: {error.remedy}")
    if written.texts != entry.raw.texts and not stands_for:
        error_text = "the kernel shows another value than the original: look for another program that writes it"
        return _outcome(entry, files, Status.MISMATCH, before=before, after=after, error=error_text)
    return _outcome(entry, files, Status.APPLIED, before=before, after=after)


def _outcome(
    entry: Original,
    files: KnobFiles,
    status: Status,
    *,
    before: str | None = None,
    after: str | None = None,
    error: str = "",
) -> Outcome:
    decision = Decision(
        cgroup=entry.cgroup,
        cgroup_id=entry.cgroup_id,
        pod="",
        knob=entry.knob,
        value=_shown(entry, files, entry.raw),
        verdict=VERDICT,
    )
    return Outcome(decision=decision, status=status, before=before, after=after, error=error)


def _current(entry: Original, files: KnobFiles) -> RawValue:
    return files.read_raw(entry.cgroup, entry.cgroup_id, entry.knob, entry.raw.directory_id)


def _widen(entry: Original, files: KnobFiles) -> None:
    # Refusals show when the entry itself is tried again.
    try:
        has = parse_cpu_list(files.decode(entry.cgroup, entry.knob, _current(entry, files)))
        wants = parse_cpu_list(files.decode(entry.cgroup, entry.knob, entry.raw))
        files.write(entry.cgroup, entry.cgroup_id, entry.knob, format_cpu_list((*has, *wants)))
    except (Unavailable, Vanished):
        return


def _shown(entry: Original, files: KnobFiles, raw: RawValue) -> str:
    # A person sees the common notation where the text has one; an original is put back even if it has none.
    try:
        return files.decode(entry.cgroup, entry.knob, raw)
    except Unavailable:
        return " ".join(raw.texts.values()).strip()
