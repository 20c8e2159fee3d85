"""What is made from the chart without helm, and what the chart must hold to."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from api import VERSION
from controller.serving import parse_settings
from controller.settings import ControllerConfig
from deploy import chart
from tests.builders.settings import parse_config as agent_settings
from tests.deploy.image_archives import write_archive

ROOT = Path(__file__).resolve().parents[2]
VALUES = (chart.CHART_DIR / "values.yaml").read_text()
DAEMONSET = (chart.CHART_DIR / "templates/agent-daemonset.yaml").read_text()


def test_the_table_in_the_document_is_that_of_the_values() -> None:
    document = chart.INSTALL_DOCUMENT.read_text()
    assert document.count(chart.BEGIN) == document.count(chart.END) == 1
    assert chart.insert_values_table(document, VALUES) == document


def test_rows_are_paths_with_defaults_and_comments() -> None:
    text = '# head\n\na:\n  # One\n  # more\n  b: 1\n  # Two\n  c:\n    d: {e: f}\n  # Three\n  g: ""\n# Four\nh: [i]\n'
    assert list(chart.values_rows(text)) == [
        ("a.b", "1", "One more"),
        ("a.c", "below", "Two"),
        ("a.g", '""', "Three"),
        ("h", "[i]", "Four"),
    ]
    with pytest.raises(ValueError, match=r"a\.b: has no comment"):
        list(chart.values_rows("# head\n\na:\n  b: 1\n"))
    with pytest.raises(ValueError, match="neither a comment nor"):
        list(chart.values_rows("# head\n\n- a\n"))


def leaves(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, below in schema.get("properties", {}).items():
        yield f"{path}{name}", below
        yield from leaves(below, f"{path}{name}.")


def test_the_schema_knows_every_value_and_no_other() -> None:
    schema = json.loads((chart.CHART_DIR / "values.schema.json").read_text())
    schema_paths = dict(leaves(schema))
    documented = {path for path, _, _ in chart.values_rows(VALUES)}
    assert documented <= schema_paths.keys()
    inner = {
        path for path, below in schema_paths.items() if not any(other.startswith(f"{path}.") for other in schema_paths)
    }
    assert {path for path in inner if "$ref" in schema_paths[path] or schema_paths[path].get("type") != "object"} - {
        "global"
    } <= documented
    sections = [below for path, below in schema_paths.items() if below.get("properties")]
    assert sections
    assert all(below["additionalProperties"] is False for below in sections)


def test_the_chart_is_of_the_version_that_it_installs() -> None:
    output = msgspec.yaml.decode((chart.CHART_DIR / "Chart.yaml").read_bytes())
    assert output["appVersion"] == VERSION
    assert f"newTag: {VERSION}" in (chart.KUSTOMIZE_BASE.parent / "kustomization.yaml").read_text()


def test_the_image_is_built_under_the_name_that_the_base_asks_for(tmp_path: Path) -> None:
    """Runs the script itself; stubs of the slow programs only create the requested files."""
    write_archive(tmp_path / "whole.tar", b"{}")
    script = (
        "#!/bin/sh\nfor last; do :; done\nlast=${last#docker-archive:}\n"
        f'case $last in *.tar*) cp {tmp_path}/whole.tar "${{last%%:*}}";; esac\n'
    )
    for name in ("buildah", "mmdebstrap"):
        program = tmp_path / name
        program.write_text(script)
        program.chmod(0o755)
    settings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path)}
    command = [ROOT / "deploy/image", tmp_path / "made.tar"]
    output = subprocess.run(command, cwd=tmp_path, env=settings, check=True, capture_output=True, text=True).stdout
    assert output.splitlines()[-1] == f"localhost/dioptase:{VERSION} in {tmp_path}/made.tar"
    assert (tmp_path / "made.cdx.json").read_text() == "{}", "the bill of materials is beside the image"
    images = re.findall(r"image: (\S+)", chart.KUSTOMIZE_BASE.read_text())
    assert images == [f"localhost/dioptase:{VERSION}"] * 2


def test_the_settings_that_the_chart_makes_are_settings() -> None:
    """As the base has them, which is what helm made of the templates."""
    manifests = (msgspec.yaml.decode(manifest) for manifest in chart.KUSTOMIZE_BASE.read_text().split("\n---\n"))
    texts = {
        name: text
        for manifest in manifests
        if manifest and manifest["kind"] == "ConfigMap"
        for name, text in manifest["data"].items()
    }
    config = agent_settings(texts["agent.yaml"].encode(), "agent.yaml")
    assert config.exporters.token_review
    controller = parse_settings(texts["controller.yaml"], ControllerConfig)
    assert controller.token_review
    assert controller.health.node_selector == "kubernetes.io/os=linux", "the nodes that have an agent"


def test_the_last_log_lines_of_a_failed_container_are_in_the_pods_status() -> None:
    manifests = [msgspec.yaml.decode(manifest) for manifest in chart.KUSTOMIZE_BASE.read_text().split("\n---\n")]
    policies = {
        manifest["kind"]: [
            container["terminationMessagePolicy"] for container in manifest["spec"]["template"]["spec"]["containers"]
        ]
        for manifest in manifests
        if manifest and manifest["kind"] in ("DaemonSet", "Deployment")
    }
    assert policies == {"DaemonSet": ["FallbackToLogsOnError"], "Deployment": ["FallbackToLogsOnError"]}


def test_every_host_path_has_its_reason_and_nothing_is_privileged() -> None:
    assert "privileged: false" in DAEMONSET
    assert "hostIPC" not in DAEMONSET
    for switch in ("hostPID: true", "hostNetwork: true"):
        (before,) = re.findall(rf"([^\n]*)\n *{switch}", DAEMONSET)
        assert before.strip().startswith("# "), switch


def test_what_is_copied_into_the_image_is_what_is_installed() -> None:
    """Every package of pyproject.toml, and none that only tests or manifests need."""
    include = re.findall(
        r'"([a-z]+)\*"', (ROOT / "pyproject.toml").read_text().split("[tool.setuptools.packages.find]")[1].split("]")[0]
    )
    copied = re.findall(r"^COPY ([a-z]+) /src/", (ROOT / "deploy/Dockerfile").read_text(), re.M)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert sorted(include) == sorted(copied)
    assert all(f"!{name}" in ignored for name in copied)
