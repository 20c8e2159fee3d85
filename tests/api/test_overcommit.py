"""Ratios and amounts of overcommitted nodes: Katalyst's cases, and quantities at the limits."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.overcommit import OVERCOMMIT_KEYS, effective_ratio, overcommit_cpu, overcommit_memory, parse_ratio
from api.quantity import parse_quantity

CPU = OVERCOMMIT_KEYS["cpu"]


def test_the_annotations_have_katalysts_names() -> None:
    prefix = "katalyst.kubewharf.io/"
    assert CPU.ratio == f"{prefix}cpu_overcommit_ratio"
    assert CPU.realtime_ratio == f"{prefix}realtime_cpu_overcommit_ratio"
    assert OVERCOMMIT_KEYS["memory"].original_allocatable == f"{prefix}original_allocatable_memory"
    assert OVERCOMMIT_KEYS["memory"].overcommit_capacity == f"{prefix}overcommit_capacity_memory"


@pytest.mark.parametrize(
    ("text", "ratio"),
    [
        ("1", "1"), ("1.5", "1.5"), ("2", "2"), ("1.0", "1.0"),
        ("0.9", None), ("0", None), ("-2", None), ("", None), ("abc", None), ("nan", None), ("inf", None), ("1e3", None),
        (" 2", None), ("2\n", None), ("٢", None), ("9" * 100, None),
    ],
)  # fmt: skip
def test_a_ratio_is_a_plain_number_of_at_least_one(text: str, ratio: str | None) -> None:
    assert parse_ratio(text) == (None if ratio is None else Decimal(ratio))


@pytest.mark.parametrize(
    ("configured", "realtime", "ratio"),
    [
        ("2", None, "2"), ("2", "1.5", "1.5"), ("2", "1", "1"), ("1.5", "3", "1.5"), (None, "3", "1"), ("abc", None, "1"),
        ("2", "0.5", "1"), ("2", "abc", "1"),
    ],
)  # fmt: skip
def test_the_smaller_ratio_counts(configured: str | None, realtime: str | None, ratio: str) -> None:
    pairs = {CPU.ratio: configured, CPU.realtime_ratio: realtime}
    annotations = {key: text for key, text in pairs.items() if text is not None}
    assert effective_ratio(annotations, CPU) == Decimal(ratio)


@pytest.mark.parametrize(
    ("original", "ratio", "guaranteed_cpus", "expected"),
    [
        ("15600m", "1.2", 0, "18720m"),
        ("16", "2", 8, "24"),
        ("16", "2", 0, "32"),
        ("16", "1", 8, "16"),
        ("16", "2", 20, "16"),
        ("16", "2", -4, "32"),
        ("3333m", "1.1", 0, "3666m"),
        ("0", "2", 1, "0"),
    ],
)
def test_pinned_cpus_are_not_multiplied(original: str, ratio: str, guaranteed_cpus: int, expected: str) -> None:
    assert overcommit_cpu(original, Decimal(ratio), guaranteed_cpus) == expected


@pytest.mark.parametrize(
    ("original", "ratio", "expected"),
    [
        ("1Ei", "2", "2Ei"),
        ("16Gi", "1.5", "24Gi"),
        ("16374512Ki", "1.5", "24561768Ki"),
        ("1Ki", "1.5", "1536"),
        ("1000", "1.5", "1500"),
        ("16G", "1.5", "24000000000"),
        ("0Gi", "2", "0"),
        ("7Ei", "2", str((1 << 63) - 1)),
    ],
)
def test_memory_stays_in_its_notation_and_below_the_largest_quantity(original: str, ratio: str, expected: str) -> None:
    assert overcommit_memory(original, Decimal(ratio)) == expected


@given(st.integers(0, 1 << 40), st.integers(100, 1000), st.integers(0, 200))
def test_amounts_never_shrink_and_ratio_one_changes_nothing(amount: int, percent: int, guaranteed_cpus: int) -> None:
    ratio = Decimal(percent) / 100
    millis = parse_quantity(overcommit_cpu(f"{amount}m", ratio, guaranteed_cpus)) * 1000
    assert amount <= millis <= amount * ratio
    assert parse_quantity(overcommit_cpu(f"{amount}m", Decimal(1), guaranteed_cpus)) * 1000 == amount
    assert parse_quantity(overcommit_memory(f"{amount}Ki", Decimal(1))) == amount * 1024
