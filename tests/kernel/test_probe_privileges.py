"""Which capabilities each probe needs: with BPF and PERFMON alone it loads and is read, and without either it says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from probes.loader import REMEDIES
from tests.kernel.opening import opened
from tests.kernel.support import require_root

pytestmark = pytest.mark.kernel

ROOT = Path(__file__).resolve().parents[2]
OPEN = {
    "kswapd": "from probes.kswapd import open_kswapd as open_it",
    "oomkill": "from probes.oomkill import open_oomkill as open_it",
    "threads": "from probes.threads import open_threads as open_it",
    "throttles": "from probes.throttles import open_throttles as open_it",
    "migrations": "from functools import partial\nfrom probes.migrations import open_migrations\n"
    "open_it = partial(open_migrations, cpu_nodes={0: 0, 1: 1})",
}
TRY = """
import json
from api.ports import Unavailable
{imports}
try:
    probe = open_it()
    print(json.dumps([probe.form, sorted(probe.read({{1: "/"}}).cgroups[1])]))
except Unavailable as error:
    print(json.dumps([error.reason, error.remedy]))
"""
FIELDS = {
    "kswapd": ["reclaim"],
    "oomkill": ["oom_kills"],
    "threads": ["threads_by_state"],
    "throttles": ["throttles"],
    "migrations": ["numa_migrations"],
}


def _with_capabilities(probe: str, *names: str) -> list[object]:
    require_root()
    kept = ",".join(["-all", *(f"+{name}" for name in names)])
    code = TRY.format(imports=OPEN[probe])
    command = ["setpriv", f"--bounding-set={kept}", f"--inh-caps={kept}", sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    answer = json.loads(run.stdout)
    assert isinstance(answer, list)
    return answer


def _as_root(probe: str) -> str:
    """The form that root gets; a skip where the machine has none."""
    scope: dict[str, object] = {}
    exec(OPEN[probe], scope)
    with opened(scope["open_it"], "of this kernel ") as opened_probe:  # type: ignore[arg-type,var-annotated]
        return str(opened_probe.form)


@pytest.mark.parametrize("probe", OPEN)
def test_bpf_and_perfmon_are_enough(probe: str) -> None:
    form = _as_root(probe)
    assert _with_capabilities(probe, "bpf", "perfmon") == [form, FIELDS[probe]]


@pytest.mark.parametrize("names", [("bpf",), ("perfmon", "sys_ptrace", "dac_read_search")], ids=["bpf", "perfmon"])
@pytest.mark.parametrize("probe", OPEN)
def test_neither_alone_is(probe: str, names: tuple[str, ...]) -> None:
    _as_root(probe)
    reason, remedy = _with_capabilities(probe, *names)
    assert "Operation not permitted" in str(reason)
    assert remedy == REMEDIES["permission"]
