"""Rules of the house that no linter knows: sizes, pairs of one stem, and documents that name only what exists."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from importlib import metadata
from pathlib import Path

import pytest
from msgspec.structs import fields

from api import VERSION
from api.metrics import AGENT_METRICS_BY_NAME, CONTROLLER_METRICS, CONTROLLER_METRICS_BY_NAME
from bench.__main__ import BENCHMARKS, COMMANDS
from cli.agent import agent
from controller.descheduler.descheduler_settings import (
    AnomalyCondition,
    DeschedulerSettings,
    HarmLimits,
    LowNodeLoadArgs,
)
from controller.scheduler.harm_score import HarmSettings
from controller.scheduler.load_aware import LoadSettings
from controller.scheduler.resource_fit import FitSettings
from controller.scheduler.scheduler_settings import SchedulerConfig
from controller.scheduler.topology_plugin import TopologySettings
from controller.settings import ControllerConfig, EvictionBudgetConfig, HealthConfig, RolloutConfig
from controller.webhooks.webhook_settings import WebhookSettings

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "api",
    "common",
    "kube",
    "probes",
    "agent",
    "exporters",
    "controller",
    "cli",
    "demo",
    "bench",
    "dashboards",
    "deploy",
    "tools",
)
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "dashboards").glob("*.md")])
PROBES = sorted((ROOT / "probes").glob("*.bpf.c"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_modules_and_functions_are_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 600
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{node.name} is longer than 60 lines"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring


def imported(tree: ast.AST) -> set[str]:
    """Modules, and names in modules, that are imported anywhere in it."""
    results = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return {name for node in results for name in (node.module or "", *(f"{node.module}.{a.name}" for a in node.names))}


def test_modules_do_not_import_one_another_in_a_circle() -> None:
    """Not even for types alone: what both need has a place of its own. What a function loads late may know its loader."""
    imports = {}
    for path in MODULES:
        tree = ast.parse(path.read_text())
        late = {name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for name in imported(node)}
        imports[relative(path).removesuffix(".py").replace("/", ".")] = imported(tree) - late
    assert "cli.probe.interval" in imports["cli.probe.commands"]
    list(TopologicalSorter(imports).static_order())  # a circle is an error that names it


@pytest.mark.parametrize("source", PROBES, ids=relative)
def test_a_probe_is_one_stem(source: Path) -> None:
    stem = source.name.removesuffix(".bpf.c")
    assert source.with_name(f"{stem}.py").exists()
    assert list((ROOT / "tests/kernel").glob(f"test_{stem}*.py")), "a probe has a test on a real kernel"
    assert stem in (ROOT / "docs/adding-a-probe.md").read_text()


def test_there_are_probes_to_check() -> None:
    assert {path.name.removesuffix(".bpf.c") for path in PROBES} >= {"runqlat", "blockio", "sockets", "softirq"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_documents_name_files_that_exist(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{relative(document)} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_documents_name_modules_and_packages_that_exist(document: Path) -> None:
    pattern = rf"`((?:{'|'.join(PACKAGES)})/[a-z0-9_/.]*(?:/|\.py))`"
    for named in re.findall(pattern, document.read_text()):
        assert (ROOT / named).exists(), f"{relative(document)} names {named}"


def test_every_benchmark_that_make_bench_runs_is_a_module() -> None:
    for name in BENCHMARKS:
        module = COMMANDS.get(name, (f"bench.{name}",))[0]
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), f"bench/__main__.py names {module}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_rows_of_tables_have_as_many_cells_as_their_heads(document: Path) -> None:
    head = 0
    for number, line in enumerate(document.read_text().splitlines(), 1):
        cells = re.findall(r"(?<!\\)\|", line) if line.startswith("|") else []
        head = (head or len(cells)) if cells else 0
        assert len(cells) == head, f"{relative(document)}, line {number}: {len(cells) - 1} cells of {head - 1}"


def test_every_difference_says_what_katalyst_does_what_happens_here_and_why() -> None:
    rows = [line for line in (ROOT / "docs/katalyst-differences.md").read_text().splitlines() if line.startswith("| ")]
    assert len(rows) >= 120
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 3, row
        assert all(cells), row
        assert not any(cell.startswith("- ") for cell in cells), row


def test_metrics_named_in_documents_are_in_the_catalogue() -> None:
    suffixes = ("_bucket", "_sum", "_count")
    for document in DOCUMENTS:
        for name in re.findall(r"\bdioptase_[a-z0-9_]+\b", document.read_text()):
            stems = {name, *(name.removesuffix(suffix) for suffix in suffixes)}
            assert stems & {*AGENT_METRICS_BY_NAME, *CONTROLLER_METRICS_BY_NAME}, f"{relative(document)} names {name}"


def test_every_metric_of_the_controller_is_documented() -> None:
    text = (ROOT / "docs/controller.md").read_text()
    for metric in CONTROLLER_METRICS:
        assert f"| `{metric.name}` | {metric.help} |" in text, (
            f"docs/controller.md lacks {metric.name}, or says something else"
        )


def test_every_setting_of_the_scheduler_is_documented() -> None:
    text = (ROOT / "docs/scheduler.md").read_text()
    sections = {"topology": TopologySettings, "fit": FitSettings, "load": LoadSettings, "harm": HarmSettings}
    names = [each.encode_name for each in fields(SchedulerConfig) if each.encode_name not in sections]
    for name in (*names, *(f"{key}.{each.encode_name}" for key, kind in sections.items() for each in fields(kind))):
        assert f"| `{name}` |" in text, f"docs/scheduler.md does not explain {name}"


def test_every_setting_of_the_controller_is_documented() -> None:
    text = (ROOT / "docs/controller.md").read_text()
    sections = {
        "health": HealthConfig,
        "rollout": RolloutConfig,
        "evictionBudget": EvictionBudgetConfig,
        "webhooks": WebhookSettings,
    }
    names = [each.encode_name for each in fields(ControllerConfig) if each.encode_name not in sections]
    for name in (*names, *(f"{key}.{each.encode_name}" for key, kind in sections.items() for each in fields(kind))):
        assert f"| `{name}` |" in text, f"docs/controller.md does not explain {name}"


def test_every_setting_of_the_descheduler_is_documented() -> None:
    text = (ROOT / "docs/descheduler.md").read_text()
    sections = {"lowNodeLoad": LowNodeLoadArgs, "lowNodeLoad.anomalyCondition": AnomalyCondition, "harm": HarmLimits}
    # What Kubernetes writes in every object.
    others = {*sections, "lowNodeLoad.apiVersion", "lowNodeLoad.kind"}
    names = [each.encode_name for each in fields(DeschedulerSettings)]
    for name in (*names, *(f"{key}.{each.encode_name}" for key, kind in sections.items() for each in fields(kind))):
        assert name in others or f"| `{name}` |" in text, f"docs/descheduler.md does not explain {name}"


def test_every_option_of_the_agent_is_documented() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    synopsis = text[: text.index("| option |")]
    options = [option for parameter in agent.params for option in parameter.opts if option.startswith("--")]
    assert len(options) >= 10
    for option in options:
        assert re.search(rf"{option}[ |\]]", synopsis), f"the synopsis lacks {option}"
        assert f"| `{option}` |" in text, f"docs/operations.md does not explain {option}"


def test_the_version_is_said_once_more_and_is_the_same() -> None:
    assert metadata.version("dioptase") == VERSION


def anchors(text: str) -> set[str]:
    """Anchors of a document's headings, as GitHub and the chart's renderer make them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_documents_link_to_headings_that_exist(document: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text()):
        linked = document.parent / target if target else document
        assert anchor in anchors(linked.read_text()), f"{relative(document)} links to {target}#{anchor}"
