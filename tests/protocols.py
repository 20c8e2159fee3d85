"""Write the Python of every `.proto` file in the same directory: `python -m tests.protocols [DIRECTORY]`; needs grpcio-tools.

Descriptors hold the paths that protoc was given, so it is run from the repository's root whatever the directory is.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def generate(target: Path = ROOT) -> None:
    """Write `api/proto/*_pb2.py` and `*_pb2.pyi` below `target`. Raises ImportError without grpcio-tools, SystemExit with
    what protoc says of a file that is wrong."""
    tools = import_module("grpc_tools.protoc")
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "api" / "proto").glob("*.proto"))
    words = ["protoc", f"--proto_path={ROOT}", f"--python_out={target}", f"--pyi_out={target}", *sources]
    if tools.main(words):
        raise SystemExit("protoc failed; it says above which line of which file it does not understand")


if __name__ == "__main__":
    generate(*map(Path, sys.argv[1:2]))
