"""Where `dioptase agent` takes its pods from: a file or the kubelet, not both, and without either it only watches."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import agent.__main__
import cli.agent
from agent.__main__ import AgentOptions
from agent.handover import OwnDaemonSet
from api.decision import ActMode
from cli.main import main as dioptase
from tests.builders.waiting import until


def started(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[AgentOptions | None, str]:
    """What the agent would be run with, and what is said."""
    run: list[AgentOptions] = []

    def main(options: AgentOptions) -> int:
        run.append(options)
        return 0

    monkeypatch.setattr(cli.agent, "main", main)
    result = CliRunner().invoke(cli.agent.agent, words)
    return (run[0] if run else None), result.output


@pytest.mark.parametrize(
    ("words", "kubelet", "act"),
    [
        ((), False, ActMode.OFF),
        (("--kubelet",), True, ActMode.DRY_RUN),
        (("--kubelet", "--act", "on"), True, ActMode.ON),
        (("--kubelet", "--act", "off"), True, ActMode.OFF),
        (("--pods", "pods.yaml"), False, ActMode.DRY_RUN),
    ],
)
def test_pods_and_what_may_be_done_with_them(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], kubelet: bool, act: ActMode
) -> None:
    options, text = started(monkeypatch, *words)
    assert options is not None, text
    assert (options.kubelet, options.act) == (kubelet, act)
    assert options.pods == (Path("pods.yaml") if "--pods" in words else None)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), None),
        (("--handover", "d/agent", "--state-dir", "/s"), OwnDaemonSet(key="d/agent", node_state_dir="/s")),
        (
            ("--handover", "d/agent", "--state-dir", "/s", "--handover-state-dir", "/on/the/node"),
            OwnDaemonSet(key="d/agent", node_state_dir="/on/the/node"),
        ),
    ],
)
def test_values_are_handed_over_only_on_request(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expected: OwnDaemonSet | None
) -> None:
    options, text = started(monkeypatch, "--node", "n1", *words)
    assert options is not None, text
    assert options.daemon_set == expected


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--kubelet", "--pods", "pods.yaml"), "--kubelet and --pods exclude each other: choose one source of pods"),
        (("--act", "on"), "--act on needs --pods or --kubelet"),
        (("--handover", "a/b"), "--handover needs --node: the DaemonSet has to select this node"),
        (("--node", "n", "--handover", "agent"), "'agent' is not NAMESPACE/NAME, for example dioptase/dioptase-agent"),
        (("--node", "n", "--handover", "a/b/c"), "'a/b/c' is not NAMESPACE/NAME"),
        (("--handover-state-dir", "/x"), "--handover-state-dir needs --handover, which names the DaemonSet"),
    ],
)
def test_contradictions_are_refused(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], text: str) -> None:
    options, output = started(monkeypatch, *words)
    assert options is None
    assert text in output


def test_a_signal_during_the_import_waits_for_the_agent(tmp_path: Path) -> None:
    """Killed there, an agent that takes over left the values of its predecessor changed."""
    program = Path(sys.executable).with_name("dioptase")
    options = ("--pods", str(tmp_path / "none"), "--state-dir", str(tmp_path / "state"))
    with subprocess.Popen([program, "agent", *options], stderr=subprocess.PIPE) as process:

        def blocked() -> bool:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            mask = next(line for line in lines if line.startswith("SigBlk"))
            return bool(int(mask.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

        until(blocked, "SIGTERM waits")
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 0


def test_a_command_leaves_no_signal_blocked() -> None:
    CliRunner().invoke(dioptase, ["agent", "--no-such-option"])
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("act", [ActMode.ON, ActMode.DRY_RUN])
@pytest.mark.parametrize("own", [None, OwnDaemonSet(key="a/b", node_state_dir="/s")])
def test_an_agent_that_is_stopped_while_it_starts_ends_as_others_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, act: ActMode, own: OwnDaemonSet | None
) -> None:
    ended: list[tuple[Path, bool]] = []

    def stopped(_options: AgentOptions) -> int:
        sys.exit(0)

    monkeypatch.setattr(agent.__main__, "_run_agent", stopped)
    monkeypatch.setattr(
        agent.__main__, "end_before_first_cycle", lambda state, *, is_followed: ended.append((state, is_followed))
    )
    options = AgentOptions(
        pods=None, act=act, hosts=(), port=0, state_dir=tmp_path, record_max_mib=16, daemon_set=own
    )  # fmt: skip
    with pytest.raises(SystemExit):
        agent.__main__.main(options)
    assert ended == ([(tmp_path, own is not None)] if act is ActMode.ON else [])
