"""Overcommit annotations of the CustomNodeResource: ratios, managers, pinned CPUs, and how often they are written."""

from __future__ import annotations

import msgspec
import pytest

from agent.reporter.cnr import build_cnr_report
from agent.reporter.overcommit_annotations import guaranteed_cpus, overcommit_annotations
from api.advice import NodeAdvice, OvercommitAdvice
from api.decision import Cycle
from api.knobs import Reason
from api.pod import Container, Pod
from api.qos import QoSLevel
from api.snapshot import KubeletManagers, NodeSample
from tests.builders.four_cpu_node import busy_cycle

K = "katalyst.kubewharf.io"


def pod(*containers: tuple[float | None, float | None, int | None, int | None]) -> Pod:
    return Pod(
        uid="u",
        namespace="a",
        name="b",
        qos=QoSLevel.SHARED,
        containers=tuple(
            Container(
                name=str(n),
                cgroup=f"/{n}",
                cpu_request_cores=request,
                cpu_limit_cores=limit,
                memory_request_bytes=least,
                memory_limit_bytes=most,
            )
            for n, (request, limit, least, most) in enumerate(containers)
        ),
    )


@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        ([(4, 4, 1, 1)], 4),
        ([(4, 4, 1, 1), (2.5, 2.5, 1, 1)], 4),
        ([(4, 4, 1, 1), (None, None, 1, 1)], 0),
        ([(4, 8, 1, 1)], 0),
        ([(4, 4, None, None)], 0),
        ([(2.5, 2.5, 1, 1)], 0),
    ],
)
def test_guaranteed_cpus_are_those_of_whole_numbers(
    containers: list[tuple[float, float, int, int]], expected: int
) -> None:
    assert guaranteed_cpus(pod(*containers)) == expected


def cycle(managers: KubeletManagers | None, pods: tuple[Pod, ...], cpu_ratio: float = 1.59375) -> Cycle:
    ratios = OvercommitAdvice(cpu_ratio=cpu_ratio, memory_ratio=1.171875, reason=Reason(rule="r", text="R."))
    finished = busy_cycle(1)
    snapshot = msgspec.structs.replace(finished.snapshot, node=NodeSample(kubelet=managers), pods=pods)
    return msgspec.structs.replace(finished, snapshot=snapshot, node=NodeAdvice(overcommit=ratios))


@pytest.mark.parametrize(
    ("managers", "cpu", "memory", "pinned"),
    [
        (KubeletManagers(cpu="static", memory="none"), "static", "None", "8"),
        (KubeletManagers(cpu="none", memory="static"), "none", "Static", "0"),
        (KubeletManagers(cpu="unknown", memory="unknown"), "static", "Static", "8"),
        (None, "none", "None", "0"),
    ],
)
def test_pinned_cpus_are_reported_only_with_a_static_manager(
    managers: KubeletManagers | None, cpu: str, memory: str, pinned: str
) -> None:
    assert overcommit_annotations(cycle(managers, (pod((4, 4, 1, 1)),) * 2)) == {
        f"{K}/cpu_overcommit_ratio": "1.59",
        f"{K}/memory_overcommit_ratio": "1.17",
        f"{K}/overcommit_cpu_manager": cpu,
        f"{K}/overcommit_memory_manager": memory,
        f"{K}/guaranteed_cpus": pinned,
    }


@pytest.mark.parametrize("advice", [None, NodeAdvice()])
def test_without_overcommit_advice_there_are_no_annotations(advice: NodeAdvice | None) -> None:
    report = build_cnr_report(msgspec.structs.replace(cycle(None, ()), node=advice), metrics=False)
    assert report.annotations == {}
    assert "metadata" not in report.spec_body()


def test_a_dry_run_reports_no_ratio() -> None:
    assert build_cnr_report(cycle(None, ()), metrics=False, reports_reclaimable=False).annotations == {}
    assert build_cnr_report(cycle(None, ()), metrics=False).spec_body()["metadata"]["annotations"]
