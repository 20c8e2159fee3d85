"""Soft eviction notices: a file in the pod's own folder, whatever the pod has put there."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from agent.eviction.soft_eviction_notifier import SoftEvictionNotifier
from agent.eviction.victims import SOFT_NOTIFY_ANNOTATION
from api.eviction import EvictionEventReason, EvictionVictim
from api.knobs import Reason
from tests.agent.eviction.builders import S, pod

ASKS = pod("batch", annotations={SOFT_NOTIFY_ANNOTATION: "true"})
OTHER = pod("other")
VICTIM = EvictionVictim(
    pod="default/batch", uid=ASKS.uid, plugin="p", scope="s", forced=False, grace_s=None, notify=True,
    reason=Reason(rule="r", text="3 > 2"),
)  # fmt: skip
FOLDER = "batch@@__@@default"


def notifier(root: Path | None) -> SoftEvictionNotifier:
    return SoftEvictionNotifier(root, lambda: 1_767_225_600.0)


def test_a_notice_is_a_file_and_an_event_in_ten_minutes(tmp_path: Path) -> None:
    it = notifier(tmp_path / "katalyst")
    it.run_cycle([], [ASKS, OTHER], 0)
    assert [path.name for path in (tmp_path / "katalyst").iterdir()] == [FOLDER]
    it.run_cycle([VICTIM], [ASKS], 5 * S)
    file = tmp_path / "katalyst" / FOLDER / "soft_eviction_notify"
    assert file.read_text() == "2026-01-01T00:00:00Z p: 3 > 2\n"
    (event,) = it.outcomes()
    assert (event.pod, event.reason, event.action) == ("default/batch", EvictionEventReason.NOTIFIED, "Notifying")
    assert (event.message, event.warning) == ("notify pod successfully; reason: 3 > 2", False)
    it.run_cycle([VICTIM], [ASKS], 604 * S)
    assert it.outcomes() == []
    it.run_cycle([VICTIM], [ASKS], 605 * S)
    assert len(it.outcomes()) == 1


def test_folders_go_with_their_pods(tmp_path: Path) -> None:
    it = notifier(tmp_path)
    (tmp_path / "mine").mkdir()
    it.run_cycle([VICTIM], [ASKS], 0)
    it.run_cycle([], [OTHER], 599 * S)
    assert (tmp_path / FOLDER).is_dir()
    it.run_cycle([], [], 600 * S)
    assert (tmp_path / FOLDER).is_dir(), "an empty pod list removes no folder"
    it.run_cycle([], [OTHER], 600 * S)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("trap", ["symlink", "fifo", "directory", "folder"])
def test_what_a_pod_puts_there_is_not_written_through(tmp_path: Path, trap: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    root = tmp_path / "root"
    it = notifier(root)
    it.run_cycle([], [ASKS], 0)
    file = root / FOLDER / "soft_eviction_notify"
    if trap == "symlink":
        file.symlink_to(precious)
    elif trap == "fifo":
        os.mkfifo(file)
    elif trap == "directory":
        file.mkdir()
    else:
        (root / FOLDER).rmdir()
        (root / FOLDER).symlink_to(tmp_path)
    it.run_cycle([VICTIM], [ASKS], S)
    (event,) = it.outcomes()
    assert (event.reason, event.warning) == (EvictionEventReason.NOT_NOTIFIED, True)
    assert event.message.startswith(f"notify failed: {file}")
    assert precious.read_text() == "as it was"
    assert not (tmp_path / "soft_eviction_notify").exists()


@pytest.mark.parametrize("fields", [{"notify": False}, {"dry_run": True}])
def test_evicted_pods_and_dry_runs_receive_no_notice(tmp_path: Path, fields: dict[str, bool]) -> None:
    it = notifier(tmp_path)
    it.run_cycle([msgspec.structs.replace(VICTIM, **fields)], [ASKS], 0)  # type: ignore[arg-type]
    assert it.outcomes() == []
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_without_a_root_events_tell() -> None:
    it = notifier(None)
    it.run_cycle([VICTIM], [ASKS], 0)
    assert [event.reason for event in it.outcomes()] == [EvictionEventReason.NOTIFIED]
