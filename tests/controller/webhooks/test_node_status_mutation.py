"""Overcommitted Nodes: the rows of Katalyst's table, and a history of statuses that must not compound."""

from __future__ import annotations

import random
from decimal import Decimal
from typing import Any

import pytest

from controller.webhooks.node_status_mutation import mutate_node_status, overcommitted_amount
from tests.controller.webhooks.reviews import a_review, apply_patch

K = "katalyst.kubewharf.io"


def a_node(cpu: str, memory: str, annotations: dict[str, str] | None = None) -> Any:
    amounts = {"cpu": cpu, "memory": memory, "pods": "110"}
    return {
        "metadata": {"annotations": annotations or {}},
        "status": {"capacity": dict(amounts), "allocatable": dict(amounts)},
    }


def written(new: Any, old: Any) -> Any:
    """Return the Node that the API server stores."""
    review = a_review(new, operation="UPDATE", namespace="", resource=("", "v1", "nodes"), old=old)
    return apply_patch(new, mutate_node_status(review).patch)


@pytest.mark.parametrize(
    ("resource", "original", "ratio", "computed", "expected"),
    [
        ("cpu", "15600m", "1.2", None, "18720m"),
        ("memory", "1Ei", "2", None, "2Ei"),
        ("cpu", "15600m", "1", None, "15600m"),
        ("cpu", "40", "1.5", "80", "80"),
        ("cpu", "40", "1.5", "20", "60"),
        ("cpu", "40", "1.5", "many", "40"),
        ("cpu", "16", "2", None, "32"),
        ("cpu", "1001m", "1.0005", None, "1001m"),
        ("memory", "1000", "1.0015", None, "1001"),
    ],
)
def test_amounts(resource: str, original: str, ratio: str, computed: str | None, expected: str) -> None:
    """Rows 34, 37, 38 and 42; truncated to milli-CPUs and bytes."""
    assert overcommitted_amount(resource, original, Decimal(ratio), computed) == expected


@pytest.mark.parametrize(
    ("annotations", "cpu"),
    [
        ({}, "16"),
        ({f"{K}/cpu_overcommit_ratio": "2"}, "32"),
        ({f"{K}/cpu_overcommit_ratio": "0.5"}, "16"),
        ({f"{K}/cpu_overcommit_ratio": "two"}, "16"),
        ({f"{K}/cpu_overcommit_ratio": "2", f"{K}/realtime_cpu_overcommit_ratio": "1"}, "16"),
        ({f"{K}/cpu_overcommit_ratio": "2", f"{K}/realtime_cpu_overcommit_ratio": "1.5"}, "24"),
        ({f"{K}/cpu_overcommit_ratio": "2", f"{K}/realtime_cpu_overcommit_ratio": "3"}, "32"),
        ({f"{K}/cpu_overcommit_ratio": "2", f"{K}/overcommit_allocatable_cpu": "28"}, "28"),
        ({f"{K}/overcommit_allocatable_cpu": "28"}, "16"),
    ],
)
def test_allocatable_by_annotations(annotations: dict[str, str], cpu: str) -> None:
    """Rows 38, 41 and 42: the smaller ratio counts, and the controller's amount before the ratio."""
    node = a_node("16", "1Gi", annotations)
    stored = written(node, a_node("16", "1Gi", annotations))
    assert stored["status"]["allocatable"] == {"cpu": cpu, "memory": "1Gi", "pods": "110"}
    has_original = stored["metadata"]["annotations"].get(f"{K}/original_allocatable_cpu")
    assert has_original == ("16" if f"{K}/cpu_overcommit_ratio" in annotations else None)


def test_a_random_history_never_compounds() -> None:
    """After every status the amounts are those of the machine times the ratio, whichever client wrote it."""
    chooser = random.Random(7)
    real, ratio = "16", "2"
    stored = a_node(real, "1Gi", {f"{K}/cpu_overcommit_ratio": ratio})
    seen_by_kubelet = real
    for _ in range(500):
        event = chooser.choice(["kubelet", "kubelet", "other", "ratio", "resize"])
        if event == "ratio":
            ratio = chooser.choice(["1", "1.25", "1.5", "3"])
            stored["metadata"]["annotations"][f"{K}/cpu_overcommit_ratio"] = ratio
        elif event == "resize":
            # To 17 and 23: a machine that grows exactly to the overcommitted amount looks like an unchanged one.
            real = chooser.choice(["16", "17", "23"])
        new = a_node(stored["status"]["capacity"]["cpu"], "1Gi", dict(stored["metadata"]["annotations"]))
        if event in ("kubelet", "resize"):
            new["status"]["capacity"]["cpu"] = new["status"]["allocatable"]["cpu"] = seen_by_kubelet = real
        stored = written(new, stored)
        expected = Decimal(seen_by_kubelet) * Decimal(ratio) * 1000
        capacity = stored["status"]["capacity"]["cpu"]
        assert Decimal(capacity.removesuffix("m")) * (1 if capacity.endswith("m") else 1000) == expected
        assert stored["metadata"]["annotations"][f"{K}/original_capacity_cpu"] == seen_by_kubelet


def test_a_machine_that_was_resized_is_multiplied_by_the_ratio_until_the_controller_has_seen_it() -> None:
    annotations = {
        f"{K}/cpu_overcommit_ratio": "2", f"{K}/original_capacity_cpu": "16", f"{K}/overcommit_capacity_cpu": "30",
        f"{K}/original_allocatable_cpu": "16", f"{K}/overcommit_allocatable_cpu": "30",
    }  # fmt: skip
    stored = written(a_node("20", "1Gi", annotations), a_node("30", "1Gi", annotations))
    assert stored["status"]["capacity"]["cpu"] == "40"
    assert stored["metadata"]["annotations"][f"{K}/original_capacity_cpu"] == "20"


def test_everything_is_undone_with_the_ratio() -> None:
    annotations = {f"{K}/original_{field}_{name}": amount for field in ("capacity", "allocatable") for name, amount in
                   (("cpu", "16"), ("memory", "1Gi"))}  # fmt: skip
    stored = written(a_node("32", "2Gi", annotations), a_node("32", "2Gi", annotations))
    assert stored == {"metadata": {}, "status": a_node("16", "1Gi")["status"]}
