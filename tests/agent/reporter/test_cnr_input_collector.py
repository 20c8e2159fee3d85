"""Inputs from the kubelet: topology policy and pod resources, and their last values while it does not answer."""

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
def test_katalysts_policy_names(answer: bytes, word: str) -> None:
    assert topology_policy(answer) == word


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "is invalid"),
        (b"{}", "kubeletconfig"),
        (b'{"kubeletconfig":{"topologyManagerPolicy":5}}', r"kubeletconfig\.topologyManagerPolicy"),
        (configz("unheard-of"), "policy 'unheard-of'"),
        (configz("restricted", "rack"), "scope 'rack'"),
    ],
)
def test_an_invalid_policy_is_unavailable(answer: bytes, why: str) -> None:
    with pytest.raises(Unavailable, match=why):
        topology_policy(answer)


@given(st.binary(max_size=200))
def test_no_answer_does_more_than_be_refused(answer: bytes) -> None:
    with suppress(Unavailable):
        topology_policy(answer)


class FakeKubelet:
    """The kubelet and its pod-resources socket; records calls, and fails those in `failing`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: set[str] = set()

    def _call(self, what: str) -> None:
        self.calls.append(what)
        if what in self.failing:
            raise Unavailable(f"{what} is gone", "start it")

    async def ask(self) -> bytes:
        self._call("policy")
        return configz("restricted")

    async def node(self) -> NodeAllocatable | None:
        self._call("node")
        return NodeAllocatable(cpus=(1,))

    async def pods(self) -> tuple[PodAllocation, ...]:
        self._call("pods")
        return (POD,)


def collector(tmp_path: Path, kubelet: Any) -> CnrInputCollector:
    return CnrInputCollector((tmp_path, tmp_path), CnrInputs(), kubelet, kubelet)


async def test_values_that_change_only_with_a_restart_are_polled_rarely(tmp_path: Path) -> None:
    kubelet = FakeKubelet()
    collector_ = collector(tmp_path, kubelet)
    assert collector_.inputs.policy is None, "the kubelet has not answered yet"
    for _ in range(POLLS_PER_FULL_REFRESH + 1):
        await collector_.poll()
    assert kubelet.calls.count("policy") == kubelet.calls.count("node") == 2
    assert kubelet.calls.count("pods") == POLLS_PER_FULL_REFRESH + 1
    assert (collector_.inputs.policy, collector_.inputs.node, collector_.inputs.pods) == (
        "RestrictedContainerLevel",
        NodeAllocatable(cpus=(1,)),
        (POD,),
    )


async def test_the_last_values_stay_and_a_failing_source_is_reported_and_retried(tmp_path: Path) -> None:
    kubelet = FakeKubelet()
    collector_ = collector(tmp_path, kubelet)
    kubelet.failing = {"policy"}
    await collector_.poll()
    problem = collector_.problem()
    assert problem is not None
    assert (problem.reason, collector_.inputs.policy, collector_.inputs.pods) == ("policy is gone", None, (POD,))
    kubelet.failing = {"pods"}
    await collector_.poll()
    problem = collector_.problem()
    assert problem is not None
    assert (problem.reason, collector_.inputs.policy, collector_.inputs.pods) == (
        "pods is gone",
        "RestrictedContainerLevel",
        (POD,),
    )
    kubelet.failing = set()
    await collector_.poll()
    assert collector_.problem() is None


async def test_without_a_kubelet_no_pod_is_refused_for_its_numa_nodes(tmp_path: Path) -> None:
    collector_ = CnrInputCollector((tmp_path, tmp_path), CnrInputs(), None, None)
    await collector_.poll()
    assert (collector_.inputs.policy, collector_.inputs.node, collector_.problem()) == ("None", None, None)
