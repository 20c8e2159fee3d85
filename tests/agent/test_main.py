"""What `dioptase agent` says of what it cannot do on this machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent import __main__ as agent
from agent.config.config import AgentConfig, SocketsConfig
from agent.config.qrm import CpuPlacementConfig
from agent.handover import restore_earlier_values
from agent.qrm.actuator.state_dir import open_originals
from agent.qrm.actuator.writer import KnobWriter
from agent.sensors.cgroup.hierarchy import Hierarchy
from agent.sensors.node.machine import read_topology
from agent.sensors.node.node_reader import NodeReader
from api.cpu import Topology
from api.decision import ActMode
from api.interfaces import Unavailable
from api.knobs import Knob
from api.pod import Pod
from api.snapshot import NodeSample
from tests.agent.qrm.actuator.trees import BOOT, Bench


class Silent:
    """A PodSource without an answer yet."""

    def read(self) -> tuple[Pod, ...]:
        raise Unavailable("the kubelet was not polled yet", "wait a second")


def test_the_agent_starts_before_pods_are_listed(tmp_path: Path) -> None:
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


def parts_of(bench: Bench, act: ActMode, state: Path) -> Any:
    """Return those parts of an agent that restoring needs."""
    return SimpleNamespace(
        originals=bench.originals,
        files=bench.files,
        act=act,
        config=AgentConfig(),
        hierarchy=bench.tree.hierarchy,
        state=(state, BOOT),
    )


@pytest.mark.parametrize(
    ("requested", "effective", "quota", "warning"),
    [
        (
            ActMode.OFF,
            ActMode.OFF,
            "max 100000",
            "Restored the values that an earlier agent left changed, because this agent does not act.",
        ),
        (
            ActMode.DRY_RUN,
            ActMode.DRY_RUN,
            "max 100000",
            "Restored the values that an earlier agent left changed, because this agent does not act.",
        ),
        (
            ActMode.ON,
            ActMode.ON,
            "10000 100000",
            "An earlier agent left 1 values changed. This agent continues with them and restores them when it ends.",
        ),
        (
            ActMode.ON,
            ActMode.DRY_RUN,
            "10000 100000",
            (
                "An earlier agent left 1 values changed. This agent runs as with --act dry-run and does not restore "
                "them: stop it and run `dioptase reset`."
            ),
        ),
    ],
)
def test_values_of_a_killed_agent_do_not_outlast_the_start_of_one_that_does_not_act(
    tmp_path: Path, requested: ActMode, effective: ActMode, quota: str, warning: str
) -> None:
    bench = Bench(tmp_path, "v2")
    bench.apply(("/batch", Knob.QUOTA, "10000"))
    bench.originals.close()
    bench.originals = open_originals(tmp_path / "state", BOOT)
    parts = parts_of(bench, effective, tmp_path / "state")
    assert restore_earlier_values(requested, parts) == (warning,)
    assert bench.tree.file("/batch", "cpu.max").read_text().strip() == quota
    if requested is not ActMode.ON:
        assert restore_earlier_values(requested, parts) == (), "nothing is left"
    bench.close()


@pytest.mark.parametrize("requested", list(ActMode))
def test_without_the_lock_of_the_state_directory_nothing_is_restored(tmp_path: Path, requested: ActMode) -> None:
    bench = Bench(tmp_path, "v2")
    bench.apply(("/batch", Knob.QUOTA, "10000"))
    parts = parts_of(bench, requested, tmp_path / "state")
    parts.originals = None
    assert restore_earlier_values(requested, parts) == ()
    assert bench.tree.file("/batch", "cpu.max").read_text().strip() == "10000 100000"
    bench.close()


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


def test_the_machine_is_read_once_for_all_checks_of_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic configuration checks several times per change, on the event loop."""
    reads: list[str] = []

    class CountingReader(NodeReader):
        def read(self, now_ns: int | None = None, wall_time_ns: int | None = None) -> NodeSample:
            reads.append("node")
            return super().read(now_ns, wall_time_ns)

    def count_topology(sys: Path) -> Topology:
        reads.append("topology")
        return read_topology(sys)

    monkeypatch.setattr(agent, "limit_malloc_arenas", lambda: None)
    monkeypatch.setattr(agent.signal, "signal", lambda *_: None)
    monkeypatch.setattr(agent, "NodeReader", CountingReader)
    monkeypatch.setattr(agent, "read_topology", count_topology)
    checked: list[agent.NodeCheck] = []

    async def keep_check(*arguments: Any) -> int:
        checked.append(arguments[-1])
        return 0

    monkeypatch.setattr(agent, "_run", keep_check)
    options = agent.AgentOptions(
        node="n1", pods=None, act=ActMode.OFF, hosts=("",), port=0, state_dir=Path("/none"), record_max_mib=1
    )
    assert agent.main(options) == 0
    for _ in range(3):
        assert checked[0](AgentConfig()) == ""
    assert "is not online on this node" in checked[0](AgentConfig(placing=CpuPlacementConfig(reserved_cpu_list="8000")))
    assert sorted(reads) == ["node", "topology"]
