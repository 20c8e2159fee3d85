"""Where `dioptase agent` takes its pods from: a file or the kubelet, not both, and without either it only watches."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import cli.agent
from agent.__main__ import AgentOptions
from agent.handover import OwnDaemonSet
from api.decision import ActMode


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
