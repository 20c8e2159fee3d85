"""Every probe of the registry on a real kernel: each form, the least capabilities, a crippled node, and as a command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from api.interfaces import Unavailable
from api.snapshot import CgroupSample, NodeSample
from probes import counters, doctor, migrations, registry
from probes.deferred_loading import DeferredLoader
from probes.doctor import missing_capabilities
from tests.builders.waiting import until
from tests.kernel.open_probes import having, opened

pytestmark = pytest.mark.kernel

ROOT = Path(__file__).resolve().parents[2]
TRY = """
import json, sys
from api.interfaces import Unavailable
from probes.registry import BY_NAME
try:
    probe = BY_NAME[sys.argv[1]].open()
    seen = probe.read({1: "/"})
    print(json.dumps([probe.form, sorted(seen.node)]))
    probe.close()
except Unavailable as error:
    print(json.dumps([error.reason, error.remedy]))
"""
DOCTOR = """
import sys
from pathlib import Path
import msgspec
from probes import doctor
found = doctor.probe_checks(**{name: Path(value) for name, _, value in (word.partition("=") for word in sys.argv[1:])})
print(msgspec.json.encode(found).decode())
"""
ROWS = pytest.mark.parametrize("row", registry.PROBES, ids=lambda row: row.name)
NO_COUNTERS = "this machine has no hardware counters"
ONE_NODE = "migrations attaches nothing where there is one NUMA node; test_migrations.py makes two of one"


def there() -> list[registry.ProbeEntry]:
    """All but the one for which this machine has no counters."""
    try:
        counters.countable_events(counters.EVENTS, counters.online_cpus()[0])
    except Unavailable:
        return [row for row in registry.PROBES if row.name != "counters"]
    return list(registry.PROBES)


def attached() -> list[registry.ProbeEntry]:
    """All of these but the one that has nothing to count on this machine."""
    one_node = len(set(migrations.numa_nodes_of_cpus().values())) < 2
    return [row for row in there() if not (row.name == "migrations" and one_node)]


@ROWS
def test_what_it_gives_are_fields_of_samples(row: registry.ProbeEntry) -> None:
    with opened(row.open, lacking=NO_COUNTERS) as probe:
        assert probe.name == row.name
        observed = probe.read({1: "/"})
        assert observed.node.keys() <= set(NodeSample.__struct_fields__)
        assert {name for values in observed.cgroups.values() for name in values} <= set(CgroupSample.__struct_fields__)
        assert probe.problem() is None
    with pytest.raises(Unavailable, match=f"the probe {row.name} is closed"):
        probe.read({1: "/"})
    probe.close()


@ROWS
def test_the_stated_capabilities_are_enough(row: registry.ProbeEntry) -> None:
    with opened(row.open, lacking=NO_COUNTERS) as probe:
        form = probe.form
    assert json.loads(having(row.capabilities, TRY, row.name))[0] == form


@ROWS
def test_each_stated_capability_is_needed(row: registry.ProbeEntry) -> None:
    """Without any one of them it does not run as well, and says which capabilities it wants."""
    with opened(row.open, lacking=NO_COUNTERS) as probe:
        form = probe.form
    if form == migrations.ONE_NODE:
        pytest.skip(ONE_NODE)
    for left_out in row.capabilities:
        others = tuple(name for name in row.capabilities if name != left_out)
        assert json.loads(having(others, TRY, row.name))[0] != form, f"{left_out} is stated for nothing"


NOT_NEEDED = "this machine has one NUMA node, so no task moves between two"


def test_doctor_names_every_probe_and_its_capabilities() -> None:
    for row in there():
        with opened(row.open):
            pass
    checks = doctor.probe_checks()
    rows = {check.name: check for check in checks}
    for row in there():
        check = rows[f"probe {row.name}"]
        assert check.ok, check.detail
        assert check.detail.endswith((f"needs {', '.join(row.capabilities)}", NOT_NEEDED))
    optional = [check for check in checks if check.detail.startswith("optional: ")]
    assert len(optional) == len(registry.PROBES) - len(there())
    assert all(check.ok and NO_COUNTERS in check.detail and "hypervisors" in check.remedy for check in optional)


def crippled(names: tuple[str, ...], *arguments: str) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(having(names, DOCTOR, *arguments))}


@pytest.fixture(scope="module")
def powerless() -> dict[str, dict[str, str]]:
    """What doctor says without any capability: of all probes at once."""
    return crippled(())


@ROWS
def test_doctor_without_capabilities_names_those_of_each_probe(
    row: registry.ProbeEntry, powerless: dict[str, dict[str, str]]
) -> None:
    with opened(row.open, lacking=NO_COUNTERS) as probe:
        if probe.form == migrations.ONE_NODE:
            pytest.skip(ONE_NODE)
    check = powerless[f"probe {row.name}"]
    assert not check["ok"]
    assert "Operation not permitted" in check["detail"]
    assert f"give the capabilities {', '.join(row.capabilities)}" in check["remedy"]
    assert row.fallback in check["remedy"]


def test_doctor_names_only_the_missing_capability() -> None:
    check = crippled(("BPF",))["probe softirq"]
    assert not check["ok"]
    assert "give the capabilities PERFMON (softirq needs BPF, PERFMON)" in check["remedy"]


def test_doctor_without_kernel_types_says_what_to_boot(tmp_path: Path) -> None:
    with opened(registry.PROBES[0].open):
        pass
    checks = crippled(("BPF", "PERFMON", "SYS_PTRACE"), f"btf={tmp_path}/none")
    assert not checks["kernel types (BTF)"]["ok"]
    for row in attached():
        check = checks[f"probe {row.name}"]
        assert "none: No such file" in check["detail"]
        assert "CONFIG_DEBUG_INFO_BTF" in check["remedy"]


def test_doctor_without_bcc_says_what_to_install() -> None:
    checks = crippled(("BPF", "PERFMON"), f"child_python={sys.executable}")
    assert not checks["compiler (python3-bpfcc)"]["ok"]
    for row in attached():
        check = checks[f"probe {row.name}"]
        assert "cannot import BCC" in check["detail"]
        assert "apt-get install python3-bpfcc" in check["remedy"]


@pytest.mark.parametrize(
    ("effective", "lacking"),
    [
        ("000001ffffffffff", ()),
        ("000000c000000000", ("SYS_PTRACE",)),
        ("0000004000000000", ("BPF", "SYS_PTRACE")),
        ("0000000000280000", ()),
        ("0000000000000000", ("BPF", "PERFMON", "SYS_PTRACE")),
        ("garbage", ()),
    ],
)
def test_capabilities_are_read_bit_by_bit(tmp_path: Path, effective: str, lacking: tuple[str, ...]) -> None:
    """The fourth is SYS_ADMIN, which includes the first two, with SYS_PTRACE."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text(f"Name:\tx\nCapEff:\t{effective}\nCapBnd:\t0\n")
    assert missing_capabilities(("BPF", "PERFMON", "SYS_PTRACE"), tmp_path) == lacking


