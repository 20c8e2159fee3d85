"""The dashboards, rules.yaml and runbook.md agree with the code they are made from and with each other."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from api.metric_profiles import LABEL_VALUES, MetricProfile, has_metric
from api.metrics import AGENT_METRICS, AGENT_METRICS_BY_NAME, CONTROLLER_METRICS
from dashboards import build
from dashboards.panels import Board
from tests.dashboards.prometheus_server import DASHBOARDS, committed, panel_queries, rules

METRIC = re.compile(r"\b(?:dioptase|process)_[a-z0-9_]+")
KNOWN_METRICS = {metric.name for metric in (*AGENT_METRICS, *CONTROLLER_METRICS)} | {
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
}
BOARDS = build.boards()


def panels(path: Path) -> list[dict[str, Any]]:
    text: list[dict[str, Any]] = json.loads(path.read_text())["panels"]
    return text


def test_there_is_a_file_for_every_board_and_no_other() -> None:
    assert committed() == sorted(build.path_of(board) for board in BOARDS)
    assert len({json.loads(path.read_text())["uid"] for path in committed()}) == len(BOARDS)


@pytest.mark.parametrize("board", BOARDS, ids=[board.name for board in BOARDS])
def test_the_committed_dashboard_is_what_the_code_makes(board: Board) -> None:
    assert build.path_of(board).read_text() == board.json(), "run: python -m dashboards.build"


def test_making_them_again_makes_the_same() -> None:
    assert [board.json() for board in build.boards()] == [board.json() for board in build.boards()]


@pytest.mark.parametrize("path", committed(), ids=lambda path: path.stem)
def test_panels_have_ids_places_and_explanations_of_their_own(path: Path) -> None:
    result = panels(path)
    assert len({panel["id"] for panel in result}) == len(result)
    cells = [
        (x, y)
        for panel in result
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24
    titles = [panel["title"] for panel in result if panel["type"] != "row"]
    assert len(set(titles)) == len(titles), "two panels of a board are called the same"
    assert [panel["title"] for panel in result if panel["type"] != "row" and not panel["description"]] == []


@pytest.mark.parametrize("path", committed(), ids=lambda path: path.stem)
def test_every_variable_of_a_query_is_one_of_the_board(path: Path) -> None:
    board = json.loads(path.read_text())
    declared = {variable["name"] for variable in board["templating"]["list"]} | {"__rate_interval"}
    used = {
        name
        for panel in panels(path)
        for target in panel.get("targets", [])
        for name in re.findall(r"\$([a-zA-Z_]\w*)", target["expr"])
    }
    assert used <= declared
    assert declared - used <= {"datasource"}, "a variable that chooses nothing"


def test_every_queried_metric_is_in_the_catalogue() -> None:
    request = [expr for _, expr in panel_queries()] + [rule.expr for rule in rules()]
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for expr in request for name in METRIC.findall(expr)}
    recorded = {rule.record.partition(":")[0] for rule in rules() if rule.record}
    assert names - recorded <= KNOWN_METRICS
    assert "dioptase_cgroup_runq_wait_seconds" in names


SELECTOR = re.compile(r"(dioptase_[a-z0-9_]+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


def unselectable(expr: str) -> list[str]:
    """Matchers of a query for label values that profile `standard` does not have, so that it would find nothing."""
    missing = []
    for name, matchers in SELECTOR.findall(expr):
        allowed = LABEL_VALUES[MetricProfile.STANDARD].get(re.sub(r"_(bucket|sum|count)$", "", name), {})
        for label, operator, value in MATCHER.findall(matchers):
            if label in allowed and operator == "=" and value not in allowed[label]:
                missing.append(f"{name}{{{label}={value}}}")
            if label in allowed and operator == "=~" and not set(value.split("|")) <= allowed[label]:
                missing.append(f"{name}{{{label}=~{value}}}")
    return missing


def test_every_query_is_answered_by_the_metrics_and_label_values_of_profile_standard() -> None:
    requests = [*panel_queries(), *((rule.record or rule.alert, rule.expr) for rule in rules())]
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for _, expr in requests for name in METRIC.findall(expr)}
    names |= {name for path in committed() for name in re.findall(r"label_values\((\w+)", path.read_text())}
    used = [AGENT_METRICS_BY_NAME[name] for name in sorted(names & AGENT_METRICS_BY_NAME.keys())]
    assert [metric.name for metric in used if not has_metric(MetricProfile.STANDARD, metric)] == []
    assert len(used) > 100
    assert {name: missing for name, expr in requests if (missing := unselectable(expr))} == {}
    assert unselectable('rate(dioptase_cgroup_load{period="5m"}[5m])') == ["dioptase_cgroup_load{period=5m}"]


def test_series_of_nodes_are_grouped_by_job_and_instance() -> None:
    """Two jobs may scrape the same address; a match on the instance alone fails there, and a sum counts twice."""
    requests = [*panel_queries(), *((rule.record or rule.alert, rule.expr) for rule in rules())]
    groups = {(name, group) for name, expr in requests for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", expr)}
    # Those of the boards fleet and worth are sums over nodes, or of controller and extender, of which one replica works.
    of_jobs = (
        "fleet: ",
        "worth: ",
        "DioptaseControllerIdle",
        "DioptaseExtenderSilent",
        "dioptase:scheduler_extenders:count",
    )
    of_nodes = {(name, group) for name, group in groups if not name.startswith(of_jobs)}
    assert {
        (name, group) for name, group in of_nodes if not group.startswith("job, instance") and group != "le"
    } == set()
    assert len(groups) > 50


def test_every_alert_has_an_entry_in_the_runbook_and_every_entry_an_alert() -> None:
    entries = re.findall(r"^## (\w+)$", (DASHBOARDS / "runbook.md").read_text(), re.MULTILINE)
    alerts = [rule for rule in rules() if rule.alert]
    assert sorted(rule.alert for rule in alerts) == sorted(entries)
    for rule in alerts:
        assert rule.annotations["runbook_url"] == f"dashboards/runbook.md#{rule.alert.lower()}"


def test_every_alert_is_shown_to_fire_and_not_to_fire() -> None:
    text = (DASHBOARDS / "rules_test.yaml").read_text()
    for rule in rules():
        if rule.alert:
            assert re.search(rf"alertname: {rule.alert}\n\s+exp_alerts:\n\s+- exp_labels", text), (
                f"{rule.alert} never fires"
            )


def test_the_runbook_names_boards_and_panels_that_there_are() -> None:
    text = (DASHBOARDS / "runbook.md").read_text()
    assert {f"{board.name}.json" for board in BOARDS} >= set(re.findall(r"`(\w+\.json)`", text))
    titles = {panel["title"] for path in committed() for panel in panels(path)} | {"Sources", "Killed for memory"}
    quoted = {" ".join(name.split()) for name in re.findall(r'"([A-Z][^"]+)"', text)}
    quoted |= {" ".join(name.split()) for name in re.findall(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)", text)}
    assert quoted - titles == set()


@pytest.mark.prometheus
@pytest.mark.parametrize(
    "command", [["check", "rules", "--lint-fatal", "rules.yaml"], ["test", "rules", "rules_test.yaml"]]
)
def test_promtool_is_content(promtool: str, command: list[str]) -> None:
    checked = subprocess.run([promtool, *command], cwd=DASHBOARDS, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
