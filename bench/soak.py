"""Checks that the agent does not grow or fail while hundreds of cgroups per second are created and removed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from agent.sensors.cgroup.hierarchy import Hierarchy, detect_hierarchy
from api.interfaces import Unavailable
from api.units import NS_PER_MS
from bench.machine import (
    bench_parser,
    cpu_ns_of,
    end_cleanly_on_sigterm,
    markdown_table,
    memory_kib_of,
    report_faults,
    wait_until_ready,
    write_results,
)
from cli.agent_process import AgentExited, AgentProcess, free_port
from exporters.view.cycle_view import View

PARENT = "dioptase-bench-soak"
MOST_GROWTH_MIB, MOST_GROWTH_FDS = 4.0, 16
"""Limits of growth between the halves of the churn; they allow for allocator noise and cgroups in transition."""
EXPECTED = ("open-files",)
"""Sources that may fail: thousands of cgroups may need more descriptors than the hard limit; files are then reopened."""
CHURN = """
import os, sys, time
parents, rate, prefix = sys.argv[3:], int(sys.argv[1]), sys.argv[2]

def live_in(group):
    with open(f"{group}/cgroup.procs", "w") as procs:
        procs.write("0")
    time.sleep(0.0001)

created, began, reported = 0, time.monotonic(), time.monotonic()
alive = []
while True:
    while created < (time.monotonic() - began) * rate:
        name = f"{prefix}{created}"
        for parent in parents:
            os.mkdir(f"{parent}/{name}")
        live_in(f"{parents[0]}/{name}")
        live_in(parents[0])
        alive.append(name)
        created += 1
        if time.monotonic() - reported >= 1:
            reported = time.monotonic()
            print(created, flush=True)
        if len(alive) > 20:
            name = alive.pop(0)
            for parent in parents:
                os.rmdir(f"{parent}/{name}")
    time.sleep(0.005)
"""


class AgentSample(msgspec.Struct, frozen=True, kw_only=True):
    """The agent at one time, and its cycles since the previous sample."""

    phase: str
    rss_mib: float
    descriptors: int
    cpu_ms: float
    """Milliseconds a second."""
    rounds: int
    errors: tuple[str, ...]
    """Errors of sources, each once."""


class SoakRun(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run."""

    at_rest: int
    rate: float
    """Cgroups created, entered by a task and removed in a second."""
    seconds: float
    """Duration of each phase."""
    looks: tuple[AgentSample, ...]

    def growth(self) -> tuple[float, int]:
        """Return the growth between the halves of the churn: MiB and descriptors."""
        first, second = (look for look in self.looks if look.phase.startswith("churn"))
        return second.rss_mib - first.rss_mib, second.descriptors - first.descriptors

    def faults(self) -> list[str]:
        """Return the reasons of a failure; empty if the run passed."""
        mib, descriptors = self.growth()
        results = [f"{look.phase}: {error}" for look in self.looks for error in look.errors]
        results += [f"{look.phase}: no cycle" for look in self.looks if not look.rounds]
        if mib > MOST_GROWTH_MIB:
            results.append(f"memory grew by {mib:.1f} MiB")
        if descriptors > MOST_GROWTH_FDS:
            results.append(f"{descriptors} more descriptors are open")
        return results


@contextmanager
def idle_cgroups(hierarchy: Hierarchy, count: int) -> Iterator[None]:
    """Create `count` empty cgroups in every tree; remove them at the end."""
    mounts = dict.fromkeys((*hierarchy.v1.values(), *((hierarchy.v2,) if hierarchy.v2 else ())))
    roots = [mount / PARENT for mount in mounts]
    for root in roots:
        _remove(root)
    try:
        for root in roots:
            root.mkdir()
            for index in range(count):
                (root / f"rest{index}").mkdir()
        yield
    finally:
        for root in roots:
            _remove(root)


def _churn_cgroups(hierarchy: Hierarchy) -> list[Path]:
    # The primary tree, and those whose files are the most expensive ones.
    trees = (hierarchy.primary, hierarchy.v1.get("memory"), hierarchy.v2)
    return [tree / PARENT for tree in dict.fromkeys(trees) if tree is not None]


def _remove(root: Path) -> None:
    if root.exists():
        for child in root.iterdir():
            if child.is_dir():
                child.rmdir()
        root.rmdir()


