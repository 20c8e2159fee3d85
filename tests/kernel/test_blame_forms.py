"""Where blame comes from: full tables, kernels without clocks of throttling, forms that cannot know, the probe by itself."""

from __future__ import annotations

import time

import msgspec
import pytest

from api.interfaces import Unavailable
from api.snapshot import Blame
from probes.blame import open_blame, shared_blame
from probes.loader import Form, Job, load
from probes.maps import cpu_id_limit, possible_cpus
from probes.per_cgroup_probe import ROOT_CGROUP_ID
from probes.runqlat import RunqLatencyProbe, job, open_runqlat
from tests.kernel.blame_window import FORMS, MS, NOTHING, limit, live, parts, pin, several, shoot, watch
from tests.kernel.open_probes import probe

pytestmark = pytest.mark.kernel


def _with(form: str, **constants: int) -> Job:
    full_job = job((form,), cpu_id_limit(), blame=True)
    return msgspec.structs.replace(full_job, forms=full_job.forms[:1], constants={**full_job.constants, **constants})


def test_a_full_table_of_pairs_says_so_and_the_parts_still_add_up() -> None:
    """Four pairs on each CPU, for five cgroups on one that all wait for each other."""
    with probe(*FORMS) as example:
        form = example.form
    with several(*"abcde") as groups, load(_with(form, PAIR_BITS=2)) as loaded:
        source = RunqLatencyProbe(loaded)
        for group in groups:
            pin(group)
        time.sleep(1.5)
        for group in groups:
            group.processes[0].kill()
            group.processes[0].wait()
        time.sleep(0.2)  # a burner may still run once between the reads of the two maps
        shot = shoot(source, groups)
        problem = shared_blame(source).problem()
        assert problem is not None
        assert "parts of waits count as other: the table of victims and aggressors is full" in problem.reason
        source.close()
    for group in groups:
        assert parts(shot.blames[group.path]) == shot.waits[group.path].sum_ns > 20 * MS
    assert sum(len(shot.blames[group.path].by_cgroup) for group in groups) <= 4 * possible_cpus()
    assert sum(shot.blames[group.path].other_ns for group in groups) > 20 * MS


def _older(form: Form) -> Form:
    newer = ("THROTTLED_SINCE", "THROTTLED_NS", "BY_TASK")
    optional = {name: field for name, field in form.optional.items() if name not in newer}
    return msgspec.structs.replace(form, optional=optional)


@pytest.mark.parametrize("form", FORMS)
def test_kernels_without_clocks_of_throttling_end_it_when_the_first_task_is_back(form: str) -> None:
    """Linux before 6.6 has throttle_count alone: what is contended after a throttle counts as throttled then."""
    with probe(form):
        pass
    full = _with(form)
    older = msgspec.structs.replace(full, forms=[_older(full.forms[0])])
    with several("quota", "neighbour") as (victim, neighbour), load(older) as loaded:
        source = RunqLatencyProbe(loaded)
        limit(victim)
        pin(victim)
        pin(neighbour)
        window = watch(source, [victim, neighbour])
        source.close()
    blame = window.blame(victim)
    assert 0.95 * window.throttled(victim) <= blame.throttled_ns <= 1.4 * window.throttled(victim)
    assert parts(blame) == pytest.approx(window.elapsed - window.ran(victim), rel=0.05)
    assert 0 < blame.by_cgroup[neighbour.path] < window.ran(neighbour)


def test_a_form_without_blame_reports_none() -> None:
    with probe("classic") as source:
        assert not source.has_blame
        with pytest.raises(Unavailable, match="does not measure blame") as caught:
            shared_blame(source)
        assert "tp_btf" in caught.value.remedy
        with pytest.raises(Unavailable, match="does not measure blame"):
            source.read_blame({})


def test_latency_can_be_had_without_blame() -> None:
    with probe("tp_btf", "raw_tp") as example:
        form = example.form
    source = open_runqlat(forms=(form,), blame=False)
    try:
        assert not source.has_blame
    finally:
        source.close()


def test_the_probe_gives_blame_to_cgroups_and_leaves_closing_to_the_waits() -> None:
    with several("quiet") as (quiet,), probe(*FORMS) as source:
        probe_ = shared_blame(source)
        assert (probe_.name, probe_.form) == ("blame", source.form)
        window = probe_.read(live(quiet))
        assert window.cgroups[quiet.id] == {"blame": NOTHING}
        assert isinstance(window.cgroups[ROOT_CGROUP_ID]["blame"], Blame)
        assert probe_.problem() is None
        probe_.close()
        with pytest.raises(Unavailable, match="the probe blame is closed"):
            probe_.read(live(quiet))
        assert source.read(live(quiet)), "the waits go on"
        probe_ = shared_blame(source)
        source.close()
        with pytest.raises(Unavailable, match="the probe runqlat is closed"):
            probe_.read(live(quiet))


def test_alone_it_has_a_program_of_its_own_and_closes_it() -> None:
    with probe(*FORMS):
        pass
    probe_ = open_blame()
    assert probe_.form in FORMS
    assert ROOT_CGROUP_ID in probe_.read({ROOT_CGROUP_ID: "/"}).cgroups
    probe_.close()
    probe_.close()
    with pytest.raises(Unavailable, match="is closed"):
        probe_.read({ROOT_CGROUP_ID: "/"})
    with pytest.raises(Unavailable, match="does not measure blame"):
        open_blame(forms=("classic",))
