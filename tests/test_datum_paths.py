"""The paths of docs/architecture.md: short, made of files that exist, and walkable from the agent's composition root."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = (ROOT / "docs/architecture.md").read_text()
ROOTS = ("agent/__main__.py", "agent/components.py")
MAX_FILES = {
    "The path of a run-queue wait": 20,
    "The path of an eviction": 18,
    "The path of a configuration value": 12,
}


def steps(title: str) -> dict[str, str]:
    """The text of each step by file, in order."""
    section = DOCUMENT.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w./]+)` \| (.+) \|$", section, re.MULTILINE)
    assert len(dict(rows)) == len(rows), "a file is listed twice"
    return dict(rows)


def imported_files(file: str) -> set[str]:
    """Files that a file imports or includes, and the sources that go with it: a probe's C, a server's script."""
    path = ROOT / file
    text = path.read_text()
    if path.suffix == ".js":
        return {str(Path(file).parent / name) for name in re.findall(r'from "/static/([\w.]+)"', text)}
    if path.suffix != ".py":
        return {str(Path(file).parent / name) for name in re.findall(r'#include "([\w.]+)"', text)}
    modules = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    files = {f"{module.replace('.', '/')}.py" for module in modules}
    program = path.with_suffix(".bpf.c")
    own = {str(program.relative_to(ROOT))} if program.exists() else set()
    own |= {str((path.parent / name).relative_to(ROOT)) for name in re.findall(r'"([\w.]+\.bpf\.h)"', text)}
    if '"static"' in text:
        own |= {str(script.relative_to(ROOT)) for script in (path.parent / "static").glob("*.js")}
    return files | own


def reachable(files: set[str]) -> set[str]:
    """The files that imports lead to from the composition root, through no other files than these."""
    reached, pending = set(ROOTS), list(ROOTS)
    while pending:
        for file in imported_files(pending.pop()) & files - reached:
            reached.add(file)
            pending.append(file)
    return reached & files


def defined_names(file: str) -> set[str]:
    """Names that a file defines at any level."""
    text = (ROOT / file).read_text()
    if not file.endswith(".py"):
        return set(re.findall(r"\b(\w+)\s*\(", text))
    names = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    return names


@pytest.mark.parametrize("title", MAX_FILES)
def test_a_path_is_short_and_can_be_walked_from_the_composition_root(title: str) -> None:
    path = steps(title)
    assert 5 < len(path) <= MAX_FILES[title]
    assert not [file for file in path if not (ROOT / file).exists()]
    assert set(path) - reachable(set(path)) == set()


@pytest.mark.parametrize("title", MAX_FILES)
def test_every_step_names_what_its_file_defines(title: str) -> None:
    for file, step in steps(title).items():
        symbols = set(re.findall(r"`(\w+)`", step))
        assert not symbols - defined_names(file) or file.endswith(".js"), f"{file} does not define {symbols}"


def test_an_unreachable_file_is_noticed() -> None:
    lonely = "agent/eviction/plugins/rss_overuse.py"
    assert lonely not in reachable({lonely, "agent/loop.py"})
