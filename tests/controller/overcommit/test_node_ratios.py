"""Annotations of overcommitted Nodes: Katalyst's own cases (numbered as there), conflicts, and what is removed."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from api.overcommit import CONFIG_KEY, NODE_POOL_LABEL
from controller.kinds import ControllerNode, Noc, NocSpec
from controller.overcommit.node_ratios import (
    annotation_changes,
    config_of,
    config_warnings,
    matched_nodes,
    node_annotations,
    resolve_configs,
)
from kube.objects import KubeMetadata

K = "katalyst.kubewharf.io/"
CPU_16 = {f"{K}original_allocatable_cpu": "15600m", f"{K}original_capacity_cpu": "16"}
MEMORY_1EI = {f"{K}original_allocatable_memory": "1Ei", f"{K}original_capacity_memory": "1Ei"}


def a_config(name: str = "noc", pool: str = "p", created: int = 1, deleted: str | None = None, **ratios: str) -> Noc:
    metadata = KubeMetadata(
        name=name, uid=name, creation_timestamp=f"2026-01-01T00:00:0{created}Z", deletion_timestamp=deleted
    )
    return Noc(metadata=metadata, spec=NocSpec(node_overcommit_selector_val=pool, resource_overcommit_ratio=ratios))


def a_node(name: str = "n1", pool: str | None = "p", **annotations: str) -> ControllerNode:
    labels = {} if pool is None else {NODE_POOL_LABEL: pool}
    texts = {CONFIG_KEY if key == "config" else f"{K}{key}": text for key, text in annotations.items()}
    return ControllerNode(metadata=KubeMetadata(name=name, labels=labels, annotations=texts))


@pytest.mark.parametrize(
    ("ratio", "recommended", "allocatable", "capacity"),
    [
        pytest.param("1.2", {}, "18720m", "19200m", id="34-no-static-manager"),
        pytest.param(
            "1.2", {"overcommit_cpu_manager": "static", "guaranteed_cpus": "x"}, "18720m", "19200m", id="35-unparsable"
        ),
        pytest.param(
            "1.2", {"overcommit_cpu_manager": "static", "guaranteed_cpus": "5"}, "17720m", "18200m", id="36-guaranteed"
        ),
        pytest.param("1.2", {"overcommit_cpu_manager": "none", "guaranteed_cpus": "5"}, "18720m", "19200m", id="none"),
        pytest.param("1.2", {"overcommit_cpu_manager": "static"}, "18720m", "19200m", id="missing"),
        pytest.param("1", {}, "15600m", "16", id="38-one"),
        pytest.param("much", {}, "15600m", "16", id="38-invalid"),
        pytest.param("0.5", {}, "15600m", "16", id="38-below-one"),
        pytest.param("2", {"cpu_overcommit_ratio": "1"}, "15600m", "16", id="41-realtime-one"),
        pytest.param("2", {"cpu_overcommit_ratio": "1.5"}, "23400m", "24", id="realtime-smaller"),
        pytest.param("1.2", {"cpu_overcommit_ratio": "1.5"}, "18720m", "19200m", id="realtime-larger"),
    ],
)
def test_cpu(ratio: str, recommended: Mapping[str, str], allocatable: str, capacity: str) -> None:
    result = node_annotations(a_config(cpu=ratio), CPU_16, {f"{K}{key}": text for key, text in recommended.items()})
    assert result[f"{K}overcommit_allocatable_cpu"] == allocatable
    assert result[f"{K}overcommit_capacity_cpu"] == capacity
    assert result[f"{K}cpu_overcommit_ratio"] == (ratio if ratio in ("1.2", "2", "1") else "1")


def test_37_memory() -> None:
    result = node_annotations(a_config(memory="2"), MEMORY_1EI, {})
    assert result == {
        CONFIG_KEY: "noc",
        f"{K}cpu_overcommit_ratio": "1",
        f"{K}memory_overcommit_ratio": "2",
        f"{K}overcommit_allocatable_memory": "2Ei",
        f"{K}overcommit_capacity_memory": "2Ei",
    }


@pytest.mark.parametrize(
    "originals",
    [{}, {f"{K}original_allocatable_cpu": "16"}, {**CPU_16, f"{K}original_capacity_cpu": "much"}],
    ids=["none", "without-capacity", "invalid"],
)
def test_amounts_need_both_original_amounts(originals: Mapping[str, str]) -> None:
    result = node_annotations(a_config(cpu="2"), originals, {})
    assert result == {CONFIG_KEY: "noc", f"{K}cpu_overcommit_ratio": "2", f"{K}memory_overcommit_ratio": "1"}


def test_recommended_ratios_are_copied_unless_they_are_invalid() -> None:
    recommended = {f"{K}cpu_overcommit_ratio": "1.35", f"{K}memory_overcommit_ratio": "x" * 10_000}
    result = node_annotations(a_config(cpu="2", memory="2"), {}, recommended)
    assert result[f"{K}realtime_cpu_overcommit_ratio"] == "1.35"
    assert result[f"{K}realtime_memory_overcommit_ratio"] == "1"


def test_39_the_newest_of_two_for_one_pool_is_in_force() -> None:
    older, newer = a_config("older", created=1), a_config("newer", created=2)
    other = a_config("other", pool="q", created=0)
    in_force = resolve_configs([newer, other, older])
    assert {pool: config.metadata.name for pool, config in in_force.items()} == {"p": "newer", "q": "other"}
    nodes = [a_node("n2"), a_node("n1"), a_node("n3", pool="q"), a_node("n4", pool=None), a_node("n5", pool="r")]
    assert matched_nodes(nodes, in_force) == {"newer": ["n1", "n2"], "other": ["n3"]}
    (warning,) = config_warnings(older, in_force)
    assert warning.reason == "Superseded"
    assert "'p' is also the pool of the newer newer" in warning.message
    assert config_warnings(newer, in_force) == []


def test_equal_times_are_ordered_by_name_and_deleted_configurations_are_not_in_force() -> None:
    first, second = a_config("a", created=1), a_config("b", created=1)
    assert resolve_configs([second, first])["p"] is second
    deleted = a_config("c", created=3, deleted="2026-01-01T00:01:00Z")
    assert resolve_configs([deleted, first])["p"] is first
    assert config_of(a_node(), resolve_configs([deleted])) is None


def test_a_node_without_a_label_matches_no_empty_pool() -> None:
    in_force = resolve_configs([a_config(pool="")])
    assert config_of(a_node(pool=None), in_force) is None
    assert config_of(a_node(pool=""), in_force) is in_force[""]


def test_changes_are_only_differences() -> None:
    config = a_config(cpu="2")
    node = a_node(original_allocatable_cpu="8", original_capacity_cpu="8")
    changes = annotation_changes(node, config, {})
    assert changes == {
        CONFIG_KEY: "noc",
        f"{K}cpu_overcommit_ratio": "2",
        f"{K}memory_overcommit_ratio": "1",
        f"{K}overcommit_allocatable_cpu": "16",
        f"{K}overcommit_capacity_cpu": "16",
    }
    after = {**node.metadata.annotations, **{key: text for key, text in changes.items() if text}}
    written = ControllerNode(metadata=KubeMetadata(name="n1", labels=node.metadata.labels, annotations=after))
    assert annotation_changes(written, config, {}) == {}
    assert annotation_changes(written, a_config(cpu="3"), {}) == {
        f"{K}cpu_overcommit_ratio": "3",
        f"{K}overcommit_allocatable_cpu": "24",
        f"{K}overcommit_capacity_cpu": "24",
    }


def test_what_has_lost_its_input_is_removed() -> None:
    node = a_node(config="noc", cpu_overcommit_ratio="2", memory_overcommit_ratio="1", realtime_cpu_overcommit_ratio="1.5",
                  overcommit_allocatable_cpu="16", overcommit_capacity_cpu="16")  # fmt: skip
    assert annotation_changes(node, a_config(cpu="2"), {}) == {
        f"{K}realtime_cpu_overcommit_ratio": None,
        f"{K}overcommit_allocatable_cpu": None,
        f"{K}overcommit_capacity_cpu": None,
    }


def test_without_a_configuration_everything_is_removed_but_the_original_amounts() -> None:
    node = a_node(config="noc", cpu_overcommit_ratio="2", original_allocatable_cpu="8", overcommit_allocatable_cpu="16")
    assert annotation_changes(node, None, {f"{K}cpu_overcommit_ratio": "1.5"}) == {
        CONFIG_KEY: None,
        f"{K}cpu_overcommit_ratio": None,
        f"{K}overcommit_allocatable_cpu": None,
    }


def test_ratios_that_an_administrator_wrote_stay_without_a_configuration() -> None:
    assert annotation_changes(a_node(cpu_overcommit_ratio="2", overcommit_allocatable_cpu="80"), None, {}) == {}


def test_invalid_ratios_are_reported_with_field_and_remedy() -> None:
    config = a_config(cpu="0.5", memory="1.5", gpu="2")
    first, second = config_warnings(config, resolve_configs([config]))
    assert (first.reason, second.reason) == ("InvalidRatio", "InvalidRatio")
    assert first.message == (
        "spec.resourceOvercommitRatio.cpu: '0.5' counts as 1, so that the nodes are not overcommitted; write a number of at"
        " least 1 such as 1.5"
    )
    assert "spec.resourceOvercommitRatio.gpu" in second.message
    assert "only cpu and memory can be overcommitted" in second.message
    hostile = a_config(**{"x" * 100_000: "y" * 100_000})
    assert all(len(warning.message) < 400 for warning in config_warnings(hostile, {}))
