"""Katalyst's tutorial on a node of its size, declared: 48 cores and 195924424Ki, judged as the agent judges and written to a
real API server as it writes. (On 48 CPUs that are there: tests/vm/test_big.py. By hand, on any node: test_quick_start.py.)
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import pytest

from agent.advisor.engine import PolicyState, evaluate_policy
from agent.advisor.policy_result import PolicyResult
from agent.config.config import AgentConfig
from agent.reporter.cnr_writer import CnrWriter
from api.decision import ActMode, Cycle
from api.pod import Pod
from api.qos import QoSLevel
from api.snapshot import NodeSample, NumaNode, Snapshot
from api.units import KIB
from kube.client import KubeClient
from tests.agent.advisor.builders import pod, topology
from tests.agent.advisor.test_engine_headroom import build_snapshot
from tests.builders.settings import parse_config
from tests.cluster.cluster import Cluster
from tests.cluster.external_cluster import ExternalCluster
from tests.cluster.server import Server

pytestmark = pytest.mark.cluster
NODE = "tutorial"
TOTAL = 195_924_424 * KIB
CONFIG = "advisor: {policy: canonical}\nmemory: {policy: canonical}\nreport: {periodS: 10, windowS: 30}\n"
"""Settings with a shorter reporting window than the default of two minutes."""


def evaluate_minutes(
    pods: Sequence[Pod], busy: float, state: PolicyState, config: AgentConfig, began: int
) -> tuple[Cycle, PolicyState]:
    """Evaluate three minutes of cycles, one a second, in which the online pod uses `busy` cores; before it used one."""
    node, finished = topology(48), None
    for at in range(began, began + 180):
        mean = (began + busy * (at - began)) / at
        shot = with_memory(
            build_snapshot(at, pods, node, {item.name: mean if item.qos is QoSLevel.SHARED else 0.0 for item in pods})
        )
        answer, state = evaluate_policy(shot, config, state, shot.taken_at_ns)
        finished = cycle_of(shot, answer)
    assert finished is not None
    return finished, state


def with_memory(shot: Snapshot) -> Snapshot:
    """Return the snapshot with the tutorial's memory, all of it free."""
    meminfo = {"MemTotal": TOTAL, "MemFree": TOTAL, "MemAvailable": TOTAL}
    node: NodeSample = msgspec.structs.replace(
        shot.node, memory_total_bytes=TOTAL, memory_available_bytes=TOTAL, meminfo=meminfo,
        numa={0: NumaNode(meminfo=meminfo)},
    )  # fmt: skip
    return msgspec.structs.replace(shot, node=node)


def cycle_of(shot: Snapshot, answer: PolicyResult) -> Cycle:
    return Cycle(
        snapshot=shot, previous=None, act=ActMode.ON, trigger="tick", advice=answer.advice, memory=answer.memory
    )


async def test_44k_42k_and_40k_as_the_tutorial_says(
    api_server: Cluster | ExternalCluster, client: KubeClient, definitions: Server
) -> None:
    writer = CnrWriter(client, NODE, metrics=False)
    config, values = parse_config(CONFIG.encode(), "tutorial"), PolicyState()
    online = pod("shared-normal-pod", QoSLevel.SHARED, request=2)
    batch = pod("reclaimed-normal-pod", QoSLevel.RECLAIMED)
    result, sizes = [], []
    for phase, (pods, busy) in enumerate((((batch,), 0.0), ((online, batch), 1.0), ((online, batch), 3.0))):
        finished, values = evaluate_minutes(pods, busy, values, config, 1 + phase * 180)
        assert finished.advice is not None
        sizes.append({pool.name: len(pool.cpus) for pool in finished.advice.pools})
        writer.publish(finished)
        await writer.sync(time.monotonic())
        assert writer.problem() is None
        words = ("get", "kcnr", NODE, "-o", "jsonpath={.status.resources.allocatable}")
        result.append(msgspec.json.decode(api_server.kubectl(*words)))
    path = f"/apis/node.katalyst.kubewharf.io/v1alpha1/customnoderesources/{NODE}"
    definitions.ask("DELETE", path)
    assert [item["resource.katalyst.kubewharf.io/reclaimed_millicpu"] for item in result] == ["44000", "42000", "40000"]
    # 195924424Ki less 5Gi
    assert result[0]["resource.katalyst.kubewharf.io/reclaimed_memory"] == "195257901056"
    assert sizes == [{"share": 4, "reclaim": 44}, {"share": 6, "reclaim": 42}, {"share": 8, "reclaim": 40}]
