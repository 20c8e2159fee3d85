"""Opening any probe in a test: a skip where the machine, not the probe, is the reason that it cannot run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from api.ports import Probe, Unavailable
from probes.loader import REMEDIES
from tests.kernel.support import TestCgroup, require_root

AnyProbe = TypeVar("AnyProbe", bound=Probe)
MACHINE = {remedy for kind, remedy in REMEDIES.items() if kind != "refused"}


@contextmanager
def opened(open_probe: Callable[[], AnyProbe], lacking: str = "") -> Iterator[AnyProbe]:
    """`lacking` is what the loader says of an older kernel that does not have what the probe reads."""
    require_root()
    try:
        probe = open_probe()
    except Unavailable as error:
        if error.remedy in MACHINE or (lacking and lacking in error.reason):
            pytest.skip(f"probes cannot run here: {error.reason}; {error.remedy}")
        raise
    try:
        yield probe
    finally:
        probe.close()


def limit_memory(group: TestCgroup, limit_bytes: int) -> None:
    """No more than this, and nothing in swap."""
    if group.hierarchy.mode == "v2":
        group.file("memory", "memory.max").write_text(str(limit_bytes))
        swap = group.file("memory", "memory.swap.max")
        if swap.exists():
            swap.write_text("0")
        return
    group.file("memory", "memory.limit_in_bytes").write_text(str(limit_bytes))
    group.file("memory", "memory.swappiness").write_text("0")
