"""Comparison with Katalyst's definitions, if its Go module is in the module cache: equal except for the listed differences."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.katalyst.crd_schema import crd_manifest
from api.katalyst.kinds import KATALYST_KINDS, KatalystKind
from tests.api.katalyst.instances import fullest, objects
from tests.api.katalyst.structural import Node, nodes

MODULE = "github.com/kubewharf/katalyst-api@v0.5.11-0.20260423040236-f1a2330d266e"
"""What the agent v0.5.47 is built with."""
BASES = Path(os.environ.get("GOMODCACHE") or Path.home() / "go/pkg/mod") / MODULE / "config/crd/bases"
NEWER = ("MemoryBandwidthConfiguration", "PowerManagementConfiguration")
"""Kinds that came after it."""
PRESSURE = ".spec.config.evictionConfig.cpuPressureEvictionConfig.numaCPUPressureEvictionConfig"
OFFLOADING = [f".spec.config.{name}[].configDetail" for name in ("CgroupConfig", "poolNameConfig", "qosLevelConfig")]
USAGE = [
    ".groupMetric[].genericUsage",
    ".groupMetric[].numaUsage[].usage",
    ".nodeMetric.genericUsage",
    ".nodeMetric.numaUsage[].usage",
]
OWN_COLUMNS = ("CustomNodeResource",)
"""Kinds with columns of `kubectl get` that Katalyst's do not have."""
DIFFERENCES = {
    # Fields that came after it, by their names.
    *(("AdminQoSConfiguration", f"{PRESSURE}.{name}: ours alone") for name in (
        "cpuUsageRatioThreshold", "lowerBoundRatio", "reclaimedEvictBoundRatio", "upperBoundRatio",
    )),
    *(("AdminQoSConfiguration", f".spec.config.qrmPluginConfig.cpuPluginConfig.{name}: ours alone") for name in (
        "systemExclusivePool", "systemExclusivePoolShrinkMax", "systemExclusivePoolShrinkMin", "systemExclusivePoolShrinkRatio",
    )),
    ("AdminQoSConfiguration", ".spec.config.fineGrainedResourceConfig.cpuWeightConfig: ours alone"),
    (
        "AdminQoSConfiguration",
        ".spec.config.reclaimedResourceConfig.memoryHeadroomConfig.podRequestLimitAwareConfig: ours alone",
    ),
    *(("TransparentMemoryOffloadingConfiguration", f"{path}.{name}: ours alone") for path in OFFLOADING for name in (
        "maxReclaimSize", "reservedInactiveFile",
    )),
    # Usage became a list of resources, of which cpu and memory are two.
    *(("CustomNodeResource", f".status.nodeMetricStatus{path}{rest}") for path in USAGE for rest in (
        "[]: ours alone", ".cpu: theirs alone", ".memory: theirs alone",
    )),
    # Optional here; Katalyst's schema requires an empty object.
    ("AdminQoSConfiguration", ".spec.config.advisorConfig.cpuAdvisorConfig: requires cpuProvisionConfig"),
}  # fmt: skip
pytestmark = pytest.mark.skipif(
    not BASES.is_dir(), reason=f"Katalyst's module is not in Go's cache: `go mod download {MODULE}`"
)


def peer_crd(kind: KatalystKind) -> Any:
    return msgspec.yaml.decode((BASES / f"{kind.group}_{kind.plural}.yaml").read_text())


def differences(own: Node, other: Node) -> Iterator[str]:
    """What two schemas allow differently, with the paths of the outermost places. Words and orders do not count."""
    mine, its = dict(nodes(own)), dict(nodes(other))
    for alone, name in ((mine.keys() - its.keys(), "ours"), (its.keys() - mine.keys(), "theirs")):
        yield from (f"{path}: {name} alone" for path in alone if not alone & above(path))
    for path in mine.keys() & its.keys():
        own_node, peer_node = mine[path], its[path]
        # A field with a default is never missing.
        missing = {name for name in peer_node.get("required", []) if "default" not in peer_node["properties"][name]}
        yield from (f"{path}: requires {name}" for name in missing ^ set(own_node.get("required", [])))
        if _bounds(own_node) != _bounds(peer_node):
            yield f"{path}: {_bounds(own_node)} is {_bounds(peer_node)}"


