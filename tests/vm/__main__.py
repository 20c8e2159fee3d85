"""`python -m tests.vm`: boot a kernel and run the tests of one or more marks, or a command, in it.

The exit status is that of the tests or the command; 125 if the guest panicked, hung, or came back without its results.
"""

from __future__ import annotations

import argparse
import fcntl
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tests.vm.kernels import METAPACKAGES, Missing, obtain
from tests.vm.machine import LOST, ROOT, USUAL, Shape, run


class Boot(NamedTuple):
    """Machine and time limit of the tests of one mark."""

    shape: Shape
    timeout_s: float


BOOTS = {
    "vm": Boot(USUAL, timeout_s=1500),
    "vm_probes": Boot(USUAL, timeout_s=1500),
    "vm_disk": Boot(USUAL, timeout_s=900),
    "vm_four": Boot(Shape(cpus=8, nodes=4, memory_mib=4096), timeout_s=900),
    "vm_big": Boot(Shape(cpus=48, nodes=2, memory_mib=4096), timeout_s=900),
    "vm_systemd": Boot(Shape(nodes=1, memory_mib=4096, systemd=True), timeout_s=1200),
    "vm_systemd_long": Boot(Shape(nodes=1, memory_mib=4096, systemd=True), timeout_s=1200),
    "vm_rebooted": Boot(Shape(nodes=1, memory_mib=4096, systemd=True), timeout_s=900),
    "vm_cluster": Boot(Shape(cpus=48, nodes=2, memory_mib=10240), timeout_s=3600),
}
"""Boots by mark. Time limits allow for a busy machine."""
REPORT = "junit.xml"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vm", description=__doc__)
    parser.add_argument("--kernel", choices=METAPACKAGES, default="6.1")
    parser.add_argument(
        "--mark",
        choices=BOOTS,
        action="append",
        help="which tests, and the machine that they need: `vm` unless given, minutes without KVM; may be repeated",
    )
    parser.add_argument("--cpus", type=positive, help="in place of the machine of the mark")
    parser.add_argument("--nodes", type=positive, help="NUMA nodes, likewise")
    parser.add_argument("--memory", type=positive, help="MiB, likewise")
    parser.add_argument("--timeout", type=positive, help="seconds until the guest is ended, likewise")
    parser.add_argument("--out", type=Path, help="where console.log and junit.xml go; thrown away unless this is set")
    parser.add_argument(
        "--junit-xml", type=Path, help="have the guest's JUnit report here, and take its absence for a failure"
    )
    parser.add_argument(
        "--data", type=Path, help="file of the data disk, created if missing: the next boot can use it again"
    )
    parser.add_argument("command", nargs="*", help="what to run instead of the tests")
    options = parser.parse_args(arguments)
    try:
        return boot(options)
    except (Missing, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return LOST


def positive(text: str) -> int:
    """Parse a whole number above 0. Raises ArgumentTypeError."""
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def boot(options: argparse.Namespace) -> int:
    """The exit status that is to be ours. Raises Missing, OSError and ValueError where there is nothing to boot, or no room."""
    marks = options.mark or ["vm"]
    usual = BOOTS[marks[0]].shape
    if any(BOOTS[mark].shape != usual for mark in marks):
        raise Missing(f"the marks {', '.join(marks)} need machines of different shapes: boot one for each")
    shape = Shape(
        options.cpus or usual.cpus, options.nodes or usual.nodes, options.memory or usual.memory_mib, usual.systemd
    )
    timeout_s = options.timeout or sum(BOOTS[mark].timeout_s for mark in marks)
    with ExitStack() as stack:
        out = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dioptase-vm-")))
        out.mkdir(parents=True, exist_ok=True)
        # Not to be emptied: a guest that has run may have left a link in its place.
        lock = stack.enter_context((out / "lock").open("a"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Missing(f"{out} has the results of a guest that runs: name another --out") from None
        for report in filter(None, (out / REPORT, options.junit_xml)):
            report.unlink(missing_ok=True)
        kernel = obtain(options.kernel)
        command = options.command or pytest(marks)
        status = run(kernel, command, out, shape=shape, timeout_s=timeout_s, data=options.data)
        total = is_whole(out / REPORT)
        if status == 0 and not total and (options.junit_xml or not options.command):
            print(f"the guest said that all is well, but brought no results: {REPORT} is missing, torn or empty")
            status = LOST
        if total and options.junit_xml:
            shutil.copyfile(out / REPORT, options.junit_xml)
    return status


def pytest(marks: Sequence[str], root: Path = ROOT) -> list[str]:
    """The command that runs the tests of these marks. Only files that name one are read: to collect all takes a minute in a
    guest."""
    named = re.compile(rf"\bmark\.(?:{'|'.join(marks)})\b")
    files = [
        str(path.relative_to(root))
        for path in sorted(root.glob("tests/**/test_*.py"))
        if named.search(path.read_text())
    ]
    if not files:
        raise Missing(f"no test is marked {' or '.join(marks)}")
    color = "--color=yes" if sys.stdout.isatty() else "--color=no"
    return [
        sys.executable, "-m", "pytest", "-v", color, "-m", " or ".join(marks), "-p", "no:cacheprovider",
        f"--junit-xml=/run/out/{REPORT}", *files,
    ]  # fmt: skip


def is_whole(report: Path) -> bool:
    """Return whether a JUnit report exists, is complete and has tests."""
    try:
        suites = ElementTree.parse(report).iter("testsuite") if report.is_file() else ()
        return any(int(suite.get("tests", 0)) > 0 for suite in suites)
    except (OSError, ValueError, LookupError, ElementTree.ParseError):
        return False


def _end(number: int, _frame: object) -> None:
    # What is temporary goes, which it does not where a signal ends a process.
    sys.exit(128 + number)


if __name__ == "__main__":
    for _number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(_number, _end)
    sys.exit(main(sys.argv[1:]))
