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

OPTED_IN = pod("batch", annotations={SOFT_NOTIFY_ANNOTATION: "true"})
OTHER = pod("other")
VICTIM = EvictionVictim(
    pod="default/batch", uid=OPTED_IN.uid, plugin="p", scope="s", forced=False, grace_s=None, notify=True,
    reason=Reason(rule="r", text="3 > 2"),
)  # fmt: skip
FOLDER = "batch@@__@@default"


def notifier(root: Path | None) -> SoftEvictionNotifier:
    return SoftEvictionNotifier(root, lambda: 1_767_225_600.0)


def test_a_notice_is_a_file_and_an_event_in_ten_minutes(tmp_path: Path) -> None:
    soft_notifier = notifier(tmp_path / "katalyst")
    soft_notifier.run_cycle([], [OPTED_IN, OTHER], 0)
    assert [path.name for path in (tmp_path / "katalyst").iterdir()] == [FOLDER]
    soft_notifier.run_cycle([VICTIM], [OPTED_IN], 5 * S)
    file = tmp_path / "katalyst" / FOLDER / "soft_eviction_notify"
    assert file.read_text() == "2026-01-01T00:00:00Z p: 3 > 2\n"
    (event,) = soft_notifier.outcomes()
    assert (event.pod, event.reason, event.action) == ("default/batch", EvictionEventReason.NOTIFIED, "Notifying")
    assert (event.message, event.warning) == ("notify pod successfully; reason: 3 > 2", False)
    soft_notifier.run_cycle([VICTIM], [OPTED_IN], 604 * S)
    assert soft_notifier.outcomes() == []
    soft_notifier.run_cycle([VICTIM], [OPTED_IN], 605 * S)
    assert len(soft_notifier.outcomes()) == 1


def test_folders_are_removed_with_their_pods(tmp_path: Path) -> None:
    soft_notifier = notifier(tmp_path)
    (tmp_path / "mine").mkdir()
    soft_notifier.run_cycle([VICTIM], [OPTED_IN], 0)
    soft_notifier.run_cycle([], [OTHER], 599 * S)
    assert (tmp_path / FOLDER).is_dir()
    soft_notifier.run_cycle([], [], 600 * S)
    assert (tmp_path / FOLDER).is_dir(), "an empty pod list removes no folder"
    soft_notifier.run_cycle([], [OTHER], 600 * S)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("trap", ["symlink", "fifo", "directory", "folder"])
def test_files_that_a_pod_created_are_not_written_through(tmp_path: Path, trap: str) -> None:
    other_file = tmp_path / "other_file"
    other_file.write_text("as soft_notifier was")
    root = tmp_path / "root"
    soft_notifier = notifier(root)
    soft_notifier.run_cycle([], [OPTED_IN], 0)
    file = root / FOLDER / "soft_eviction_notify"
    if trap == "symlink":
        file.symlink_to(other_file)
    elif trap == "fifo":
        os.mkfifo(file)
    elif trap == "directory":
        file.mkdir()
    else:
        (root / FOLDER).rmdir()
        (root / FOLDER).symlink_to(tmp_path)
    soft_notifier.run_cycle([VICTIM], [OPTED_IN], S)
    (event,) = soft_notifier.outcomes()
    assert (event.reason, event.warning) == (EvictionEventReason.NOT_NOTIFIED, True)
    assert event.message.startswith(f"notify failed: {file}")
    assert other_file.read_text() == "as soft_notifier was"
    assert not (tmp_path / "soft_eviction_notify").exists()


@pytest.mark.parametrize("fields", [{"notify": False}, {"dry_run": True}])
def test_evicted_pods_and_dry_runs_receive_no_notice(tmp_path: Path, fields: dict[str, bool]) -> None:
    soft_notifier = notifier(tmp_path)
    soft_notifier.run_cycle([msgspec.structs.replace(VICTIM, **fields)], [OPTED_IN], 0)  # type: ignore[arg-type]
    assert soft_notifier.outcomes() == []
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_without_a_root_there_are_only_events() -> None:
    soft_notifier = notifier(None)
    soft_notifier.run_cycle([VICTIM], [OPTED_IN], 0)
    assert [event.reason for event in soft_notifier.outcomes()] == [EvictionEventReason.NOTIFIED]
