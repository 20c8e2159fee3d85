"""What `dioptase agent` says of what it cannot do on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent import __main__ as agent
from agent.config.config import AgentConfig, SocketsConfig
from agent.qrm.actuator.writer import KnobWriter
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.decision import ActMode
from api.interfaces import Unavailable
from api.pod import Pod


class Silent:
    """A PodSource that was not answered yet."""

    def read(self) -> tuple[Pod, ...]:
        raise Unavailable("the kubelet was not asked yet", "wait a second")


def test_pods_that_nobody_lists_yet_do_not_keep_the_agent_from_starting(tmp_path: Path) -> None:
    files = KnobWriter(Hierarchy(v1={}, v2=tmp_path))
    act, missing = agent._effective_act(ActMode.ON, files, None, Silent(), AgentConfig())
    assert (act, missing) == (ActMode.DRY_RUN, ("Decisions run dry: original values cannot be journalled.",))
    serving = AgentConfig(sockets=SocketsConfig(serve=("advisor",)))
    act, (why,) = agent._effective_act(ActMode.ON, files, None, Silent(), serving)
    files.close()
    assert (act, why) == (
        ActMode.DRY_RUN,
        "Decisions run dry: sockets.serve has advisor, whose QRM plugin carries them out.",
    )


@pytest.mark.parametrize(
    ("watching", "begins"),
    [
        (
            False,
            "Run-queue waits come from schedstat, as sums without a distribution, and of listed pods only: ",
        ),
        (True, "There are no run-queue waits: without BPF they come from schedstat, of listed pods only: "),
    ],
)
def test_waits_without_bpf_are_said_to_be_of_pods_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, watching: bool, begins: str
) -> None:
    def refused(*, blame: bool) -> None:
        raise Unavailable("bpf() is refused", "run as root")

    monkeypatch.setattr(agent, "open_runqlat", refused)
    hierarchy = Hierarchy(v1={}, v2=tmp_path)
    source, banner = agent._open_latencies(hierarchy, blame=True, watching=watching)
    source.close()
    assert banner == (f"{begins}bpf() is refused: run as root.",)
