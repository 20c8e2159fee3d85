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

from agent.qrm.actuator.disk_settings import DiskSettings
from agent.qrm.actuator.oom_scores import FILE_NAME, OomScores, ProcessTable
from agent.qrm.actuator.originals import OriginalsJournal
from agent.qrm.actuator.resctrl_groups import ResctrlWriter
from agent.qrm.actuator.state_dir import default_state_dir, demo_state_dir, open_originals, read_boot_id
from agent.qrm.actuator.writer import KnobWriter
from agent.sensors.cgroup.hierarchy import detect_hierarchy
from api.decision import Outcome, OutcomeStatus
from api.interfaces import Unavailable

PROC, SYS = Path("/proc"), Path("/sys")
RESET_STATUS_TEXT = {
    OutcomeStatus.APPLIED: "put back",
    OutcomeStatus.UNCHANGED: "was in place",
    OutcomeStatus.VANISHED: "cgroup is gone",
    OutcomeStatus.REFUSED: "refused",
    OutcomeStatus.MISMATCH: "differs",
}


@click.command()
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the agent kept its journal. Default: /var/lib/dioptase for root, else ~/.local/state/dioptase; and the demo's.",
)
@click.pass_context
def reset(context: click.Context, state_dir: Path | None) -> None:
    """Put back every cgroup knob that the agent changed, also after it or the demo was killed.

    Exits with 0 when nothing is left to put back, with 1 otherwise.
    """
    out, err = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    if state_dir is not None:
        context.exit(0 if _restore_directory(state_dir, out, err) else 1)
    own = default_state_dir()
    demos = demo_state_dir(own)
    done = _restore_directory(own, out, err)
    if os.path.lexists(demos):
        out.print(f"Of the demo, in {demos}:", markup=False)
        # One in use does not keep the other from being put back.
        done = _restore_directory(demos, out, err) and done
    context.exit(0 if done else 1)


def _restore_directory(directory: Path, out: Console, err: Console) -> bool:
    """Whether nothing of that state directory is left to put back."""
    try:
        if not directory.exists():
            out.print(
                f"Nothing to put back: {directory} does not exist. An agent with another --state-dir keeps its own.",
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
    """Whether nothing is left of what was set for whole disks and for processes, and no group of resctrl."""
    restored = ResctrlWriter().restore()
    try:
        files = DiskSettings(SYS, directory, read_boot_id())
        if (directory / FILE_NAME).exists():
            restored += OomScores(ProcessTable(PROC, detect_hierarchy().primary), directory, read_boot_id()).restore()
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
    """Whether nothing is left to put back."""
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
        out.print(f"{left} knobs still differ from their originals or could not be forgotten; run reset again.")
    for path in damaged:
        err.print(f"{path} holds originals that could not be read: look at it, then delete it.", markup=False)
    if not left and not damaged:
        out.print("Nothing is left to put back.")
    return not left and not damaged


def _outcome_table(outcomes: Sequence[Outcome]) -> Table:
    table = Table("cgroup", "knob", "found", "original", "result", box=None, pad_edge=False)
    for outcome in outcomes:
        decision = outcome.decision
        found = "-" if outcome.before is None else outcome.before or "(empty)"
        table.add_row(
            decision.cgroup, decision.knob.value, found, decision.value or "(empty)", RESET_STATUS_TEXT[outcome.status]
        )
    return table


def _print_error(err: Console, error: Unavailable | OSError) -> None:
    text = f"{error.reason}: {error.remedy}" if isinstance(error, Unavailable) else str(error)
    err.print(text, markup=False)
