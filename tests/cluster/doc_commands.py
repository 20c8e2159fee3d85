"""Runs the fenced commands of a page in their order and compares their output with that of the page.

A block `sh` is one script; `sh until` is repeated until it answers as written, `sh fails` must end badly. The block `text`
after it is its answer, line by line: `…` stands for anything within a line, and alone on one for any number of lines.
"""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.cluster.daemons import PATIENCE, Late, wait

_FENCE = re.compile(r"^```(?P<kind>[a-z ]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


_END = "# the end of this part"


class Step(NamedTuple):
    """One block of commands."""

    line: int
    how: str
    script: str
    answer: str | None


def blocks(page: str) -> list[tuple[int, str, str]]:
    """Return line, kind and text of every fenced block."""
    return [
        (page.count("\n", 0, item.start()) + 1, item["kind"].strip(), item["text"]) for item in _FENCE.finditer(page)
    ]


def steps(page: str) -> Iterator[Step]:
    """Yield the commands, each with its expected output if it has one."""
    result = blocks(page)
    for number, (line, kind, text) in enumerate(result):
        if kind.split(" ")[0] == "sh":
            _, next_kind, next_text = result[number + 1] if number + 1 < len(result) else (0, "", "")
            yield Step(line, kind[3:], text, next_text if next_kind == "text" else None)


def answers(text: str, expected: str) -> bool:
    """Return whether the output is the expected one."""
    parts = []
    for line in expected.rstrip("\n").split("\n"):
        parts.append("(?:.*\n)*" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + "\n")
    return re.fullmatch("".join(parts), text if text.endswith("\n") else f"{text}\n") is not None


def follow(step: Step, settings: Mapping[str, str], folder: Path, seconds: float) -> None:
    """Run one step. Raises AssertionError with the last output."""
    last = [""]

    def once() -> bool:
        done = subprocess.run(
            ["bash", "-eu", "-o", "pipefail", "-c", step.script], check=False, capture_output=True, text=True,
            env=dict(settings), cwd=folder, timeout=120 * PATIENCE,
        )  # fmt: skip
        last[0] = f"{done.stdout}{done.stderr}"
        ended = (done.returncode != 0) is (step.how == "fails")
        return ended and (step.answer is None or answers(last[0], step.answer))

    if step.how != "until":
        assert once(), f"line {step.line}: it said {last[0]!r}"
        return
    try:
        wait(f"line {step.line}", once, seconds)
    except Late as error:
        raise AssertionError(f"{error}; it said {last[0]!r}") from None


class PastingShell:
    """A bash into which a script of a page is pasted part by part, so that a test can look at the cluster between two parts."""

    def __init__(self, settings: Mapping[str, str], folder: Path) -> None:
        self._process = subprocess.Popen(
            ["bash", "-eu", "-o", "pipefail"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env=dict(settings), cwd=folder,
        )  # fmt: skip

    def run(self, part: str, seconds: float) -> str:
        """Return the output of a part. Raises AssertionError if one of its commands fails, or after the timeout."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timeout = threading.Timer(seconds * PATIENCE, self._process.kill)
        timeout.start()
        try:
            self._process.stdin.write(f"{part}\necho '{_END}'\n")
            self._process.stdin.flush()
            output = ""
            for line in self._process.stdout:
                if line == f"{_END}\n":
                    return output
                output += line
        finally:
            timeout.cancel()
        raise AssertionError(f"the script ended with {self._process.wait()} in {part!r}; its output: {output!r}")

    def close(self) -> None:
        """End the bash, which has no command to run any more."""
        self._process.communicate(timeout=60)


def parts(script: str) -> list[str]:
    """Return the parts of a script. Each begins with a numbered comment: `# 2. Label a namespace` is that of the second."""
    return re.split(r"^(?=# \d+\. )", script, flags=re.MULTILINE)[1:]
