"""The `dioptase reset` command: restores every cgroup and node knob to its value before the agent's first write.
It needs only the journals in the state directory, no running agent and no configuration, and may be repeated.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from agent.qrm.actuator.oom_scores import FILE_NAME as OOM_ORIGINALS
from agent.qrm.actuator.oom_scores import OomScores, ProcessTable
from agent.qrm.actuator.originals import OriginalsJournal
from agent.qrm.actuator.resctrl_groups import ResctrlWriter
from agent.qrm.actuator.sched_attr import SchedulerCalls
from agent.qrm.actuator.state_dir import default_state_dir, demo_state_dir, open_originals, read_boot_id
from agent.qrm.actuator.sysfs_writer import SysfsWriter
from agent.qrm.actuator.thread_slices import FILE_NAME as SLICE_ORIGINALS
from agent.qrm.actuator.thread_slices import ThreadSlices
from agent.qrm.actuator.writer import KnobWriter
from agent.sensors.cgroup.hierarchy import detect_hierarchy
from api.decision import Outcome, OutcomeStatus
from api.interfaces import Unavailable

PROC, SYS = Path("/proc"), Path("/sys")
RESET_STATUS_TEXT = {
    OutcomeStatus.APPLIED: "restored",
    OutcomeStatus.UNCHANGED: "already original",
    OutcomeStatus.VANISHED: "cgroup was removed",
    OutcomeStatus.REFUSED: "refused",
    OutcomeStatus.MISMATCH: "differs",
}


@click.command()
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="The agent's state directory. Default: /var/lib/dioptase for root, else ~/.local/state/dioptase; and the demo's.",
)
@click.pass_context
def reset(context: click.Context, state_dir: Path | None) -> None:
    """Restore every cgroup knob that the agent changed, also after the agent or the demo was killed.

    Exits with 0 when nothing is left to restore, with 1 otherwise.
    """
    out, err = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    if state_dir is not None:
        context.exit(0 if _restore_directory(state_dir, out, err) else 1)
    own = default_state_dir()
    demos = demo_state_dir(own)
    done = _restore_directory(own, out, err)
    if os.path.lexists(demos):
        out.print(f"Demo, state directory {demos}:", markup=False)
        # A directory in use must not prevent that the other one is restored.
        done = _restore_directory(demos, out, err) and done
    context.exit(0 if done else 1)


def _restore_directory(directory: Path, out: Console, err: Console) -> bool:
    """Restore all knobs of a state directory; return whether nothing is left to restore."""
    try:
        if not directory.exists():
            out.print(
                f"Nothing to restore: {directory} does not exist. If the agent had another --state-dir, name it.",
                markup=False,
            )
            return True
        originals = open_originals(directory, read_boot_id())
    except (Unavailable, OSError) as error:
        _print_error(err, error)
        return False
    try:
        done = _restore_cgroup_knobs(originals, out, err)
        return _restore_node_knobs(directory, out, err) and done
    finally:
        originals.close()


def _restore_node_knobs(directory: Path, out: Console, err: Console) -> bool:
    """Restore disk settings, OOM scores, slices of threads and resctrl groups; return whether nothing is left to restore."""
    restored = ResctrlWriter().restore()
    try:
        files = SysfsWriter(SYS, directory, read_boot_id())
        if (directory / OOM_ORIGINALS).exists():
            restored += OomScores(ProcessTable(PROC, detect_hierarchy().primary), directory, read_boot_id()).restore()
        if (directory / SLICE_ORIGINALS).exists():
            restored += ThreadSlices(detect_hierarchy(), SchedulerCalls(), directory, read_boot_id()).restore()
    except Unavailable as error:
        _print_error(err, error)
        return False
    try:
        restored += files.restore()
        for outcome in restored:
            decision = outcome.decision
            out.print(f"{decision.cgroup} {decision.knob.value}: {RESET_STATUS_TEXT[outcome.status]}", markup=False)
    except Unavailable as error:
        _print_error(err, error)
        return False
    failures = [outcome.error for outcome in restored if outcome.error]
    for text in failures:
        err.print(text, markup=False)
    return not failures


def _restore_cgroup_knobs(originals: OriginalsJournal, out: Console, err: Console) -> bool:
    """Restore the cgroup knobs; return whether nothing is left to restore."""
    outcomes: Sequence[Outcome] = ()
    if originals.entries():
        try:
            files = KnobWriter(detect_hierarchy())
        except Unavailable as error:
            _print_error(err, error)
            return False
        outcomes = originals.restore(files)
        files.close()
        out.print(_outcome_table(outcomes))
    failures = [f"{o.decision.cgroup} {o.decision.knob.value}: {o.error}" for o in outcomes if o.error]
    for text in (*originals.messages, *failures):
        err.print(text, markup=False)
    left, damaged = len(originals.entries()), originals.damaged()
    if left:
        out.print(f"{left} knobs still differ from their originals or are still in the journal; run reset again.")
    for path in damaged:
        err.print(f"{path} holds originals that could not be read: check it, then delete it.", markup=False)
    if not left and not damaged:
        out.print("Nothing is left to restore.")
    return not left and not damaged


def _outcome_table(outcomes: Sequence[Outcome]) -> Table:
    table = Table("cgroup", "knob", "current", "original", "result", box=None, pad_edge=False)
    for outcome in outcomes:
        decision = outcome.decision
        current = "-" if outcome.before is None else outcome.before or "(empty)"
        table.add_row(
            decision.cgroup,
            decision.knob.value,
            current,
            decision.value or "(empty)",
            RESET_STATUS_TEXT[outcome.status],
        )
    return table


def _print_error(err: Console, error: Unavailable | OSError) -> None:
    text = f"{error.reason}: {error.remedy}" if isinstance(error, Unavailable) else str(error)
    err.print(text, markup=False)
