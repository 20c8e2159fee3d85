"""Problems of a cluster: each once with its nodes, the most frequent first."""

from __future__ import annotations

import msgspec

from api.diagnostics import DoctorCheck, DoctorReport
from cli.fleet.agent_endpoints import AgentEndpoint, FleetPod
from cli.fleet.api_server import AgentReply
from cli.fleet.findings import findings_summary, fleet_findings
from exporters.page.health import FailedSource, HealthStatus

NO_PSI = DoctorCheck(name="pressure", ok=False, detail="none", remedy="psi=1")
NO_L3 = DoctorCheck(name="optional: resctrl", ok=True, detail="none", remedy="another CPU")
FINE = DoctorCheck(name="cpus", ok=True, detail="4 CPUs")
READY = {"status": {"phase": "Running", "containerStatuses": [{"ready": True}]}}


def health(node: str, *failed: FailedSource, restarts: int = 0) -> AgentReply[HealthStatus]:
    return AgentReply(AgentEndpoint(node=node, restarts=restarts), HealthStatus(0.1, failed, ()))


def report(node: str, *checks: DoctorCheck, version: str = "1.0") -> AgentReply[DoctorReport]:
    return AgentReply(AgentEndpoint(node=node), DoctorReport(version=version, checks=checks))


def pods(*text: dict[str, object]) -> list[FleetPod]:
    return [msgspec.convert(item, FleetPod) for item in text]


def node_rows(
    healths: list[AgentReply[HealthStatus]], checks: list[AgentReply[DoctorReport]]
) -> list[tuple[str, bool, tuple[str, ...]]]:
    rows = fleet_findings(healths, checks, pods(READY), "")
    assert [row.name for row in rows[:2]] == ["controller", "custom resources"]
    return [(row.name, row.ok, row.nodes) for row in rows[2:] if row.name != "version"]


def test_each_problem_is_listed_once_with_its_nodes_the_most_frequent_first() -> None:
    nodes = ["n1", "n2", "n3"]
    late = FailedSource("psi", "late", "wait")
    rows = node_rows(
        [health("n1", late), health("n2"), health("n3", restarts=3)],
        [report("n1", FINE, NO_L3), report("n2", NO_PSI, NO_L3), report("n3", NO_PSI, NO_L3)],
    )
    assert rows == [
        ("pressure", False, ("n2", "n3")),
        ("source psi", False, ("n1",)),
        ("agent", True, tuple(nodes)),
        ("optional: resctrl", True, tuple(nodes)),
        ("restarts", True, ("n3",)),
    ]


def test_an_unreachable_agent_is_one_problem() -> None:
    silent: AgentReply[HealthStatus] = AgentReply(AgentEndpoint(node="n1"), None, "gone", "look")
    unseen: AgentReply[DoctorReport] = AgentReply(AgentEndpoint(node="n1"), None, "gone", "look")
    assert node_rows([silent], [unseen]) == [("agent", False, ("n1",))]


def test_an_older_agent_without_the_report_is_a_problem() -> None:
    unseen: AgentReply[DoctorReport] = AgentReply(AgentEndpoint(node="n1"), None, "/api/v1/doctor is not served")
    assert node_rows([health("n1")], [unseen]) == [("node", False, ("n1",)), ("agent", True, ("n1",))]


def test_two_versions_have_a_remedy() -> None:
    rows = fleet_findings([], [report("n1"), report("n2", version="2.0"), report("n3", version="2.0")], [], "")
    versions = [(row.detail, row.nodes, bool(row.remedy)) for row in rows if row.name == "version"]
    assert versions == [("2.0", ("n2", "n3"), True), ("1.0", ("n1",), True)]


def test_the_controller_is_well_while_one_is_ready() -> None:
    waiting = {"status": {"phase": "Running", "containerStatuses": [{"ready": False}]}}
    kinds = [
        (row.ok, row.detail, bool(row.remedy))
        for text in ([], [waiting], [READY, waiting], [READY])
        for row in fleet_findings([], [], pods(*text), "")[:1]
    ]
    assert kinds == [
        (False, "none runs", True),
        (False, "0 of 1 ready", True),
        (True, "1 of 2 ready", True),
        (True, "1 of 1 ready", False),
    ]


def test_a_controller_that_does_not_run_is_listed_with_its_error() -> None:
    last = {"terminated": {"reason": "Error", "message": "Usage: …\n\nError: controller.yaml: no such setting"}}
    state = {"ready": False, "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": last}
    pod = {
        "metadata": {"name": "c-1", "namespace": "dioptase"},
        "status": {"phase": "Running", "containerStatuses": [state]},
    }
    row = fleet_findings([], [], pods(READY, pod), "")[0]
    assert row.detail == "1 of 2 ready; c-1: CrashLoopBackOff; it exited with Error: controller.yaml: no such setting"
    assert row.remedy == "kubectl logs -n dioptase c-1 --previous"


def test_the_summary_counts_nodes() -> None:
    rows = fleet_findings(
        [health("n1", FailedSource("a", "x", ""), FailedSource("b", "y", "")), health("n2")], [], [], "no kinds"
    )
    assert findings_summary(rows, 2) == "1 of 2 nodes lack something that is needed; 2 of the cluster's own parts"
    assert (
        findings_summary(fleet_findings([health("n1")], [], pods(READY), ""), 1)
        == "nodes: 1; nothing that is needed is missing"
    )
