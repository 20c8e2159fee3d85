"""Tasks of a cgroup and of all below it, however deep a pod nests its own cgroups."""

from __future__ import annotations

from pathlib import Path

from agent.qrm.actuator.cgroup_tasks import list_task_ids

DEPTH = 1_100
"""More levels than Python's limit of recursion, 1,000."""


def test_tasks_of_nested_cgroups_are_listed(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    for directory, ids in (("", "1\n2\n"), ("a", "3\n"), ("a/b", "5\n8\n")):
        (tmp_path / directory / "cgroup.procs").write_text(ids)
    assert sorted(list_task_ids(str(tmp_path), "cgroup.procs")) == [1, 2, 3, 5, 8]
    assert list_task_ids(str(tmp_path / "removed"), "cgroup.procs") == []


def test_1100_nested_cgroups_are_listed(tmp_path: Path) -> None:
    paths = [f"{tmp_path}/top{'/d' * level}" for level in range(DEPTH)]
    try:
        for number, path in enumerate(paths):
            Path(path).mkdir()
            (Path(path) / "cgroup.threads").write_text(f"{number + 1}\n")
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        assert sorted(list_task_ids(paths[0], "cgroup.threads")) == list(range(1, DEPTH + 1))
        assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    finally:
        # pytest removes a directory recursively.
        for path in reversed(paths):
            (Path(path) / "cgroup.threads").unlink(missing_ok=True)
            Path(path).rmdir()
