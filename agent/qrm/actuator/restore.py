"""Restores original values in an order that the kernel accepts.
`cpu.idle` goes first, because leaving it resets the weight, and a weight cannot be written while it is set. A
value that the kernel refuses is tried again after the others; CPU lists are widened before any of them is
narrowed.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Sequence

from agent.qrm.actuator.writer import KernelRefused, KnobWriter, OriginalValue, RawValue
from agent.qrm.knobs.knob_files import CHANGED_BY, KNOB_GROUPS, KNOB_ORDER, LIST_KNOBS
from api.cpu import format_cpu_list, parse_cpu_list
from api.decision import Decision, Outcome, OutcomeStatus
from api.interfaces import Unavailable, Vanished
from api.knobs import Knob, Reason

KnobKey = tuple[str, Knob]
"""A cgroup and one of its knobs."""
RESTORED_STATUSES = (OutcomeStatus.APPLIED, OutcomeStatus.UNCHANGED, OutcomeStatus.VANISHED)
"""Nothing is left to put back after these."""
RESTORE_REASON = Reason(rule="restore", text="put back what the knob held before the agent first wrote it")
WEIGHT_PINNED = "cpu.idle=1 pins the weight"


def key_of(entry: OriginalValue) -> KnobKey:
    """The knob that the entry is about."""
    return entry.cgroup, entry.knob


def still_needed(
    entries: Sequence[OriginalValue], decided: Collection[KnobKey], unseen: Collection[str], version: str
) -> frozenset[KnobKey]:
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


def restore_originals(
    entries: Sequence[OriginalValue], files: KnobWriter, keep: Collection[KnobKey] = ()
) -> tuple[tuple[Outcome, ...], frozenset[KnobKey]]:
    """Restore all but the kept ones: what came of each, and which are settled."""
    outcomes: list[Outcome] = []
    settled: set[KnobKey] = set()
    for group in KNOB_GROUPS:
        due = [entry for entry in entries if entry.knob in group and not _is_still_needed(entry, keep)]
        unsettled = {entry.cgroup for entry in entries if entry.knob is Knob.IDLE and key_of(entry) not in settled}
        if Knob.WEIGHT in group:
            results = {key_of(entry): _restore_weight(entry, files, entry.cgroup in unsettled) for entry in due}
        else:
            results = _until_no_progress(due, files)
        settled.update(key for key, outcome in results.items() if outcome.status in RESTORED_STATUSES)
        outcomes.extend(results.values())
    return tuple(outcomes), frozenset(settled)


def _is_still_needed(entry: OriginalValue, keep: Collection[KnobKey]) -> bool:
    return key_of(entry) in keep or (entry.cgroup, CHANGED_BY.get(entry.knob)) in keep


def _until_no_progress(due: Sequence[OriginalValue], files: KnobWriter) -> dict[KnobKey, Outcome]:
    """Parents first; what is refused again while others succeed, with lists widened once in between."""
    pending = sorted(due, key=lambda entry: (entry.cgroup.count("/"), KNOB_ORDER.index(entry.knob)))
    results: dict[KnobKey, Outcome] = {}
    widened = False
    while pending:
        results.update((key_of(entry), _restore_value(entry, files)) for entry in pending)
        refused = [entry for entry in pending if results[key_of(entry)].status is OutcomeStatus.REFUSED]
        if len(refused) == len(pending):
            if widened or pending[0].knob not in LIST_KNOBS:
                break
            widened = True
            for entry in pending:
                _widen(entry, files)
            refused.reverse()
        pending = refused
    return results


def _restore_weight(entry: OriginalValue, files: KnobWriter, idle_is_ours: bool) -> Outcome:
    if not idle_is_ours and is_idle(entry, files):
        # Whoever made it idle lost the old weight for good: the kernel will start from the default.
        return _restore_outcome(
            entry, files, OutcomeStatus.UNCHANGED, error=f"{WEIGHT_PINNED}; there is nothing to put back"
        )
    return _restore_value(entry, files)


def is_idle(entry: OriginalValue, files: KnobWriter) -> bool:
    """Whether the entry's cgroup is idle now."""
    try:
        return files.read(entry.cgroup, entry.cgroup_id, Knob.IDLE) == "1"
    except (Unavailable, Vanished):
        return False


def _write_original(entry: OriginalValue, files: KnobWriter) -> bool:
    """Write the original, or what stands for it: whether it is the latter.

    With tasks in the group the kernel takes no empty list any more (validate_change, kernel/cgroup/cpuset.c): then the group
    has all that the one above has, which is what an empty one means on version 2.
    """
    try:
        files.write_raw(entry.cgroup, entry.cgroup_id, entry.knob, entry.raw.texts)
    except KernelRefused as error:
        above = files.ceiling(entry.cgroup, entry.knob) if entry.knob in LIST_KNOBS else None
        if error.code != errno.ENOSPC or above is None or "".join(entry.raw.texts.values()).strip():
            raise
        files.write(entry.cgroup, entry.cgroup_id, entry.knob, format_cpu_list(above))
        return True
    return False


def _restore_value(entry: OriginalValue, files: KnobWriter) -> Outcome:
    before = after = None
    try:
        current = _read_current(entry, files)
        before = _display_value(entry, files, current)
        if current.texts == entry.raw.texts:
            return _restore_outcome(entry, files, OutcomeStatus.UNCHANGED, before=before, after=before)
        stands_for = _write_original(entry, files)
        written = _read_current(entry, files)
        after = _display_value(entry, files, written)
    except Vanished as error:
        return _restore_outcome(entry, files, OutcomeStatus.VANISHED, before=before, error=str(error))
    except Unavailable as error:
        return _restore_outcome(
            entry, files, OutcomeStatus.REFUSED, before=before, error=f"{error.reason}: {error.remedy}"
        )
    if written.texts != entry.raw.texts and not stands_for:
        error_text = "the kernel shows another value than the original: look for another program that writes it"
        return _restore_outcome(entry, files, OutcomeStatus.MISMATCH, before=before, after=after, error=error_text)
    return _restore_outcome(entry, files, OutcomeStatus.APPLIED, before=before, after=after)


def _restore_outcome(
    entry: OriginalValue,
    files: KnobWriter,
    status: OutcomeStatus,
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
        value=_display_value(entry, files, entry.raw),
        reason=RESTORE_REASON,
    )
    return Outcome(decision=decision, status=status, before=before, after=after, error=error)


def _read_current(entry: OriginalValue, files: KnobWriter) -> RawValue:
    return files.read_raw(entry.cgroup, entry.cgroup_id, entry.knob, entry.raw.directory_id)


def _widen(entry: OriginalValue, files: KnobWriter) -> None:
    # Refusals show when the entry itself is tried again.
    try:
        has = parse_cpu_list(files.decode(entry.cgroup, entry.knob, _read_current(entry, files)))
        wants = parse_cpu_list(files.decode(entry.cgroup, entry.knob, entry.raw))
        files.write(entry.cgroup, entry.cgroup_id, entry.knob, format_cpu_list((*has, *wants)))
    except (Unavailable, Vanished):
        return


def _display_value(entry: OriginalValue, files: KnobWriter, raw: RawValue) -> str:
    # A person sees the common notation where the text has one; an original is put back even if it has none.
    try:
        return files.decode(entry.cgroup, entry.knob, raw)
    except Unavailable:
        return " ".join(raw.texts.values()).strip()
