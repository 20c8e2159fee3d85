"""overview.json, rules.yaml and runbook.md agree with the code they are made from and with each other."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from api.catalogue import CATALOGUE
from dashboards import build
from tests.dashboards.support import DASHBOARDS, panel_queries, rules

METRIC = re.compile(r"\b(?:dioptase|process)_[a-z0-9_]+")
KNOWN = {metric.name for metric in CATALOGUE} | {"process_cpu_seconds_total", "process_resident_memory_bytes"}


def test_the_committed_dashboard_is_what_the_code_makes() -> None:
    assert (DASHBOARDS / "overview.json").read_text() == build.overview(), "run: python dashboards/build.py"


def test_making_it_again_makes_the_same() -> None:
    assert build.overview() == build.overview()


def test_panels_have_ids_places_and_explanations_of_their_own() -> None:
    panels = json.loads((DASHBOARDS / "overview.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24
    assert [panel["title"] for panel in panels if panel["type"] != "row" and not panel["description"]] == []


def test_every_metric_that_is_asked_for_is_in_the_catalogue() -> None:
    asked = [expr for _, expr in panel_queries()] + [rule.expr for rule in rules()]
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for expr in asked for name in METRIC.findall(expr)}
    recorded = {rule.record.partition(":")[0] for rule in rules() if rule.record}
    assert names - recorded <= KNOWN
    assert "dioptase_cgroup_runq_wait_seconds" in names


def test_every_alert_has_an_entry_in_the_runbook_and_every_entry_an_alert() -> None:
    entries = re.findall(r"^## (\w+)$", (DASHBOARDS / "runbook.md").read_text(), re.MULTILINE)
    alerts = [rule for rule in rules() if rule.alert]
    assert sorted(rule.alert for rule in alerts) == sorted(entries)
    for rule in alerts:
        assert rule.annotations["runbook"] == f"dashboards/runbook.md#{rule.alert.lower()}"


@pytest.mark.prometheus
@pytest.mark.parametrize(
    "command", [["check", "rules", "--lint-fatal", "rules.yaml"], ["test", "rules", "rules_test.yaml"]]
)
def test_promtool_is_content(promtool: str, command: list[str]) -> None:
    checked = subprocess.run([promtool, *command], cwd=DASHBOARDS, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
