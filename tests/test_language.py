"""The vocabulary of the field is kept: no denied word, full-sentence docstrings, names that exist once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import language


@pytest.mark.parametrize("path", language.files(), ids=lambda path: str(path.relative_to(language.ROOT)))
def test_names_and_prose_are_the_field_s_words(path: Path) -> None:
    assert [str(violation) for violation in language.violations(path)] == []


def test_public_classes_and_file_names_exist_once() -> None:
    assert language.twins() == []


@pytest.mark.parametrize(
    ("source", "violations"),
    [
        ("told = 1", ["identifier: told"]),
        ("def f(pace): ...", ["identifier: pace"]),
        ('form = "told"', ["label: told"]),
        ('class Tasks:\n    name, form = "tasks", "tended"', ["label: tended"]),
        ('name, form = "evictor", "eviction"', []),
        ("def f(whom): ...", ["identifier: whom"]),
        ("def test_nobody_waits(): ...", ["identifier: test_nobody_waits"]),
        ("class JudgedPods: ...", ["identifier: JudgedPods"]),
        ('"""returns the limit"""', ["docstring: returns the limit"]),
        ('"""Return the limit"""', ["docstring: Return the limit"]),
        ('raise ValueError("the pod whom it kills")', ["word: whom"]),
        ("limit = 1  # nobody reads it", ["word: nobody"]),
        ('"""Return the limit, in bytes."""\nlimit = f("`whom` is quoted code")', []),
        ("NOT_FOUND = withdrawn(household)", []),
    ],
)
def test_the_checker_finds_each_kind_of_violation(source: str, violations: list[str]) -> None:
    found = language.python_violations("x.py", source)
    assert [f"{each.rule}: {each.text}" for each in found] == violations


def test_docstrings_of_functions_are_imperative_in_the_product() -> None:
    source = 'def f():\n    """Opens the file."""\n\n\ndef g():\n    """Open the file."""\n\n\nclass A:\n    """Opens files."""'
    assert [str(each) for each in language.python_violations("agent/x.py", source)] == [
        "agent/x.py:1: mood: Opens the file."
    ]
    assert list(language.python_violations("tests/x.py", source)) == []


def test_variables_of_templates_are_checked() -> None:
    text = "{{- $said := dict -}}{{ $said | toYaml }}{{ $settings }}"
    assert [(each.rule, each.text) for each in language.document_violations("x.tpl", text)] == [("identifier", "said")]


def test_documents_are_checked_outside_of_code_blocks() -> None:
    text = "The pod who waits.\n```\nwho\n```\nRun `who`.\n"
    assert [(each.line, each.text) for each in language.document_violations("x.md", text)] == [(1, "who")]
