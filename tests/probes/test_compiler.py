"""The child's pure parts: which macros a form gets, and the tree that stands in for kernel headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from probes.btf import Btf
from probes.compiler import STUBS, FormRefused, offsets, stub_tree
from tests.probes.blob import sample


def form(**fields: Any) -> dict[str, Any]:
    return {"name": "f", "fields": fields.get("fields", {}), "optional": fields.get("optional", {})}


def test_fields_become_macros() -> None:
    wanted = form(fields={"QUEUED": [("task", "info.queued", 8)], "LEFT": [("task", "left", 4)]})
    assert offsets(Btf(sample()), wanted) == {"QUEUED": 16, "LEFT": 24}


def test_the_first_alternative_that_the_kernel_has_is_taken() -> None:
    wanted = form(fields={"NAME": [("task", "gone", 8), ("task", "right", 4), ("task", "left", 4)]})
    assert offsets(Btf(sample()), wanted) == {"NAME": 28}


def test_a_field_of_another_size_is_another_field() -> None:
    with pytest.raises(FormRefused, match=r"struct task: left has 4 bytes, not 8; .*no member gone"):
        offsets(Btf(sample()), form(fields={"LEFT": [("task", "left", 8), ("task", "gone", 8)]}))


def test_optional_fields_may_be_missing() -> None:
    wanted = form(optional={"GONE": [("task", "gone", 8)], "AFTER": [("task", "after", 4)]})
    assert offsets(Btf(sample()), wanted) == {"AFTER": 60}


def test_a_refusal_carries_the_tail_of_a_long_log() -> None:
    assert FormRefused("load x", "no", 22, "a" * 10_000 + "reason").facts["log"].endswith("reason")
    assert len(FormRefused("load x", "no", 22, "a" * 10_000).facts["log"]) == 1500


def test_the_stub_tree_is_complete_and_can_be_written_twice(tmp_path: Path) -> None:
    stub_tree(tmp_path)
    stub_tree(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.h")} == set(STUBS)
