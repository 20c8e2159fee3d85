"""Selectors against labels and against each other; the numbers are those of Katalyst's own tables of cases."""

from __future__ import annotations

import contextlib
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.label_selectors import parse_selector, selectors_overlap


@pytest.mark.parametrize(
    ("text", "labels", "expected"),
    [
        ("", {}, True),
        ("  ", {}, True),
        ("a=b", {"a": "b"}, True),
        ("a==b", {"a": "b"}, True),
        ("a = b , c = d", {"a": "b", "c": "d"}, True),
        ("a=b,c=d", {"a": "b"}, False),
        ("a!=b", {}, True),
        ("a!=b", {"a": "b"}, False),
        ("a in (b, c)", {"a": "c"}, True),
        ("a in(b)", {"a": "b"}, True),
        ("a notin (b,c)", {"a": "d"}, True),
        ("a notin (b,c)", {"a": "c"}, False),
        ("a", {"a": ""}, True),
        ("a", {}, False),
        ("!a", {}, True),
        ("! a", {"a": "x"}, False),
        ("a=", {"a": ""}, True),
        ("a=", {}, False),
        ("node.kubernetes.io/instance-type=m5.large", {"node.kubernetes.io/instance-type": "m5.large"}, True),
        ("in in (in)", {"in": "in"}, True),
        ("inside=b", {"inside": "b"}, True),
    ],
)
def test_matching(text: str, labels: dict[str, str], expected: bool) -> None:
    assert parse_selector(text).matches(labels) is expected


@pytest.mark.parametrize(
    "text",
    ["=", "a=b,", ",", ",a", "a=b=c", "a b", "a in b", "a in (b", "a>5", "a<5", "a=b c=d", "a in ((b))", "!", "a=ü", "-a=b",
     "a/b/c=d", "a=b;c=d", "A/x=b", "a" * 64 + "=b", "a=" + "b" * 64, "a=b," * 2000],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_an_invalid_selector_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"selector|comma|label"):
        parse_selector(text)


@given(st.text(alphabet="ab,=!() in<>\t\n", max_size=30))
def test_any_text_is_a_selector_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        parse_selector(text).matches({"a": "b"})


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("l=aa", "l=bb", False),
        ("l=aa", "l!=bb", True),
        ("l=aa", "l in (aa,bb)", True),
        ("l1=aa", "l1 in (aa,bb),l2=cc", True),
        ("l1=aa", "l2=bb", True),
        ("l1 in (aa),l2 notin (bb,cc)", "l1 notin (cc,dd),l2 notin (cc)", True),
        ("l1 notin (aa)", "l1=cc", True),
        ("l1 notin (aa)", "l1=aa", False),
        ("l", "!l", False),
        ("!l", "l!=aa", True),
        ("l=aa,l=bb", "m=cc", False),
        ("", "l=aa", True),
        ("l1=aa,l2=x", "l1=aa,l2=y", False),
    ],
)
def test_overlap(first: str, second: str, expected: bool) -> None:
    assert selectors_overlap(parse_selector(first), parse_selector(second)) is expected
    assert selectors_overlap(parse_selector(second), parse_selector(first)) is expected


TERMS = st.sampled_from(["a=x", "a!=x", "a in (x,y)", "a notin (x,y)", "a", "!a", "b=x", "b!=y", "b in (y,z)", "!b"])


@given(st.lists(TERMS, max_size=3), st.lists(TERMS, max_size=3))
def test_selectors_overlap_exactly_when_some_labels_match_both(first: list[str], second: list[str]) -> None:
    first, second = parse_selector(",".join(first)), parse_selector(",".join(second))
    values = (None, "x", "y", "z", "w")
    nodes = [{k: v for k, v in (("a", a), ("b", b)) if v is not None} for a, b in product(values, values)]
    assert selectors_overlap(first, second) is any(first.matches(labels) and second.matches(labels) for labels in nodes)
