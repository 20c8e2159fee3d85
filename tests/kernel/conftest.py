"""Fixtures of the actuator on a real cgroup with odd values in every knob."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.qrm.actuator.actuator import Actuator
from agent.qrm.actuator.originals import OriginalsJournal
from agent.qrm.actuator.state_dir import open_originals, read_boot_id
from agent.qrm.actuator.writer import KnobWriter
from agent.sensors.cgroup.hierarchy import Hierarchy
from api.decision import ActMode
from tests.kernel.knob_cgroups import ODD, KnobCgroup
from tests.kernel.real_cgroups import cgroup, require_writable_cgroups


@pytest.fixture
def hierarchy() -> Hierarchy:
    return require_writable_cgroups()


@pytest.fixture
def batch(hierarchy: Hierarchy) -> Iterator[KnobCgroup]:
    with cgroup(hierarchy, "act") as group:
        knobbed = KnobCgroup(group)
        knobbed.put(ODD[knobbed.version])
        yield knobbed


@pytest.fixture
def files(hierarchy: Hierarchy) -> Iterator[KnobWriter]:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("needs two CPUs to move a cpuset from one to the other")
    opened = KnobWriter(hierarchy)
    yield opened
    opened.close()


@pytest.fixture
def originals(tmp_path: Path) -> Iterator[OriginalsJournal]:
    opened = open_originals(tmp_path / "state", read_boot_id())
    yield opened
    opened.close()


@pytest.fixture
def actuator(files: KnobWriter, originals: OriginalsJournal) -> Actuator:
    return Actuator(files, originals, ActMode.ON)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of later forms of a probe whose first form is tested too: they share their C source. Whether the forms
    agree on the same load is tested separately, here and in guests."""
    names = {item.nodeid for item in items}
    for item in items:
        for form in ("raw_tp", "classic"):
            if form in item.nodeid and item.nodeid.replace(form, "tp_btf") in names:
                item.add_marker(pytest.mark.forms)
