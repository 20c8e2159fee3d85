"""What the kubelet says beside its pods: its policy, and who has what; and what holds while it says nothing."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.reporter.cnr_input_collector import POLLS_PER_FULL_REFRESH, CnrInputCollector, topology_policy
from agent.reporter.cnr_inputs import CnrInputs
from api.interfaces import Unavailable
from api.node_resources import NodeAllocatable, PodAllocation

POD = PodAllocation(namespace="shop", name="db", containers=())


def configz(policy: str, scope: str = "container") -> bytes:
    return json.dumps(
        {"kubeletconfig": {"topologyManagerPolicy": policy, "topologyManagerScope": scope, "x": 1}}
    ).encode()


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (configz("none"), "None"),
        (configz("none", "pod"), "None"),
        (b'{"kubeletconfig":{}}', "None"),
        (configz("single-numa-node"), "SingleNUMANodeContainerLevel"),
        (configz("single-numa-node", "pod"), "SingleNUMANodePodLevel"),
        (configz("restricted", ""), "RestrictedContainerLevel"),
        (configz("best-effort", "pod"), "BestEffortPodLevel"),
    ],
)
def test_katalysts_words(answer: bytes, word: str) -> None:
    assert topology_policy(answer) == word


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "not what it should be"),
        (b"{}", "kubeletconfig"),
        (b'{"kubeletconfig":{"topologyManagerPolicy":5}}', r"kubeletconfig\.topologyManagerPolicy"),
        (configz("unheard-of"), "policy 'unheard-of'"),
        (configz("restricted", "rack"), "scope 'rack'"),
    ],
)
def test_what_is_no_policy(answer: bytes, why: str) -> None:
    with pytest.raises(Unavailable, match=why):
        topology_policy(answer)


@given(st.binary(max_size=200))
def test_no_answer_does_more_than_be_refused(answer: bytes) -> None:
    with suppress(Unavailable):
        topology_policy(answer)


class Neighbour:
    """The kubelet and its socket at once: counts how often it was asked, and is gone where it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.gone: set[str] = set()

    def _said(self, what: str) -> None:
        self.asked.append(what)
        if what in self.gone:
            raise Unavailable(f"{what} is gone", "start it")

    async def ask(self) -> bytes:
        self._said("policy")
        return configz("restricted")

    async def node(self) -> NodeAllocatable | None:
        self._said("node")
        return NodeAllocatable(cpus=(1,))

    async def pods(self) -> tuple[PodAllocation, ...]:
        self._said("pods")
        return (POD,)


def around(tmp_path: Path, neighbour: Any) -> CnrInputCollector:
    return CnrInputCollector((tmp_path, tmp_path), CnrInputs(), neighbour, neighbour)


async def test_what_changes_with_a_restart_only_is_asked_rarely(tmp_path: Path) -> None:
    neighbour = Neighbour()
    one = around(tmp_path, neighbour)
    assert one.beside.policy is None, "nobody has said it yet"
    for _ in range(POLLS_PER_FULL_REFRESH + 1):
        await one.look()
    assert neighbour.asked.count("policy") == neighbour.asked.count("node") == 2
    assert neighbour.asked.count("pods") == POLLS_PER_FULL_REFRESH + 1
    assert (one.beside.policy, one.beside.node, one.beside.pods) == (
        "RestrictedContainerLevel",
        NodeAllocatable(cpus=(1,)),
        (POD,),
    )


async def test_what_was_said_last_stands_and_who_is_gone_is_named_and_asked_again(tmp_path: Path) -> None:
    neighbour = Neighbour()
    one = around(tmp_path, neighbour)
    neighbour.gone = {"policy"}
    await one.look()
    problem = one.problem()
    assert problem is not None
    assert (problem.reason, one.beside.policy, one.beside.pods) == ("policy is gone", None, (POD,))
    neighbour.gone = {"pods"}
    await one.look()
    problem = one.problem()
    assert problem is not None
    assert (problem.reason, one.beside.policy, one.beside.pods) == ("pods is gone", "RestrictedContainerLevel", (POD,))
    neighbour.gone = set()
    await one.look()
    assert one.problem() is None


async def test_without_a_kubelet_no_pod_is_refused_for_its_numa_nodes(tmp_path: Path) -> None:
    one = CnrInputCollector((tmp_path, tmp_path), CnrInputs(), None, None)
    await one.look()
    assert (one.beside.policy, one.beside.node, one.problem()) == ("None", None, None)
