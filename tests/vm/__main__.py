"""`python -m tests.vm`: boot a kernel and run the tests that are marked `vm`, or a command, in it."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.vm.kernels import METAPACKAGES, obtain
from tests.vm.machine import Shape, run


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vm", description=__doc__)
    parser.add_argument("--kernel", choices=METAPACKAGES, default="6.1")
    parser.add_argument("--cpus", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--memory", type=int, default=3072, help="MiB")
    parser.add_argument("--timeout", type=float, default=900, help="seconds until the guest is ended")
    parser.add_argument("--out", type=Path, help="where logs and results go")
    parser.add_argument("--junit", type=Path, help="have the guest's JUnit report here")
    parser.add_argument("command", nargs="*", help="what to run instead of the tests")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or Path(temporary)
        pytest = [sys.executable, "-m", "pytest", "-m", "vm", "-q", "-p", "no:cacheprovider", "--junit-xml=/run/out/junit.xml"]
        shape = Shape(options.cpus, options.nodes, options.memory)
        status = run(obtain(options.kernel), options.command or pytest, out, shape=shape, timeout_s=options.timeout)
        if options.junit is not None and (out / "junit.xml").exists():
            options.junit.write_bytes((out / "junit.xml").read_bytes())
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
