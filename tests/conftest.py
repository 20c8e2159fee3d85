"""What every test may use: golden files, refreshed with `pytest --update-golden` and then read by a person in the diff, and the
examples of property tests.

Property tests try the same examples in each run: the gate must not fail by chance, and a failure must repeat. Their
examples change with the source of the test only. Fresh ones find what these miss: with `DIOPTASE_FRESH_EXAMPLES=1`, as in
`tests/run properties`, the examples are random, there are ten times as many where the test sets no number, and
`--hypothesis-seed` applies. A failing example is saved in .hypothesis and tried first by the next such run; to have it in the
gate, make a table test of it.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes depends on the machine: a busy one fails nothing.
settings.register_profile("repeated", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
# Where the variable CI is set, Hypothesis repeats its examples unless a profile is selected.
settings.register_profile(
    "fresh",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=1000,
    print_blob=True,
    derandomize=False,
)
settings.load_profile("fresh" if os.environ.get("DIOPTASE_FRESH_EXAMPLES") else "repeated")
GOLDEN = Path(__file__).parent / "golden"

# Under nohup or in the background of a shell, programs under test would inherit that these are ignored, and respect it.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/* instead of comparing with it")


def pytest_runtest_setup(item: pytest.Item) -> None:
    here = any(item.get_closest_marker(name) for name in ("kernel", "live"))
    marks = (
        "vm",
        "vm_probes",
        "vm_disk",
        "vm_four",
        "vm_big",
        "vm_systemd",
        "vm_systemd_long",
        "vm_rebooted",
        "vm_cluster",
    )
    guest = any(item.get_closest_marker(name) for name in marks)
    if guest and not here and "DIOPTASE_VM" not in os.environ:
        pytest.skip("needs a kernel of its own: python -m tests.vm boots one")


@pytest.fixture(scope="session", autouse=True)
def _compiled_probes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each run compiles the probes of this tree once, and starts of the agent in it find them compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIOPTASE_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with tests/golden/NAME."""

    def compare(name: str, actual: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(actual)
        assert path.exists(), f"{path} is missing: run pytest --update-golden"
        assert actual == path.read_text(), f"{path} differs: if that is meant, run pytest --update-golden"

    return compare


@pytest.fixture(scope="session")
def promtool() -> str:
    """Path of promtool, or a skip that says how to get it."""
    return _installed("promtool")


@pytest.fixture(scope="session")
def prometheus_binary() -> str:
    """Path of prometheus, or a skip that says how to get it."""
    return _installed("prometheus")


def _installed(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed: apt-get install prometheus")
    return path
