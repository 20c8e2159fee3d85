"""The whole path on a real node, by the script of docs/quick-start.md: the chart with scheduler and webhooks, a labelled
namespace, an ordinary Deployment whose pods become reclaimed ones, are bound by the CustomNodeResource, use idle CPU, yield to
an online service and get the CPU again. CPU time is the kernel's."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from api.pod import RECLAIMED_CPU, RECLAIMED_MEMORY
from api.quantity import parse_quantity
from tests.cluster import images
from tests.cluster.binaries import KUBERNETES
from tests.cluster.cluster import Cluster
from tests.cluster.daemons import PATIENCE, wait
from tests.cluster.doc_commands import PastingShell, answers, parts, steps
from tests.cluster.external_cluster import ExternalCluster
from tests.cluster.katalyst import CNRS
from tests.cluster.objects import QOS
from tests.cluster.page_shell import page_shell
from tests.cluster.pods import Pod
from tests.cluster.programs import CODE
from tests.cluster.test_quick_start import BUSYBOX, ONE_SCRIPT, PAGE

pytestmark = [pytest.mark.cluster, pytest.mark.long]
KUBE_SCHEDULER = f"registry.k8s.io/kube-scheduler:v{KUBERNETES}"
"""The image that the chart names on this cluster."""
TARGET_US = 10_000
"""Default of advisor.latency.targetWaitMs."""


@pytest.fixture
def world(
    own_cluster: Cluster, cluster: Cluster | ExternalCluster, tmp_path: Path, image: Path
) -> Iterator[dict[str, str]]:
    """A node with the images of this tree, busybox and the compiled kube-scheduler, and the variables of a reader's shell."""
    node, archive = own_cluster.nodes[0], tmp_path / "others.tar"
    images.write(archive, {BUSYBOX: (), KUBE_SCHEDULER: ()}, (own_cluster.programs["kube-scheduler"],))
    for each in (image, archive):
        node.load(each)
    # Minutes on a real node. Without extended resources of the Node, only the CustomNodeResource offers anything.
    report = {"periodS": 2, "windowS": 6, "minStepCores": 0.05}
    yield page_shell(own_cluster, tmp_path, "namespace-colocation", {"extendedResources": False}, report=report)
    own_cluster.kubectl("delete", "namespace", "team", "--ignore-not-found", "--wait=false")
    own_cluster.kubectl("delete", "deployment", "web", "-n", "default", "--ignore-not-found", "--wait=false")


def batch_pods(cluster: Cluster) -> list[Any]:
    pods = cluster.server.ask("GET", "/api/v1/namespaces/team/pods")["items"]
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def used_cores(cluster: Cluster, pods: Sequence[Any], seconds: float = 5) -> float:
    """Return the CPU that these pods use, from the kernel's counters of their cgroups."""
    node = cluster.nodes[0]
    groups = [Pod(cluster.server, "team", pod["metadata"]["name"], node).cgroups("cpuacct")[0] for pod in pods]
    before, began_s = sum(map(used_s, groups)), time.monotonic()
    time.sleep(seconds)
    return (sum(map(used_s, groups)) - before) / (time.monotonic() - began_s)


def used_s(group: Path) -> float:
    """Return the CPU time of a cgroup so far, of version 1 or 2."""
    if (group / "cpuacct.usage").exists():
        return int((group / "cpuacct.usage").read_text()) / 1e9
    (used_us,) = re.findall(r"^usage_usec (\d+)$", (group / "cpu.stat").read_text(), re.MULTILINE)
    return int(used_us) / 1e6


def offered_cores(cluster: Cluster) -> float:
    """Return the reclaimed CPU that the CustomNodeResource offers."""
    status = cluster.server.ask("GET", f"{CNRS}/{cluster.nodes[0].name}")["status"]
    return float(parse_quantity(status["resources"]["allocatable"][RECLAIMED_CPU])) / 1000


def web_row(world: dict[str, str]) -> dict[str, float]:
    """Return the numbers of the online service: cpu_cores, wait_p99_us and harm_ms."""
    command = ["kubectl", "dioptase", "top", "pods", "-o", "json"]
    done = subprocess.run(
        command, env=world, cwd=CODE, capture_output=True, text=True, check=True, timeout=60 * PATIENCE
    )
    (row,) = (row for row in json.loads(done.stdout) if row["container"] == "web")
    return {name: row.get(name) or 0.0 for name in ("cpu_cores", "wait_p99_us", "harm_ms")}