def run_soak(hierarchy: Hierarchy, at_rest: int, rate: int, seconds: float) -> SoakRun:
    """Measure a phase of rest, two phases of churn, and a phase of rest."""
    with idle_cgroups(hierarchy, at_rest), tempfile.TemporaryDirectory(prefix="dioptase-soak-") as name:
        directory = Path(name)
        (directory / "pods.yaml").write_text("pods: []\n")
        (directory / "config.yaml").write_text(f"maxCgroups: {at_rest + 4096}\n")
        options = ["--pods", str(directory / "pods.yaml"), "--state-dir", str(directory / "state"), "--act", "off"]
        options += ["--config", str(directory / "config.yaml")]
        with (directory / "agent.log").open("wb") as log:
            agent = AgentProcess(options, port=free_port(), output=log)
        try:
            wait_until_ready(agent)
            time.sleep(6.0)  # every slow file has been read once
            sampler = _AgentSampler(agent)
            looks = [sampler.look("rest", seconds)]
            argv = [sys.executable, "-c", CHURN, str(rate), "churn", *map(str, _churn_cgroups(hierarchy))]
            with subprocess.Popen(argv, stdout=subprocess.PIPE) as churn:
                assert churn.stdout is not None
                began = time.monotonic()
                looks.append(sampler.look("churn, first half", seconds, churn))
                looks.append(sampler.look("churn, second half", seconds, churn))
                churn.kill()
                lasted = time.monotonic() - began
                created_count = int(churn.stdout.read().split()[-1])
            looks.append(sampler.look("rest again", seconds))
            return SoakRun(at_rest=at_rest, rate=created_count / lasted, seconds=seconds, looks=tuple(looks))
        finally:
            agent.stop()


class _AgentSampler:
    # Polls the agent's history regularly, because the agent retains only some cycles.
    def __init__(self, agent: AgentProcess) -> None:
        self._agent, self._seq = agent, 0

    def look(self, phase: str, seconds: float, churn: subprocess.Popen[bytes] | None = None) -> AgentSample:
        began, before = time.monotonic(), cpu_ns_of(self._agent.pid)
        self._rounds()
        rounds, errors = 0, dict[str, None]()
        while (left := began + seconds - time.monotonic()) > 0:
            time.sleep(min(2.0, left))
            if churn is not None and churn.poll() is not None:
                raise OSError(f"the churn ended with exit code {churn.returncode}")
            for view in self._rounds():
                rounds += 1
                errors |= dict.fromkeys(
                    f"{s.name}: {s.error}" for s in view.sources if s.name not in EXPECTED and not s.ok
                )
        spent_ms = (cpu_ns_of(self._agent.pid) - before) / NS_PER_MS
        return AgentSample(
            phase=phase,
            rss_mib=memory_kib_of(self._agent.pid) / 1024,
            descriptors=len(list(Path(f"/proc/{self._agent.pid}/fd").iterdir())),
            cpu_ms=spent_ms / (time.monotonic() - began),
            rounds=rounds,
            errors=tuple(errors),
        )

    def _rounds(self) -> list[View]:
        views = msgspec.json.decode(self._agent.get(f"/api/v1/history?after={self._seq}", 10) or b"[]", type=list[View])
        if views:
            self._seq = views[-1].seq
        return views


def markdown(run: SoakRun) -> str:
    """Render the section of bench/RESULTS.md."""
    mib, descriptors = run.growth()
    out = [
        "## Soak",
        "",
        f"{run.at_rest} cgroups at rest, and {run.rate:.0f} created and removed in a second, in the primary trees; a",
        f"task runs in each before it is removed, so that every probe has data on it. Phases of {run.seconds:g} s. Between",
        f"the halves of the churn the agent grew by {mib:.1f} MiB and {descriptors} descriptors.",
        "",
    ]
    heads = ("phase", "CPU ms/s", "RSS MiB", "descriptors", "cycles", "errors of sources")
    rows = [
        (x.phase, f"{x.cpu_ms:.0f}", f"{x.rss_mib:.1f}", f"{x.descriptors}", f"{x.rounds}", f"{len(x.errors)}")
        for x in run.looks
    ]
    return "\n".join([*out, *markdown_table(heads, rows), ""])


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser("soak", __doc__)
    parser.add_argument("--rest", type=int, default=2000)
    parser.add_argument("--rate", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of the four phases")
    args = parser.parse_args(argv)
    end_cleanly_on_sigterm()
    try:
        run = run_soak(detect_hierarchy(), args.rest, args.rate, args.seconds)
    except (Unavailable, AgentExited, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print(markdown(run))
    write_results(args.out, "soak", markdown(run), run)
    return report_faults(run.faults())


if __name__ == "__main__":
    sys.exit(main())
