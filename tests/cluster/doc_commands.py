"""Runs the fenced commands of a page in their order and compares their output with that of the page.

A block `sh` is one script; `sh until` is repeated until it answers as written, `sh fails` must end badly. The block `text`
after it is its answer, line by line: `…` stands for anything within a line, and alone on one for any number of lines. In a
block `text sample`, each value also stands for any other value, and spaces for any number of spaces.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.cluster.daemons import PATIENCE, Late, wait

_FENCE = re.compile(r"^```(?P<kind>[a-z ]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)

_UNITS = ("µs", "ms", "s", "min", "h", "ms/s", "%", "KiB", "MiB", "GiB")
_ANY_VALUE = rf"\S+(?: (?:{'|'.join(_UNITS)}))?"


class Step(NamedTuple):
    """One block of commands."""

    line: int
    how: str
    script: str
    answer: str | None
    sample: bool = False
    """Whether the values of the answer are examples."""


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
            answered, sample = next_kind in ("text", "text sample"), next_kind == "text sample"
            yield Step(line, kind[3:], text, next_text if answered else None, sample)


def answers(text: str, expected: str, *, sample: bool = False) -> bool:
    """Return whether the output is the expected one; with `sample`, whether only values differ."""
    parts = []
    for line in expected.rstrip("\n").split("\n"):
        if line == "…":
            parts.append("(?:.*\n)*")
        elif sample:
            parts.append(_sample_pattern(line) + "\n")
        else:
            parts.append(_pattern(line) + "\n")
    return re.fullmatch("".join(parts), text if text.endswith("\n") else f"{text}\n") is not None


def _pattern(text: str) -> str:
    return ".*".join(map(re.escape, text.split("…")))


def _sample_pattern(line: str) -> str:
    words, pattern = line.split(), ""
    for number, word in enumerate(words):
        if word in _UNITS and number and _is_value(words[number - 1]):
            continue
        space = r"[^\S\n]*" if word == "…" or not pattern else r"[^\S\n]+"
        pattern += space + (_ANY_VALUE if _is_value(word) else _pattern(word))
    return rf"{pattern}[^\S\n]*"


def _is_value(word: str) -> bool:
    """Whether a word is a number, a name with a generated part, or the sign of an unknown value."""
    return word == "\N{EN DASH}" or ("…" not in word and any(map(str.isdigit, word)))


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
        return ended and (step.answer is None or answers(last[0], step.answer, sample=step.sample))

    if step.how != "until":
        assert once(), f"line {step.line}: it said {last[0]!r}"
        return
    try:
        wait(f"line {step.line}", once, seconds)
    except Late as error:
        raise AssertionError(f"{error}; it said {last[0]!r}") from None
