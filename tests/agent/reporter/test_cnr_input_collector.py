"""Inputs from the kubelet: topology policy and pod resources, and their last values while it does not answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.reporter.cnr_input_collector import POLLS_PER_FULL_REFRESH, CnrInputCollector, topology_policy
from agent.reporter.cnr_inputs import CnrInputs
from agent.sensors.pods.kubelet_configuration import KubeletConfiguration
from api.interfaces import Unavailable
from api.node_resources import NodeAllocatable, PodAllocation

POD = PodAllocation(namespace="shop", name="db", containers=())


def topology(policy: str, scope: str = "container") -> KubeletConfiguration:
    return KubeletConfiguration(cpu_manager_policy="none", topology_manager_policy=policy, topology_manager_scope=scope)


@pytest.mark.parametrize(
    ("configuration", "word"),
    [
        (topology("none"), "None"),
        (topology("none", "pod"), "None"),
        (topology("", ""), "None"),
        (topology("single-numa-node"), "SingleNUMANodeContainerLevel"),
        (topology("single-numa-node", "pod"), "SingleNUMANodePodLevel"),
        (topology("restricted", ""), "RestrictedContainerLevel"),
        (topology("best-effort", "pod"), "BestEffortPodLevel"),
    ],
)
def test_katalysts_policy_names(configuration: KubeletConfiguration, word: str) -> None:
    assert topology_policy(configuration) == word


@pytest.mark.parametrize(
    ("configuration", "why"),
    [(topology("unheard-of"), "policy 'unheard-of'"), (topology("restricted", "rack"), "scope 'rack'")],
)
def test_an_unknown_policy_is_unavailable(configuration: KubeletConfiguration, why: str) -> None:
    with pytest.raises(Unavailable, match=why):
        topology_policy(configuration)


class FakeKubelet:
    """The poller of the kubelet's configuration and its pod-resources socket; records calls, and fails those in `failing`."""

    def __init__(self) -> None:
        self.configuration: KubeletConfiguration | None = None
        self.problem: Unavailable | None = None
        self.calls: list[str] = []
        self.failing: set[str] = set()

    def _call(self, what: str) -> None:
        self.calls.append(what)
        if what in self.failing:
            raise Unavailable(f"{what} is gone", "start it")

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
    kubelet.configuration = topology("restricted")
    for _ in range(POLLS_PER_FULL_REFRESH + 1):
        await collector_.poll()
    assert kubelet.calls.count("node") == 2
    assert kubelet.calls.count("pods") == POLLS_PER_FULL_REFRESH + 1
    assert (collector_.inputs.policy, collector_.inputs.node, collector_.inputs.pods) == (
        "RestrictedContainerLevel",
        NodeAllocatable(cpus=(1,)),
        (POD,),
    )


async def test_the_last_values_stay_and_a_failing_source_is_reported_and_retried(tmp_path: Path) -> None:
    kubelet = FakeKubelet()
    collector_ = collector(tmp_path, kubelet)
    kubelet.problem = Unavailable("/configz is gone", "start it")
    await collector_.poll()
    problem = collector_.problem()
    assert problem is not None
    assert (problem.reason, collector_.inputs.policy, collector_.inputs.pods) == ("/configz is gone", None, (POD,))
    kubelet.configuration, kubelet.problem, kubelet.failing = topology("restricted"), None, {"pods"}
    await collector_.poll()
    problem = collector_.problem()
    assert problem is not None
    assert (problem.reason, collector_.inputs.policy, collector_.inputs.pods) == (
        "pods is gone",
        "RestrictedContainerLevel",
        (POD,),
    )
    kubelet.failing, kubelet.problem = set(), Unavailable("/configz is gone", "start it")
    await collector_.poll()
    problem = collector_.problem()
    assert problem is not None
    assert (problem.reason, collector_.inputs.policy) == ("/configz is gone", "RestrictedContainerLevel")
    kubelet.problem = None
    await collector_.poll()
    assert collector_.problem() is None


async def test_without_a_kubelet_no_pod_is_refused_for_its_numa_nodes(tmp_path: Path) -> None:
    collector_ = CnrInputCollector((tmp_path, tmp_path), CnrInputs(), None, None)
    await collector_.poll()
    assert (collector_.inputs.policy, collector_.inputs.node, collector_.problem()) == ("None", None, None)
