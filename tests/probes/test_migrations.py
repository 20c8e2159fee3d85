"""The probe's pure parts; what it counts is in tests/kernel/test_migrations.py."""

from __future__ import annotations

from pathlib import Path

from api.interfaces import ProbeReading
from probes import bpf
from probes.migrations import _FORMS, FORMS, ONE_NODE, job, numa_nodes_of_cpus, open_migrations


def test_nodes_of_cpus_come_from_sysfs(tmp_path: Path) -> None:
    assert numa_nodes_of_cpus(tmp_path) == {}
    for name, cpus in {"node0": "0-1,4\n", "node1": "2-3\n", "node2": "\n", "node3": "what\n"}.items():
        (tmp_path / "devices/system/node" / name).mkdir(parents=True)
        (tmp_path / "devices/system/node" / name / "cpulist").write_text(cpus)
    (tmp_path / "devices/system/node/node4").mkdir()
    assert numa_nodes_of_cpus(tmp_path) == {0: 0, 1: 0, 2: 1, 3: 1, 4: 0}


def test_with_one_node_nothing_is_attached_and_nothing_made_up() -> None:
    for cpu_nodes in ({0: 0, 1: 0}, {}):
        probe = open_migrations(cpu_nodes=cpu_nodes, child_python=Path("/nowhere"))
        assert probe.form == ONE_NODE
        assert probe.read({1: "/"}) == ProbeReading()
        assert probe.problem() is None
        probe.close()


def test_programs_can_be_found_in_the_kernels_list() -> None:
    assert tuple(_FORMS) == FORMS
    assert [form.name for form in job(FORMS, 2).forms] == list(FORMS)
    for form in _FORMS.values():
        assert all(p.name.startswith("dtse_") and len(p.name) < bpf.NAME_BYTES for p in form.programs)
