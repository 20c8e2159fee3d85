"""Where blame comes from: full tables, kernels without clocks of throttling, forms that cannot know, the probe by itself."""

from __future__ import annotations

import time

import msgspec
import pytest

from api.interfaces import Unavailable
from api.measurements import Blame
from probes.blame import open_blame, shared_blame
from probes.cgroup_table import ROOT_CGROUP_ID
from probes.loader import Form, Job, load
from probes.maps import cpu_id_limit, possible_cpus
from probes.runqlat import RunqLatencyProbe, job, open_runqlat
from tests.kernel.blame_window import FORMS, MS, NOTHING, limit, live, parts, pin, several, shoot, watch
from tests.kernel.open_probes import probe

pytestmark = pytest.mark.kernel


def _with(form: str, **constants: int) -> Job:
    made = job((form,), cpu_id_limit(), blame=True)
    return msgspec.structs.replace(made, forms=made.forms[:1], constants={**made.constants, **constants})


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
        time.sleep(0.2)  # who was waited for may still have a last turn, between two maps that are read
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
    kept = {name: field for name, field in form.optional.items() if name not in newer}
    return msgspec.structs.replace(form, optional=kept)


@pytest.mark.parametrize("form", FORMS)
def test_kernels_without_clocks_of_throttling_end_it_when_the_first_task_is_back(form: str) -> None:
    """Linux before 6.6 has throttle_count alone: what is contended after a throttle counts as throttled then."""
    with probe(form):
        pass
    whole = _with(form)
    older = msgspec.structs.replace(whole, forms=[_older(whole.forms[0])])
    with several("quota", "neighbour") as (victim, neighbour), load(older) as loaded:
        source = RunqLatencyProbe(loaded)
        limit(victim)
        pin(victim)
        pin(neighbour)
        seen = watch(source, [victim, neighbour])
        source.close()
    blame = seen.blame(victim)
    assert 0.95 * seen.throttled(victim) <= blame.throttled_ns <= 1.4 * seen.throttled(victim)
    assert parts(blame) == pytest.approx(seen.elapsed - seen.ran(victim), rel=0.05)
    assert 0 < blame.by_cgroup[neighbour.path] < seen.ran(neighbour)


def test_a_form_that_cannot_know_blames_nobody() -> None:
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
        found = shared_blame(source)
        assert (found.name, found.form) == ("blame", source.form)
        seen = found.read(live(quiet))
        assert seen.cgroups[quiet.id] == {"blame": NOTHING}
        assert isinstance(seen.cgroups[ROOT_CGROUP_ID]["blame"], Blame)
        assert found.problem() is None
        found.close()
        with pytest.raises(Unavailable, match="the probe blame is closed"):
            found.read(live(quiet))
        assert source.read(live(quiet)), "the waits go on"
        found = shared_blame(source)
        source.close()
        with pytest.raises(Unavailable, match="the probe runqlat is closed"):
            found.read(live(quiet))


def test_alone_it_has_a_program_of_its_own_and_closes_it() -> None:
    with probe(*FORMS):
        pass
    found = open_blame()
    assert found.form in FORMS
    assert ROOT_CGROUP_ID in found.read({ROOT_CGROUP_ID: "/"}).cgroups
    found.close()
    found.close()
    with pytest.raises(Unavailable, match="is closed"):
        found.read({ROOT_CGROUP_ID: "/"})
    with pytest.raises(Unavailable, match="does not measure blame"):
        open_blame(forms=("classic",))
