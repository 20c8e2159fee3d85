"""Runs every benchmark and assembles bench/RESULTS.md from their sections; `--assemble` only assembles the page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BENCHMARKS = (
    "probe_cost",
    "event_cost",
    "cycle_cost",
    "agent_cost",
    "peers",
    "cluster",
    "scheduler_latency",
    "scheduler_throughput",
    "colocation",
    "colocation_flat",
    "predictors",
    "scheduler_plugins",
    "day",
    "webhook_latency",
    "soak",
    "churn",
    "fuzz",
)
COMMANDS = {"colocation_flat": ("bench.colocation", "--layout", "flat")}
"""Module and options of the benchmarks that are no module of their own name."""
README_MARKS = ("<!-- bench/results/colocation.summary.md -->", "<!-- end -->")
HEAD = """# Results

Measured by `make bench`; each section says when and on what. These machines are shared and noisy: compare numbers within a
section, which were measured side by side in one run, and trust ratios more than values.
"""


def assemble() -> None:
    """Join the sections to bench/RESULTS.md, and put the colocation table into the README.

    A benchmark without results has a note instead.
    """
    parts = [HEAD]
    for name in BENCHMARKS:
        section = HERE / "results" / f"{name}.md"
        text = section.read_text() if section.exists() else f"## {name}\n\nNot measured yet.\n"
        # Sections are next to their pictures in results/; the page is one directory above.
        parts.append(text.replace(f"]({name}.", f"](results/{name}."))
    (HERE / "RESULTS.md").write_text("\n".join(part.strip() + "\n" for part in parts))
    summary = HERE / "results/colocation.summary.md"
    if summary.exists():
        readme = HERE.parent / "README.md"
        readme.write_text(with_summary(readme.read_text(), summary.read_text()))


def with_summary(readme: str, summary: str) -> str:
    """Return the README with the table of the colocation benchmark between its marks; unchanged without marks."""
    begin, end = README_MARKS
    before, mark, rest = readme.partition(begin)
    _, end_mark, after = rest.partition(end)
    return f"{before}{begin}\n{summary.strip()}\n{end}{after}" if mark and end_mark else readme


def main(arguments: list[str]) -> int:
    """Run all benchmarks and assemble the page from those that succeeded; the exit status is 1 if one failed."""
    if unknown := [argument for argument in arguments if argument != "--assemble"]:
        print(
            f"unknown argument {unknown[0]!r}; one bench alone takes options: python -m bench.colocation --help",
            file=sys.stderr,
        )
        return 2
    failed = []
    for name in BENCHMARKS if "--assemble" not in arguments else ():
        print(f"== {name}", flush=True)
        if subprocess.run(
            [sys.executable, "-m", *COMMANDS.get(name, (f"bench.{name}",))], cwd=HERE.parent, check=False
        ).returncode:
            failed.append(name)
    assemble()
    print(f"wrote {HERE / 'RESULTS.md'}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
