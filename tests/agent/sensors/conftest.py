"""What the tests of the sensor have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.sensors.sensor_machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)
