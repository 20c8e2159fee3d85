"""The namespaces without a machine: the Vagrantfile is valid as a person has it, and a killed run leaves no process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders.waiting import until
from tests.vagrant.machine import DIRECTORY, ROOT, Machine, missing, processes

pytestmark = pytest.mark.vagrant
KILLED = """
import time
from tests.vagrant.machine import Machine
print(Machine(None).namespace, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _possible() -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)


def test_a_killed_run_leaves_no_process_and_the_next_starts_again_with_the_public_box() -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED], cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        namespace = Path(run.stdout.readline().strip())
        assert "libvirtd" in processes(namespace).values()
        run.kill()
    until(lambda: processes(namespace) == {}, "everything in the namespaces has ended", 60)
    left = DIRECTORY / "left"
    left.touch()
    machine = Machine(None)
    try:
        assert not left.exists()
        assert "validated successfully" in machine.vagrant(
            "validate"
        )  # as a person has it, with the public box and KVM
        states = re.findall(r"^(\w+) +(.+?) \(libvirt\)$", machine.vagrant("status"), re.M)
        assert states == [("default", "not created"), ("cluster", "not created")]
    finally:
        machine.close()
