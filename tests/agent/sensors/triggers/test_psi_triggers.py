"""Pressure triggers of the node, which need no cgroup of one's own: windows, refusals and closing."""

from __future__ import annotations

import os
import select
import socket
from pathlib import Path

import pytest

from agent.sensors.triggers import psi_triggers
from agent.sensors.triggers.psi_triggers import PsiTrigger, PsiTriggerSet, open_psi_trigger
from api.interfaces import Unavailable

NODE = Path("/proc/pressure/cpu")


def require_psi() -> None:
    try:
        NODE.read_text()
    except OSError as error:
        pytest.skip(f"no PSI on this kernel ({error.strerror}): boot with psi=1")


def test_a_window_that_the_kernel_refuses_is_widened_with_the_stall_in_proportion() -> None:
    """Windows below two seconds need CAP_SYS_RESOURCE; the kernel decides which of the two is armed here."""
    require_psi()
    trigger = open_psi_trigger(NODE, 150_000, 1_000_000)
    assert (trigger.stall_us, trigger.window_us) in ((150_000, 1_000_000), (300_000, 2_000_000))
    assert trigger.fileno() >= 0
    poll = select.poll()
    poll.register(trigger.fileno(), select.POLLPRI)
    assert not any(event & select.POLLERR for _, event in poll.poll(0)), "it is armed"
    trigger.close()
    trigger.close()
    assert trigger.fileno() == -1


def test_a_window_that_no_kernel_takes_is_unavailable() -> None:
    require_psi()
    with pytest.raises(Unavailable, match="no pressure trigger on /proc/pressure/cpu: Invalid argument"):
        open_psi_trigger(NODE, 150_000, 60_000_000)


@pytest.mark.parametrize(("stall_us", "window_us"), [(0, 1_000_000), (-1, 1_000_000), (2_000_000, 1_000_000)])
def test_a_stall_that_does_not_fit_is_a_mistake(stall_us: int, window_us: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        open_psi_trigger(NODE, stall_us, window_us)


def test_a_file_that_is_not_there_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        open_psi_trigger(tmp_path / "cpu.pressure", 1, 2)
    assert "psi=1" in caught.value.remedy


@pytest.mark.parametrize(("with_live_trigger", "expected"), [(True, True), (False, False)])
def test_an_alarm_survives_a_trigger_of_a_removed_cgroup_in_the_same_poll(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, with_live_trigger: bool, expected: bool
) -> None:
    """Urgent data make a socket ready with EPOLLPRI, and a pipe without a reader reports EPOLLERR."""
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    live, _ = server.accept()
    reader, dead_fd = os.pipe()
    fds = {"/live": live.detach(), "/removed": dead_fd}

    def open_stand_in(path: Path, stall_us: int, window_us: int) -> PsiTrigger:
        return PsiTrigger(fds[f"/{path.parent.name}"], path, stall_us, window_us)

    monkeypatch.setattr(psi_triggers, "open_psi_trigger", open_stand_in)
    triggers = PsiTriggerSet(tmp_path, stall_us=1, window_us=2)
    triggers.watch({"/live": 1, "/removed": 2} if with_live_trigger else {"/removed": 2})
    os.close(reader)
    client.send(b"!", socket.MSG_OOB)
    try:
        assert select.select([triggers.fileno()], [], [], 5)[0]
        assert triggers.fired() is expected
    finally:
        triggers.close()
        client.close()
        server.close()
