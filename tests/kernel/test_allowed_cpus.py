"""The CPUs of the cgroup above all pods, as this kernel tells them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from agent.advisor.engine import PolicyState, evaluate_policy
from agent.config.advisor import AdvisorConfig
from agent.config.config import AgentConfig
from agent.sensors.cgroup.cgroup_reader import CgroupReader
from agent.sensors.node.machine import read_topology
from api.pod import Container, Pod
from api.qos import QoSLevel
from tests.agent.advisor.builders import snapshot
from tests.kernel.real_cgroups import TestCgroup, cgroup, require_writable_cgroups

pytestmark = pytest.mark.kernel


def test_pools_stay_within_the_cpus_of_the_cgroup_above_all_pods() -> None:
    hierarchy, node = require_writable_cgroups(), read_topology(Path("/sys"))
    if len(node.cpus) < 2:
        pytest.skip("with one CPU no cgroup has fewer")
    last = node.ids[-1]
    with cgroup(hierarchy, "ceiling") as above:
        if not above.file("cpuset", "cpuset.cpus").exists():
            pytest.skip("the cpuset controller is not enabled for cgroups below the root")
        above.file("cpuset", "cpuset.cpus").write_text(str(last))
        below = [TestCgroup(hierarchy, f"{above.path}/{name}") for name in ("web", "batch")]
        try:
            pods = [
                Pod(
                    uid=name,
                    namespace="default",
                    name=name,
                    qos=qos,
                    containers=(Container(name=name, cgroup=group.path),),
                )
                for name, qos, group in zip(("web", "batch"), (QoSLevel.SHARED, QoSLevel.RECLAIMED), below, strict=True)
            ]
            reader = CgroupReader(hierarchy)
            cgroups = reader.read()
            reader.close()
        finally:
            for group in below:
                group.close()
    observed = msgspec.structs.replace(snapshot(0, pods, cpus=node), cgroups=cgroups)
    result, _ = evaluate_policy(
        observed, AgentConfig(advisor=AdvisorConfig(policy="canonical")), PolicyState(), observed.taken_at_ns
    )
    assert result.advice is not None
    assert {cpu for pool in result.advice.pools for cpu in pool.cpus} == {last}
    assert f"{above.path} limits pods to CPUs {last} of the node's {len(node.cpus)}." in result.advice.reason.text
