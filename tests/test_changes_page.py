"""The page docs/changes.md names every kind of object of the chart, every resource control and every path on the node."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from api.knobs import Knob

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy/helm/dioptase"
PAGE = (ROOT / "docs/changes.md").read_text()
TEMPLATES = {path: path.read_text() for path in sorted(CHART.glob("templates/**/*.yaml"))}


def table_cells(heading: str, column: int) -> str:
    """Return the cells of one column of all tables below a heading of level two."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")]
    return "\n".join(row[column] for row in rows)


def test_every_kind_of_the_chart_is_named_and_no_other() -> None:
    rendered = {kind for text in TEMPLATES.values() for kind in re.findall(r"^kind: (\w+)$", text, re.M)}
    section = PAGE.partition("\n## Objects of the cluster\n")[2].partition("\nWhile the agents")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    named = set(re.findall(r"\b[A-Z]\w*[a-z]\w*\b", " ".join(cells)))
    assert len(rendered) > 18
    assert named == rendered | {"CustomResourceDefinition"}, "correct the first table of docs/changes.md"


@pytest.mark.parametrize("knob", Knob)
def test_every_resource_control_is_named(knob: Knob) -> None:
    assert f"`{knob.value}`" in table_cells("Cgroup files", 1)


def test_no_control_is_named_that_does_not_exist() -> None:
    assert set(re.findall(r"`([^`]+)`", table_cells("Cgroup files", 1))) == {knob.value for knob in Knob}


def test_every_host_path_that_the_chart_creates_is_named() -> None:
    created = re.findall(r"hostPath: \{path: \{\{ (\S+) \}\}, type: DirectoryOrCreate\}", "".join(TEMPLATES.values()))
    # `.` is the value agent.nriDir, which a `with` has selected.
    values = {"agent.nriDir" if name == "." else name.removeprefix(".Values.") for name in created}
    assert len(values) == 3
    files = table_cells("Files of a node", 1)
    assert [value for value in (*values, "agent.port") if value not in files] == []
