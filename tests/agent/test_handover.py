"""Changed values stay in force from an agent that ends to the next one, and are restored if none starts before the deadline."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent import __main__ as agent_main
from agent import handover
from agent.__main__ import AgentOptions
from agent.handover import (
    DEADLINE_S,
    HandoverFile,
    end_before_first_cycle,
    end_handover,
    hand_over,
    restore_earlier_values,
    restore_expired_handover,
)
from agent.journal.log import CycleLog
from agent.qrm.actuator.boot_journal import BootJournal, JournalBody, json_codec
from agent.qrm.actuator.state_dir import open_originals
from api.decision import ActMode
from api.interfaces import Unavailable
from api.knobs import Knob
from tests.agent.qrm.actuator.trees import BOOT, Bench
from tests.agent.test_main import parts_of

LIMITED, UNLIMITED = "10000 100000", "max 100000"
UP_S = 1000.0
"""Seconds since the boot at the handover."""


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Bench]:
    """A batch cgroup of which an agent limited the CPU quota."""
    bench = Bench(tmp_path, "v2")
    bench.apply(("/batch", Knob.QUOTA, "10000"))
    yield bench
    bench.close()


def quota(bench: Bench) -> str:
    return bench.tree.file("/batch", "cpu.max").read_text().strip()


def end(bench: Bench, state: Path, obstacle: str = "") -> bool:
    """End the agent; return whether it handed its values over."""

    async def find_obstacle() -> str:
        return obstacle

    return asyncio.run(hand_over(find_obstacle, parts_of(bench, ActMode.ON, state), None, CycleLog()))


def restart(bench: Bench, state: Path) -> None:
    bench.originals.close()
    bench.originals = open_originals(state, BOOT)


def proc_of(bench: Bench, tmp_path: Path) -> Path:
    """Return a /proc with this mount of cgroups and this boot."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "sys/kernel/random/boot_id").write_text(f"{BOOT}\n")
    (proc / "self/mountinfo").write_text(f"30 23 0:26 / {bench.tree.hierarchy.v2} rw - cgroup2 cgroup2 rw\n")
    return proc