def children() -> set[int]:
    rows = set()
    for task in Path("/proc/self/task").iterdir():
        rows.update(int(pid) for pid in (task / "children").read_text().split())
    return rows


def test_all_of_them_load_in_the_background_and_the_child_ends_with_the_last() -> None:
    for row in there():
        with opened(row.open):
            pass
    before = children()
    names = [row.name for row in there()]
    background = DeferredLoader(registry.openers(names))
    try:
        assert [probe.form for probe in background.probes] == ["loading"] * len(names)
        background.start()
        until(lambda: not any(probe.form == "loading" for probe in background.probes), seconds=60)
        assert all(probe.form for probe in background.probes), [p for p in background.probes if not p.form]
        until(lambda: children() <= before, "the compiling child has ended")
        for probe in background.probes:
            probe.read({1: "/"})
    finally:
        background.close()


COMMAND = [sys.executable, "-c", "from cli.main import main; main()", "probe"]


def run(*words: str) -> str:
    return said_by(started(*words))


def started(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said_by(process: subprocess.Popen[str]) -> str:
    """What it prints until it ends, which it does well."""
    output, complaint = process.communicate(timeout=100)
    assert process.returncode == 0, complaint
    return output


@ROWS
def test_each_is_a_command_that_prints_json_or_a_table(row: registry.ProbeEntry) -> None:
    with opened(row.open, lacking=NO_COUNTERS) as probe:
        form = probe.form
    # Both at once: most of their time is the start of Python and of the compiler.
    table, lines = (
        started(row.name, "--duration", "0.3"),
        started(row.name, "--json", "--interval", "0.3", "--duration", "0.8"),
    )
    intervals = [json.loads(line) for line in said_by(lines).splitlines()]
    shown = said_by(table)
    assert len(intervals) <= 3
    assert sum(interval["interval_s"] for interval in intervals) >= 0.799, "a busy machine takes longer for fewer"
    for interval in intervals:
        assert (interval["probe"], interval["form"], interval["problem"]) == (row.name, form, "")
        assert all(group["values"].keys() <= set(CgroupSample.__struct_fields__) for group in interval["cgroups"])
        assert interval["node"].keys() <= set(NodeSample.__struct_fields__)
    assert shown.startswith(f"{row.name}, form {form}, 0.")


def test_without_a_name_all_are_tried_and_listed() -> None:
    for row in there():
        with opened(row.open):
            pass
    output = run()
    lines = {line.split()[0]: line for line in output.splitlines() if not line.startswith(" ")}
    assert list(lines) == ["runqlat", *registry.PROBE_NAMES]
    for row in registry.PROBES:
        assert row.about in lines[row.name]
        assert (lines[row.name].split()[1] == "no") == (row not in there())
    assert (NO_COUNTERS in output) == (len(there()) < len(registry.PROBES)), "the reason is reported"


def test_an_unknown_name_is_refused_with_what_there_is() -> None:
    failed = subprocess.run([*COMMAND, "none"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert "No such command 'none'" in failed.stderr