def scheduled_by(cluster: Cluster, pod: Any) -> list[str]:
    """Return which schedulers reported that they bound this pod."""
    selector = f"involvedObject.name%3D{pod['metadata']['name']},reason%3DScheduled"
    events = cluster.server.ask("GET", f"/api/v1/namespaces/team/events?fieldSelector={selector}")["items"]
    return [event["reportingComponent"] for event in events]


def assert_bound_by_the_cnr(cluster: Cluster) -> None:
    """The pods are reclaimed ones in every respect, though their Deployment has no annotation and requests cpu and memory."""
    template = cluster.server.ask("GET", "/apis/apps/v1/namespaces/team/deployments/batch")["spec"]["template"]
    assert "annotations" not in template["metadata"]
    node = cluster.server.ask("GET", f"/api/v1/nodes/{cluster.nodes[0].name}")
    assert RECLAIMED_CPU not in node["status"]["allocatable"], "the Node offers nothing to a stock scheduler"
    pods = batch_pods(cluster)
    assert len(pods) == 2
    for pod in pods:
        resources = pod["spec"]["containers"][0]["resources"]
        assert pod["metadata"]["annotations"][QOS] == "reclaimed_cores"
        assert pod["metadata"]["annotations"]["dioptase.io/colocation-profiles"] == "batch"
        assert resources["requests"] == resources["limits"]
        amounts = {name: int(parse_quantity(amount)) for name, amount in resources["requests"].items()}
        assert amounts == {RECLAIMED_CPU: 250, RECLAIMED_MEMORY: 32 << 20}
        assert pod["spec"]["nodeName"] == cluster.nodes[0].name
        assert scheduled_by(cluster, pod) == ["katalyst-scheduler"]


def assert_ordinary(cluster: Cluster) -> None:
    wait("two new pods", lambda: len(batch_pods(cluster)) == 2, 60)
    for pod in batch_pods(cluster):
        assert QOS not in pod["metadata"].get("annotations", {})
        assert pod["spec"]["containers"][0]["resources"] == {"requests": {"cpu": "250m", "memory": "32Mi"}}
        assert scheduled_by(cluster, pod) == ["default-scheduler"]


def test_pods_of_a_labelled_namespace_use_idle_cpu_and_yield(world: dict[str, str], own_cluster: Cluster) -> None:
    (step,) = steps(PAGE[PAGE.index(ONE_SCRIPT) :])
    install, label, start, load, rest, ordinary, remove = parts(step.script)
    shell = PastingShell(world, CODE)
    output = [shell.run(part, 900) for part in (install, label, start)]
    assert_bound_by_the_cnr(own_cluster)
    pods = batch_pods(own_cluster)
    # Other programs share this machine: how much is idle varies, two limits of a quarter of a core do not.
    wait("idle CPU is used", lambda: 0.1 < used_cores(own_cluster, pods) < 0.55, 60)
    idle_cores, idle_offer = used_cores(own_cluster, pods), offered_cores(own_cluster)
    output.append(shell.run(load, 120))
    wait("batch pods yield", lambda: used_cores(own_cluster, pods) < idle_cores / 4, 60)
    wait("a smaller offer", lambda: offered_cores(own_cluster) < idle_offer / 2, 60)
    wait("latency below its target", lambda: web_row(world)["wait_p99_us"] < TARGET_US, 60)
    busy_cores, busy_offer, web = used_cores(own_cluster, pods), offered_cores(own_cluster), web_row(world)
    print(f"batch pods used {idle_cores:.2f} cores, {busy_cores:.2f} under load")
    print(f"the CustomNodeResource offered {idle_offer:.2f} cores, {busy_offer:.2f} under load; web: {web}")
    assert busy_cores < web["cpu_cores"] / 4
    output.append(shell.run(rest, 180))
    # In steps, and only while other programs of this machine do not make the online service wait.
    wait("the CPU again", lambda: used_cores(own_cluster, pods) > idle_cores * 0.8, 120)
    assert [pod["metadata"]["uid"] for pod in batch_pods(own_cluster)] == [pod["metadata"]["uid"] for pod in pods]
    output.append(shell.run(ordinary, 600))
    assert_ordinary(own_cluster)
    output.append(shell.run(remove, 600))
    shell.close()
    assert step.answer is not None
    assert answers("".join(output), step.answer), "".join(output)