def test_the_successor_continues_with_the_values(
    limited: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "state"
    assert end(limited, state)
    assert quota(limited) == LIMITED
    restart(limited, state)
    with caplog.at_level(logging.INFO, "dioptase"):
        assert restore_earlier_values(ActMode.ON, parts_of(limited, ActMode.ON, state)) == (), "this is no failure"
    assert "The previous agent handed over 1 changed values. This agent continues with them" in caplog.text
    assert quota(limited) == LIMITED
    assert (state / "handover.json").exists(), "a start that still fails restores the values after the deadline"
    end_handover(parts_of(limited, ActMode.ON, state))
    assert not (state / "handover.json").exists(), "its deadline must not end this agent's values"
    original = limited.originals.find("/batch", limited.tree.id("/batch"), Knob.QUOTA)
    assert original is not None
    assert original.raw.texts["cpu.max"].strip() == UNLIMITED


def test_without_a_successor_nothing_is_handed_over(
    limited: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "dioptase"):
        assert not end(limited, tmp_path / "state", "DaemonSet d/agent: it is being deleted")
    assert "all values are restored. DaemonSet d/agent: it is being deleted" in caplog.text
    assert not (tmp_path / "state/handover.json").exists()


def test_a_handover_without_a_recorded_deadline_is_none(limited: Bench, tmp_path: Path) -> None:
    (tmp_path / "state/handover.json.tmp").mkdir()
    assert not end(limited, tmp_path / "state")


def test_a_defect_of_the_search_for_a_successor_keeps_no_value(limited: Bench, tmp_path: Path) -> None:
    async def fail() -> str:
        raise KeyError("hostPath")

    state = tmp_path / "state"
    assert not asyncio.run(hand_over(fail, parts_of(limited, ActMode.ON, state), None, CycleLog()))
    assert not (state / "handover.json").exists()


def test_a_disk_that_hangs_at_the_handover_blocks_neither_health_nor_the_restoring(
    limited: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(handover, "replace_file", lambda *_: released.wait(30))
    monkeypatch.setattr(handover, "RECORD_TIMEOUT_S", 0.2)

    async def end_with_health() -> tuple[bool, int]:
        answers = 0

        async def answer() -> None:
            nonlocal answers
            while True:
                await asyncio.sleep(0.01)
                answers += 1

        health = asyncio.create_task(answer())

        async def find_obstacle() -> str:
            return ""

        parts = parts_of(limited, ActMode.ON, tmp_path / "state")
        handed_over = await hand_over(find_obstacle, parts, None, CycleLog())
        health.cancel()
        return handed_over, answers

    handed_over, answers = asyncio.run(end_with_health())
    released.set()
    assert not handed_over
    assert answers > 1


@pytest.mark.parametrize(
    ("requested", "effective"),
    [(ActMode.OFF, ActMode.OFF), (ActMode.DRY_RUN, ActMode.DRY_RUN), (ActMode.ON, ActMode.DRY_RUN)],
)
def test_a_successor_that_does_not_act_restores(
    limited: Bench, tmp_path: Path, requested: ActMode, effective: ActMode
) -> None:
    state = tmp_path / "state"
    assert end(limited, state)
    restart(limited, state)
    restore_earlier_values(requested, parts_of(limited, effective, state))
    assert quota(limited) == UNLIMITED
    assert not (state / "handover.json").exists()


def test_values_of_a_removed_cgroup_are_dropped(limited: Bench, tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert end(limited, state)
    limited.tree.remove("/batch")
    limited.tree.make("/batch", {"cpu.max": "50000 100000"})
    restart(limited, state)
    restore_earlier_values(ActMode.OFF, parts_of(limited, ActMode.OFF, state))
    assert quota(limited) == "50000 100000", "another pod's cgroup of the same name keeps its own limit"
    assert not limited.originals.entries()


@pytest.mark.parametrize(
    ("after_s", "expected"), [(DEADLINE_S - 1, LIMITED), (DEADLINE_S + 1, UNLIMITED), (2 * DEADLINE_S, UNLIMITED)]
)
def test_a_start_that_fails_restores_after_the_deadline(
    limited: Bench, tmp_path: Path, after_s: float, expected: str
) -> None:
    state = tmp_path / "state"
    HandoverFile(state, BOOT, lambda: UP_S).write()
    limited.originals.close()
    restore_expired_handover(state, proc_of(limited, tmp_path), lambda: UP_S + after_s)
    assert quota(limited) == expected
    assert (state / "handover.json").exists() == (expected == LIMITED)


@pytest.mark.parametrize("error", [Unavailable("a port is in use", "choose another"), RuntimeError("a defect")])
def test_whatever_ends_a_start_the_deadline_is_enforced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    restored: list[Path] = []

    def fail(_options: object) -> int:
        raise error

    monkeypatch.setattr(agent_main, "_run_agent", fail)
    monkeypatch.setattr(agent_main, "restore_expired_handover", restored.append)
    options = AgentOptions(
        pods=None, act=ActMode.ON, hosts=("127.0.0.1",), port=0, state_dir=tmp_path, record_max_mib=1
    )
    with pytest.raises(type(error)):
        agent_main.main(options)
    assert restored == [tmp_path]


@pytest.mark.parametrize("is_followed", [False, True])
def test_an_agent_that_is_stopped_while_it_starts_leaves_nothing_behind(
    limited: Bench, tmp_path: Path, is_followed: bool
) -> None:
    """It had taken the handover and ended without a cycle, so that the values stayed and no later start restored them."""
    state = tmp_path / "state"
    assert end(limited, state)
    restart(limited, state)
    end_handover(parts_of(limited, ActMode.ON, state))
    assert not (state / "handover.json").exists()
    limited.originals.close()
    proc = proc_of(limited, tmp_path)
    end_before_first_cycle(state, is_followed=is_followed, proc=proc, clock=lambda: UP_S)
    assert quota(limited) == (LIMITED if is_followed else UNLIMITED)
    assert (state / "handover.json").exists() is is_followed
    if is_followed:
        end_before_first_cycle(state, is_followed=True, proc=proc, clock=lambda: UP_S + 200)
        restore_expired_handover(state, proc, lambda: UP_S + DEADLINE_S + 1)
        assert quota(limited) == UNLIMITED, "a second stop does not extend the deadline"


def test_a_start_that_fails_restores_nothing_of_a_running_agent(limited: Bench, tmp_path: Path) -> None:
    """That agent holds the lock of the state directory."""
    HandoverFile(tmp_path / "state", BOOT, lambda: UP_S).write()
    restore_expired_handover(tmp_path / "state", proc_of(limited, tmp_path), lambda: UP_S + 2 * DEADLINE_S)
    assert quota(limited) == LIMITED


def test_a_start_that_fails_restores_nothing_that_was_not_handed_over(limited: Bench, tmp_path: Path) -> None:
    """As after kill -9: `dioptase reset` or the next agent restores it."""
    limited.originals.close()
    restore_expired_handover(tmp_path / "state", proc_of(limited, tmp_path), lambda: UP_S)
    assert quota(limited) == LIMITED


def test_a_damaged_record_counts_as_expired(limited: Bench, tmp_path: Path) -> None:
    state = tmp_path / "state"
    HandoverFile(state, BOOT, lambda: UP_S).write()
    (state / "handover.json").write_bytes((state / "handover.json").read_bytes().replace(b"1300", b"9300"))
    limited.originals.close()
    restore_expired_handover(state, proc_of(limited, tmp_path), lambda: UP_S)
    assert quota(limited) == UNLIMITED


def test_a_handover_of_another_boot_has_no_deadline(tmp_path: Path) -> None:
    HandoverFile(tmp_path, "before", lambda: UP_S).write()
    assert HandoverFile(tmp_path, "before", lambda: UP_S + 1).remaining_s() == DEADLINE_S - 1
    assert HandoverFile(tmp_path, BOOT, lambda: 10.0).remaining_s() is None


def open_plain_journal(state: Path, boot_id: str) -> object:
    """Open the journal of another control, which has no checksum."""
    name = next(path.name for path in state.iterdir())
    return BootJournal(state / name, boot_id, json_codec(JournalBody[str], str))


@pytest.mark.parametrize("name", ["originals.json", "slice-originals.json", "node-originals.json"])
def test_the_journal_of_a_newer_release_is_refused_and_stays(tmp_path: Path, name: str) -> None:
    """After a rollback the journal must not be set aside as damaged: the agent's own values would become the originals."""
    content = b'{"version":2,"boot_id":"boot","entries":[{"of":"the future"}]}\n'
    (tmp_path / name).write_bytes(content)
    opened = open_originals if name == "originals.json" else open_plain_journal
    with pytest.raises(Unavailable, match="newer release: it has layout version 2, this release reads 1") as error:
        opened(tmp_path, BOOT)
    assert "install that release again, or run its `dioptase reset`" in error.value.remedy
    assert (tmp_path / name).read_bytes() == content
    assert [path.name for path in tmp_path.glob("*damaged*")] == []
