"""Every package that builds the product or its tests is pinned by version and hash."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((*ROOT.glob("requirements*.lock"), ROOT / "tests/cluster/go.lock"))
FROM_HERE = "--no-deps --no-build-isolation"
"""Options with which pip builds this tree, and downloads nothing."""


def tracked() -> list[Path]:
    """Return the files of this repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    return [ROOT / name.decode() for name in listed.split(b"\0") if name]


def pip_commands() -> Iterator[tuple[str, str]]:
    """Yield file and command line of every program of this repository that lets pip install or download."""
    for path in tracked():
        if path.suffix in ("", ".py", ".sh") or path.name in ("Makefile", "Dockerfile"):
            try:
                text = path.read_text().replace("\\\n", " ")
            except (UnicodeDecodeError, OSError):
                continue
            for line in text.splitlines():
                for command in re.findall(r"pip(?:\"?,)? \"?(?:install|download|wheel)\b.*?(?:&&|$)", line):
                    yield str(path.relative_to(ROOT)), command


def test_pip_installs_by_hash_or_from_this_tree() -> None:
    texts_only = ("tests/deploy/test_pins.py", "tests/deploy/test_progress.py")
    commands = [(name, command) for name, command in pip_commands() if name not in texts_only]
    assert len(commands) >= 8
    loose = [
        (name, command)
        for name, command in commands
        if not re.search(r"--require-hashes|--no-deps.*--no-build-isolation", command)
    ]
    # Functions there take further options from their callers.
    assert [name for name, _ in loose if name not in ("deploy/vagrant/box", "tests/cluster/binaries.py")] == []
    fetches = re.findall(r"^fetch (.*)$", (ROOT / "deploy/vagrant/box").read_text(), re.M)
    assert fetches
    assert [words for words in fetches if not words.startswith("--require-hashes ")] == []
    assert '"--require-hashes"' in (ROOT / "tests/cluster/binaries.py").read_text()


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_locked_package_has_hashes(path: Path) -> None:
    entries = re.split(r"^(?=[A-Za-z0-9])", path.read_text(), flags=re.M)[1:]
    assert entries
    assert [
        entry.split(maxsplit=1)[0]
        for entry in entries
        if not re.search(r"==\S+.*--hash=sha256:[0-9a-f]{64}", entry, re.S)
    ] == []


def test_the_locks_that_make_lock_writes_are_there() -> None:
    assert {path.name for path in LOCKS} >= {
        "requirements.lock", "requirements-dev.lock", "requirements-build.lock", "requirements-uv.lock", "go.lock",
    }  # fmt: skip
    requested = re.findall(r'^requires = \["(.*)"\]$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert requested == (ROOT / "requirements-build.in").read_text().split()
    pinned = [
        re.search(r"^setuptools==(\S+)", (ROOT / f"requirements-{name}.lock").read_text(), re.M)
        for name in ("build", "dev")
    ]
    assert pinned[0] is not None
    assert pinned[1] is not None
    assert pinned[0][1] == pinned[1][1], "one machine has one version"


def test_every_package_of_the_base_has_version_and_checksum() -> None:
    lines = (ROOT / "deploy/base.lock").read_text().splitlines()
    assert len(lines) > 80
    assert [line for line in lines if not re.fullmatch(r"\S+ \S+ (amd64|all) [0-9a-f]{64}", line)] == []
    assert {"python3-bpfcc", "libc6", "ca-certificates"} <= {line.split()[0] for line in lines}
    script = (ROOT / "deploy/image").read_text()
    assert '"BASE=$base${digest:+@$digest}"' in script
    assert (ROOT / "deploy/Dockerfile").read_text().count("FROM ${BASE}") == 1