def above(path: str) -> set[str]:
    """Every place that this one is in."""
    return {path[: differing.start()] for differing in re.finditer(r"\.|\[\]", path)}


def _bounds(node: Node) -> Node:
    keywords = {
        key: value for key, value in node.items() if key not in ("description", "properties", "items", "required")
    }
    keywords = {key: value for key, value in keywords.items() if key != "additionalProperties"}
    keywords |= {"enum": sorted(node["enum"])} if "enum" in node else {}
    return keywords | ({"pattern": "some"} if "pattern" in node else {})


@pytest.mark.parametrize(
    "kind", [kind for kind in KATALYST_KINDS if kind.kind not in NEWER], ids=lambda kind: kind.kind
)
def test_definitions_are_katalysts_but_for_what_is_listed(kind: KatalystKind) -> None:
    own, other = crd_manifest(kind, {})["spec"], peer_crd(kind)["spec"]
    differing = set()
    for version, peer in zip(own.pop("versions"), other.pop("versions"), strict=True):
        schema, peers = version.pop("schema")["openAPIV3Schema"], peer.pop("schema")["openAPIV3Schema"]
        if kind.kind in OWN_COLUMNS:
            assert version.pop("additionalPrinterColumns")
        assert version == peer
        differing |= {(kind.kind, difference) for difference in differences(schema, peers)}
    assert own == other
    assert differing == {(name, difference) for name, difference in DIFFERENCES if name == kind.kind}


@pytest.mark.parametrize(
    "kind", [kind for kind in KATALYST_KINDS if kind.kind not in NEWER], ids=lambda kind: kind.kind
)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_objects_of_katalysts_come_out_as_they_went_in(kind: KatalystKind, data: st.DataObject) -> None:
    for version, peer in zip(kind.versions, peer_crd(kind)["spec"]["versions"], strict=True):
        schema = peer["schema"]["openAPIV3Schema"]
        full = {name: fullest(node) for name, node in schema["properties"].items() if name in ("spec", "status")}
        head = {"apiVersion": "a/v1", "kind": kind.kind, "metadata": {"name": "b"}}
        for given_object in (head | full, data.draw(objects(schema, "a/v1", kind.kind))):
            decoded = msgspec.json.decode(json.dumps(given_object), type=version.type)
            assert json.loads(msgspec.json.encode(decoded)) == given_object


def pairs_of_patterns() -> set[tuple[str, str]]:
    """Ours and theirs, wherever both have one."""
    differing = set()
    for kind in KATALYST_KINDS:
        if kind.kind in NEWER or not BASES.is_dir():
            continue
        for own, other in zip(
            crd_manifest(kind, {})["spec"]["versions"], peer_crd(kind)["spec"]["versions"], strict=True
        ):
            peers = dict(nodes(other["schema"]["openAPIV3Schema"]))
            for path, node in nodes(own["schema"]["openAPIV3Schema"]):
                if "pattern" in node and "pattern" in peers.get(path, {}):
                    differing.add((node["pattern"], peers[path]["pattern"]))
    return differing


@pytest.mark.parametrize(("own", "other"), sorted(pairs_of_patterns()))
@given(data=st.data())
def test_patterns_allow_the_same_texts(own: str, other: str, data: st.DataObject) -> None:
    mine, its = re.compile(own, re.ASCII), re.compile(other, re.ASCII)
    text = data.draw(st.from_regex(mine) | st.from_regex(its) | st.text("0189.%+-ekKmMGiE", max_size=6))
    assert bool(mine.search(text)) == bool(its.search(text))
