"""Parsers of text from outside raise nothing, and their CPU time and memory grow no faster than their input."""

from __future__ import annotations

import json

import pytest

from agent.sensors.pods.pod_join import MAX_CONTAINERS, MAX_LABELS, KubeletPodList, decode_pod_list
from api.cpu import parse_cpu_list
from api.qos import NUMA_IDS_KEY
from bench.fuzz_outside import CASES, OutsideCase, ParsingCost, fuzz_outside, measure, parse_pods
from tests.agent.sensors.pods.kubelet_objects import container, listing, pod


def test_hostile_inputs_cost_what_their_size_allows() -> None:
    results = list(fuzz_outside(60, 1))
    assert [result for result in results if isinstance(result, str)] == []
    costs = [result for result in results if isinstance(result, ParsingCost)]
    assert [cost.problem() for cost in costs if cost.problem()] == []
    assert {cost.name for cost in costs} == {case.name for case in CASES}


def test_a_parser_that_is_not_linear_is_noticed() -> None:
    def expand(text: str) -> list[int]:
        """Expand every range, as the parser of CPU lists did."""
        return [cpu for part in text.split(",") if part for cpu in range(*map(int, part.split("-")))]

    case = OutsideCase("old", lambda chance, size: "", expand)
    cost = measure(case, "0-8191," * 400)
    assert "ms of CPU for 2800 bytes" in cost.problem()
    assert "KiB for 2800 bytes" in cost._replace(cpu_ns=0).problem()


def test_a_long_list_of_numa_nodes_is_not_parsed() -> None:
    annotations = {NUMA_IDS_KEY: "0-8191," * 36_000}
    body = listing(pod("web", annotations=annotations))
    (item,) = decode_pod_list(body, KubeletPodList()).items.values()
    assert item.pod.metadata.annotations is not None
    assert measure(CASES[0], body).problem() == ""
    case = OutsideCase("list", lambda _chance, _size: "", parse_cpu_list)
    assert measure(case, annotations[NUMA_IDS_KEY]).problem() == "", "nor would it cost much"


@pytest.mark.parametrize("text", ["9" * 5000, f"0-{'9' * 5000}", f"{'0' * 5000}1"])
def test_numbers_of_a_cpu_list_are_short(text: str) -> None:
    with pytest.raises(ValueError, match="is backwards or beyond CPU 8191"):
        parse_cpu_list(text)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"labels": {f"k{number}": "" for number in range(MAX_LABELS + 1)}},
            "metadata.labels: has 1025 entries, more than 1024",
        ),
        (
            {"annotations": {f"k{number}": "" for number in range(MAX_LABELS)}},
            "metadata.annotations: has 1026 entries, more than 1024",
        ),
        (
            {"containers": [container(f"c{number}") for number in range(MAX_CONTAINERS + 1)]},
            "spec.containers: has 257 entries, more than 256",
        ),
        (
            {"initContainers": [container(f"c{number}") for number in range(MAX_CONTAINERS + 1)]},
            "spec.initContainers: has 257 entries, more than 256",
        ),
    ],
    ids=["labels", "annotations", "containers", "init-containers"],
)
def test_a_pod_with_too_many_parts_is_left_out_and_named(changes: dict[str, object], problem: str) -> None:
    result = decode_pod_list(listing(pod("good"), pod("web", **changes)), KubeletPodList())
    assert list(result.items) == ["uid-good"]
    assert result.problems == (f"items[1] (shop/web).{problem}; remove some",)


def test_a_pod_that_is_too_large_is_left_out_and_named() -> None:
    result = decode_pod_list(listing(pod("good"), pod("web", annotations={"x": "y" * (4 << 20)})), KubeletPodList())
    assert list(result.items) == ["uid-good"]
    assert result.problems == ("items[1] (shop/web): it has more than 4 MiB; make it smaller",)


@pytest.mark.parametrize(
    "number", ["1e999999", "9" * 100_000, "1" + "0" * 100_000, "-1e999999", "1e-999999", "0." + "1" * 100_000]
)
def test_giant_numbers_in_quantities_are_cheap(number: str) -> None:
    document = listing(pod("web", containers=[container("main", resources={"requests": {"cpu": "NUMBER"}})]))
    for text in (document.replace(b'"NUMBER"', number.encode()), document.replace(b"NUMBER", number.encode())):
        cost = measure(CASES[0], text)
        assert cost.problem() == ""


def test_an_answer_of_64_mib_is_refused_or_cheap() -> None:
    item = json.dumps(pod("web", annotations={"x": "y" * 1000})).encode()
    count = (64 << 20) // (len(item) + 2)
    body = b'{"items": [' + b", ".join([item] * min(count, 4096)) + b"]}"
    assert parse_pods(body) == ()
    assert "more than 64 MiB" in parse_pods(body + b" " * (64 << 20))
