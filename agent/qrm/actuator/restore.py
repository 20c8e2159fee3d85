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
"""Statuses after which nothing is left to restore."""
RESTORE_REASON = Reason(rule="restore", text="Restored the value from before the agent first wrote the knob.")
WEIGHT_PINNED = "cpu.idle=1 pins the weight"


def key_of(entry: OriginalValue) -> KnobKey:
    return entry.cgroup, entry.knob


def failure_outcome(
    decision: Decision,
    error: Unavailable | Vanished,
    *,
    before: str | None = None,
    after: str | None = None,
    clamped_from: str | None = None,
) -> Outcome:
    """Return the outcome of a decision that failed with this error."""
    vanished = isinstance(error, Vanished)
    return Outcome(
        decision=decision,
        status=OutcomeStatus.VANISHED if vanished else OutcomeStatus.REFUSED,
        before=before,
        after=after,
        error=f"{error.reason}: {error.remedy}" if isinstance(error, Unavailable) else str(error),
        clamped_from=clamped_from,
    )


def still_needed(
    entries: Sequence[OriginalValue], decided: Collection[KnobKey], unseen: Collection[str], version: str
) -> frozenset[KnobKey]:
    """Return the keys of originals that must not be restored yet. Their knob is decided, or is changed by one that
    is, or their cgroup could not be read."""
    keys = [key_of(entry) for entry in entries]
    keep = {key for key in keys if key in decided or key[0] in unseen}
    if version == "v1":
        # The memory limit must not exceed the limit of memory and swap: they are restored together.
        keep -= {
            (cgroup, Knob.SWAP_MAX) for cgroup, knob in keys if knob is Knob.MEMORY_MAX and (cgroup, knob) not in keep
        }
    return frozenset(keep | {key for key in keys if (key[0], CHANGED_BY.get(key[1])) in keep})


def restore_originals(
    entries: Sequence[OriginalValue], files: KnobWriter, keep: Collection[KnobKey]
) -> tuple[tuple[Outcome, ...], frozenset[KnobKey]]:
    """Restore all entries but those of `keep`; return the outcomes and the keys that are restored."""
    outcomes: list[Outcome] = []
    restored: set[KnobKey] = set()
    for group in KNOB_GROUPS:
        due = [entry for entry in entries if entry.knob in group and not _is_still_needed(entry, keep)]
        still_idle = {entry.cgroup for entry in entries if entry.knob is Knob.IDLE and key_of(entry) not in restored}
        results = _restore_group(due, files, still_idle)
        restored.update(key for key, outcome in results.items() if outcome.status in RESTORED_STATUSES)
        outcomes.extend(results.values())
    return tuple(outcomes), frozenset(restored)


def _is_still_needed(entry: OriginalValue, keep: Collection[KnobKey]) -> bool:
    return key_of(entry) in keep or (entry.cgroup, CHANGED_BY.get(entry.knob)) in keep


def _restore_group(
    due: Sequence[OriginalValue], files: KnobWriter, still_idle: Collection[str]
) -> dict[KnobKey, Outcome]:
    """Restore parents first; retry refused entries while others succeed, and widen lists once in between."""
    pending = sorted(due, key=lambda entry: (entry.cgroup.count("/"), KNOB_ORDER.index(entry.knob)))
    results: dict[KnobKey, Outcome] = {}
    widened = False
    while pending:
        results.update((key_of(entry), _restore_entry(entry, files, still_idle)) for entry in pending)
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


def _restore_entry(entry: OriginalValue, files: KnobWriter, still_idle: Collection[str]) -> Outcome:
    value = _display_value(entry, files, entry.raw)
    decision = Decision(
        cgroup=entry.cgroup, cgroup_id=entry.cgroup_id, pod="", knob=entry.knob, value=value, reason=RESTORE_REASON
    )
    if entry.knob is Knob.WEIGHT and entry.cgroup not in still_idle and is_idle(entry, files):
        # Another program set cpu.idle, which discarded the old weight: leaving it gives the default.
        error_text = f"{WEIGHT_PINNED}; there is nothing to restore"
        return Outcome(decision=decision, status=OutcomeStatus.UNCHANGED, error=error_text)
    before = None
    try:
        present = _read_current(entry, files)
        before = _display_value(entry, files, present)
        if present.texts == entry.raw.texts:
            return Outcome(decision=decision, status=OutcomeStatus.UNCHANGED, before=before, after=before)
        substituted = _write_original(entry, files)
        written = _read_current(entry, files)
    except (Unavailable, Vanished) as error:
        return failure_outcome(decision, error, before=before)
    after = _display_value(entry, files, written)
    if written.texts != entry.raw.texts and not substituted:
        error_text = "the kernel shows another value than the original: look for another program that writes it"
        return Outcome(decision=decision, status=OutcomeStatus.MISMATCH, before=before, after=after, error=error_text)
    return Outcome(decision=decision, status=OutcomeStatus.APPLIED, before=before, after=after)


def is_idle(entry: OriginalValue, files: KnobWriter) -> bool:
    """Return whether the entry's cgroup is idle now."""
    try:
        return files.read(entry.cgroup, entry.cgroup_id, Knob.IDLE) == "1"
    except (Unavailable, Vanished):
        return False


def _write_original(entry: OriginalValue, files: KnobWriter) -> bool:
    """Write the original; return whether a substitute was written instead. The kernel refuses an empty list for a
    cgroup with tasks (kernel/cgroup/cpuset.c, validate_change()). The substitute is the parent's list, which an
    empty one means on version 2."""
    try:
        files.write_raw(entry.cgroup, entry.cgroup_id, entry.knob, entry.raw.texts)
    except KernelRefused as error:
        allowed = files.allowed_above(entry.cgroup, entry.knob) if entry.knob in LIST_KNOBS else None
        if error.code != errno.ENOSPC or allowed is None or "".join(entry.raw.texts.values()).strip():
            raise
        files.write(entry.cgroup, entry.cgroup_id, entry.knob, format_cpu_list(allowed))
        return True
    return False


def _read_current(entry: OriginalValue, files: KnobWriter) -> RawValue:
    return files.read_raw(entry.cgroup, entry.cgroup_id, entry.knob, entry.raw.directory_id)


def _widen(entry: OriginalValue, files: KnobWriter) -> None:
    # Refusals are reported when the entry itself is tried again.
    try:
        present = parse_cpu_list(files.decode(entry.cgroup, entry.knob, _read_current(entry, files)))
        original = parse_cpu_list(files.decode(entry.cgroup, entry.knob, entry.raw))
        files.write(entry.cgroup, entry.cgroup_id, entry.knob, format_cpu_list((*present, *original)))
    except (Unavailable, Vanished):
        return


def _display_value(entry: OriginalValue, files: KnobWriter, raw: RawValue) -> str:
    # Canonical notation if the text has one; an original is restored even if it has none.
    try:
        return files.decode(entry.cgroup, entry.knob, raw)
    except Unavailable:
        return " ".join(raw.texts.values()).strip()
