"""What a person sees of a cycle: numbers that tests/builders/interference_node.py lists, and what is never made up."""

from __future__ import annotations

import zlib

import msgspec
import pytest

from api.colocation import ColocationTotals
from api.decision import Cycle
from api.snapshot import UNLIMITED, CgroupLimits, CgroupSample, ThreadStates
from api.text import to_json
from exporters.page.web_server import HISTORY_ZLIB_LEVEL
from exporters.view.cycle_view import (
    MAX_OTHER_CGROUPS,
    MAX_SHOWN_AGGRESSORS,
    BlameView,
    ContainerView,
    View,
    build_view,
    past_view,
)
from tests.builders import interference_node
from tests.builders.four_cpu_node import busy_cycle
from tests.builders.full_node import RICH_NODE
from tests.builders.interference_node import BATCH, BUILD, WEB, S, interference_cycles
from tests.builders.quota_verdicts import quota_verdict

WORKER = "/web/worker"


def of(view: View, cgroup: str) -> ContainerView:
    return next(c for c in (*view.containers, *view.others) if c.cgroup == cgroup)


def changed(finished: Cycle, cgroup: str, **fields: object) -> Cycle:
    """The cycle with other values in one cgroup of its snapshot."""
    sample = msgspec.structs.replace(finished.snapshot.cgroups[cgroup], **fields)
    snapshot = msgspec.structs.replace(finished.snapshot, cgroups={**finished.snapshot.cgroups, cgroup: sample})
    return msgspec.structs.replace(finished, snapshot=snapshot)


@pytest.fixture
def view() -> View:
    return build_view(interference_cycles(5)[-1])


def test_waits_are_split_by_aggressor(view: View) -> None:
    assert of(view, WEB).blame == BlameView(
        culprits=((BATCH, 240.0), (BUILD, 100.0), (WEB, 20.0)), rest_ms=0.0, throttled_ms=30.0, higher_class_ms=4.0,
        other_ms=6.0,
    )  # fmt: skip
    assert of(view, WEB).wait_cores == pytest.approx(0.4)
    assert of(view, BUILD).blame is not None, "a cgroup of no pod is a victim like any other"


def test_only_the_worst_culprits_are_named_and_the_rest_is_one_number() -> None:
    last = interference_cycles(5)[-1]
    assert last.previous is not None
    before, after = last.previous.cgroups[WEB], last.snapshot.cgroups[WEB]
    assert before.blame is not None
    assert after.blame is not None
    many = {f"/c{k}": (k + 1) * 1_000_000 for k in range(10)}
    blame = msgspec.structs.replace(after.blame, by_cgroup={**before.blame.by_cgroup, **many})
    observed = of(build_view(changed(last, WEB, blame=blame)), WEB).blame
    assert observed is not None
    assert observed.culprits[:2] == (("/c9", 10.0), ("/c8", 9.0))
    assert len(observed.culprits) == MAX_SHOWN_AGGRESSORS
    assert observed.rest_ms == pytest.approx(4 + 3 + 2 + 1), "the six worst are 10 to 5"


def test_an_aggressor_that_vanished_is_not_named() -> None:
    last = interference_cycles(5)[-1]
    after = last.snapshot.cgroups[WEB].blame
    assert after is not None
    left = msgspec.structs.replace(after, by_cgroup={p: ns for p, ns in after.by_cgroup.items() if p != BATCH})
    observed = of(build_view(changed(last, WEB, blame=left)), WEB).blame
    assert observed is not None
    assert observed.other_ms == 6.0
    assert BATCH not in dict(observed.culprits)


@pytest.mark.parametrize("field", ["throttled_ns", "higher_class_ns", "other_ns"])
def test_blame_that_went_backwards_is_not_known(field: str) -> None:
    last = interference_cycles(5)[-1]
    blame = last.snapshot.cgroups[WEB].blame
    assert blame is not None
    assert of(build_view(changed(last, WEB, blame=msgspec.structs.replace(blame, **{field: -1}))), WEB).blame is None


def test_memory_reclaim_and_traffic_are_per_second(view: View) -> None:
    batch, build_ = of(view, BATCH), of(view, BUILD)
    assert batch.reclaim is not None
    assert build_.reclaim is not None
    assert (batch.reclaim.direct_ms, batch.reclaim.limit_ms, build_.reclaim.direct_ms) == (0, 200, 70)
    assert (batch.reclaim.pages, batch.reclaim.kswapd_wakeups) == (640, 2)
    assert (batch.memory_limit_bytes, build_.memory_limit_bytes) == (320 << 20, None), "no limit is no number"
    assert batch.refaults == 40
    assert (batch.oom_kills, build_.oom_kills) == (1, 0)
    assert batch.traffic is not None
    assert (batch.traffic.disk_read, batch.traffic.disk_write, batch.traffic.sent) == (1 << 20, 0, 2 << 20)
    assert batch.traffic.retransmits == 3
    assert 2048 < (batch.traffic.disk_p99_us or 0) <= 4096, "3 ms, up to the slot"
    assert batch.load == (1.5, 1.25, 1.0)
    assert batch.threads_by_state is not None
    assert batch.threads_by_state.uninterruptible == 2


@pytest.mark.parametrize("limit", [UNLIMITED, None])
def test_no_limit_and_an_unknown_one_are_no_number(limit: int | None) -> None:
    last = changed(interference_cycles(3)[-1], BATCH, limits=CgroupLimits(memory_max_bytes=limit))
    assert of(build_view(last), BATCH).memory_limit_bytes is None


def test_between_two_reads_of_a_file_its_rate_is_not_known() -> None:
    last = interference_cycles(3)[-1]
    assert last.previous is not None
    same = last.previous.cgroups[WEB].files_read_at_ns
    assert of(build_view(changed(last, WEB, files_read_at_ns=same)), WEB).refaults is None


def test_the_node_is_the_sum_of_its_cgroups(view: View) -> None:
    node = view.node
    assert {name: (p.some, p.full) for name, p in node.pressure.items()} == {
        "cpu": (0.3, None), "memory": (0.12, 0.03), "io": (0.05, 0.01),
    }  # fmt: skip
    assert node.reclaim is not None
    assert (node.reclaim.direct_ms, node.reclaim.limit_ms) == (82, 200)
    (kswapd,) = node.kswapd
    assert (kswapd.active_ratio, kswapd.wakeups, kswapd.scanned_pages, kswapd.reclaimed_pages) == (0.4, 3, 5000, 4000)
    assert node.wait is not None
    assert node.wait.count == 200 + 30 + 20
    assert node.wait.mean_us == pytest.approx(1_420_000 / 250)
    assert node.refaults == 80
    assert [zone.name for zone in node.zones] == ["DMA32", "Normal"]


def test_a_node_without_pods_shows_the_most_active_cgroups() -> None:
    view = build_view(interference_cycles(5, pods=())[-1])
    assert view.containers == ()
    assert [c.cgroup for c in view.others] == [BATCH, WEB, BUILD]
    # 1.5 + 0.9, 0.8 + 0.4, 0.6 + 0.12 + 0.07 in reclaim; the root itself uses nothing.
    assert [c.cpu_cores for c in view.others] == pytest.approx([1.5, 0.8, 0.6])
    assert view.other_cgroups == 4
    assert {c.qos for c in view.others} == {""}


def test_use_of_a_group_is_without_the_groups_below_it() -> None:
    first, second = (
        {path: CgroupSample(path=path, id=k, cpu_usage_ns=ns * s) for k, (path, ns) in enumerate(usage.items(), 1)}
        for usage in ({"/": 3_000_000_000, "/a": 2_000_000_000, "/a/b": 1_500_000_000, "/a/b/c": 100_000_000},)
        for s in (1, 2)
    )
    last = interference_cycles(3, pods=())[-1]
    assert last.previous is not None
    last = msgspec.structs.replace(
        last,
        snapshot=msgspec.structs.replace(last.snapshot, cgroups=second),
        previous=msgspec.structs.replace(last.previous, cgroups=first),
    )
    assert {c.cgroup: c.cpu_cores for c in build_view(last).others} == pytest.approx(
        {"/": 1.0, "/a": 0.5, "/a/b": 1.4, "/a/b/c": 0.1}
    )


def test_what_does_nothing_is_counted_and_not_shown() -> None:
    view = build_view(interference_cycles(3, more=200)[-1])
    assert len(view.others) == MAX_OTHER_CGROUPS
    assert view.other_cgroups == 202, "200, the build and the root"


@pytest.mark.parametrize(
    ("held", "limit", "shown"),
    [(1270 << 20, None, True), (1270 << 20, 1280 << 20, True), (2 << 20, 2 << 20, True), (2 << 20, 64 << 20, False)],
    ids=["large", "large and full", "small and full", "small"],
)
def test_an_idle_cgroup_with_much_memory_is_listed_among_two_hundred_active_ones(
    held: int, limit: int | None, shown: bool
) -> None:
    quiet = CgroupSample(
        path="/quiet", id=7, cpu_usage_ns=S, memory_bytes=held, limits=CgroupLimits(memory_max_bytes=limit)
    )
    last = interference_cycles(3, more=200)[-1]
    assert last.previous is not None
    last = msgspec.structs.replace(
        last,
        snapshot=msgspec.structs.replace(last.snapshot, cgroups={**last.snapshot.cgroups, "/quiet": quiet}),
        previous=msgspec.structs.replace(last.previous, cgroups={**last.previous.cgroups, "/quiet": quiet}),
    )
    view = build_view(last)
    assert len(view.others) == MAX_OTHER_CGROUPS
    assert ("/quiet" in {c.cgroup for c in view.others}) is shown
    if shown:
        assert view.others[-1].cgroup == "/quiet", "after those that do something"
        assert (view.others[-1].memory_bytes, view.others[-1].cpu_cores) == (held, 0)


def test_memory_is_held_by_whose_working_set_it_is_and_not_by_the_groups_above() -> None:
    """A file that was read once fills the page cache; it is no need, and what a group below holds is that group's."""

    def group(path: str, number: int, mib: int, cache_mib: int) -> CgroupSample:
        return CgroupSample(
            path=path, id=number, memory_bytes=mib << 20, memory_stat={"inactive_file": cache_mib << 20}
        )

    cgroups = {
        sample.path: sample
        for sample in (group("/a", 1, 5000, 0), group("/a/b", 2, 5000, 0), group("/cache", 3, 9000, 8990),
                       group("/half", 4, 900, 300))
    }  # fmt: skip
    last = interference_cycles(3, pods=())[-1]
    assert last.previous is not None
    last = msgspec.structs.replace(
        last,
        snapshot=msgspec.structs.replace(last.snapshot, cgroups=cgroups),
        previous=msgspec.structs.replace(last.previous, cgroups=cgroups),
    )
    assert [c.cgroup for c in build_view(last).others] == ["/a/b", "/half", "/cache"]


def test_a_view_of_200_managed_containers_stays_small() -> None:
    """Five minutes of them are kept in memory (exporters/page/web_server.py)."""
    many = interference_cycles(3, more=200, waves=True)[-1]
    pods = tuple(
        msgspec.structs.replace(
            interference_node.PODS[0], uid=f"p{k}", name=f"pod-{k}",
            containers=(
                msgspec.structs.replace(interference_node.PODS[0].containers[0], cgroup=f"/kubepods/burstable/pod{k:03}"),
            ),
        )
        for k in range(200)
    )  # fmt: skip
    view = build_view(msgspec.structs.replace(many, snapshot=msgspec.structs.replace(many.snapshot, pods=pods)))
    assert len(view.containers) == 200
    assert len(zlib.compress(to_json(past_view(view)), HISTORY_ZLIB_LEVEL)) < 16_000, "a minute fits into a MiB"


def test_what_is_kept_of_the_past_is_what_pictures_over_time_show() -> None:
    now = build_view(interference_cycles(5)[-1])
    then = past_view(now)
    for retained, observed in zip((*then.containers, *then.others), (*now.containers, *now.others), strict=True):
        assert (retained.wait, retained.blame, retained.refaults, retained.wait_cores) == (
            observed.wait,
            observed.blame,
            observed.refaults,
            observed.wait_cores,
        )
        assert retained.traffic is None
    assert (then.node.pressure, then.node.kswapd, then.node.reclaim) == (
        now.node.pressure,
        now.node.kswapd,
        now.node.reclaim,
    )
    assert then.node.zones == ()


def test_the_first_cycle_has_no_rates() -> None:
    view = build_view(interference_cycles(1)[0])
    assert view.others == ()
    assert view.containers[0].blame is None
    assert view.containers[0].reclaim is None
    assert (view.node.pressure, view.node.kswapd, view.node.wait, view.node.reclaim) == ({}, (), None, None)
    assert view.containers[0].threads_by_state is not None, "what is no rate is there at once"


def test_what_is_said_of_the_node_as_a_whole_is_seen() -> None:
    finished = interference_cycles(5)[-1]
    assert build_view(finished).answers == ()
    observed = build_view(msgspec.structs.replace(finished, node=RICH_NODE)).answers
    assert [(message.topic, message.rule) for message in observed] == [
        ("power", "power_cap"),
        ("overcommit", "overcommit_realtime"),
    ]
    assert observed[0].text == "The node draws 100 W of 80 W at alert s0: power is capped to 80 W."
    assert (
        build_view(msgspec.structs.replace(finished, node=msgspec.structs.replace(RICH_NODE, power=None))).answers
        == observed[1:]
    )


def with_worker(finished: Cycle) -> Cycle:
    """The cycle with a cgroup below web's that does what the batch job does, and waits for web, too."""
    both = []
    for observed, ms in ((finished.previous, 0), (finished.snapshot, 7)):
        assert observed is not None
        like = observed.cgroups[BATCH]
        assert like.blame is not None
        by = {**like.blame.by_cgroup, WEB: 1_000_000 * ms, WORKER: 0}
        blame = msgspec.structs.replace(like.blame, by_cgroup=by)
        worker = msgspec.structs.replace(like, path=WORKER, id=77, blame=blame)
        both.append(msgspec.structs.replace(observed, cgroups={**observed.cgroups, WORKER: worker}))
    return msgspec.structs.replace(finished, previous=both[0], snapshot=both[1])


def test_a_container_with_cgroups_below_is_shown_whole(view: View) -> None:
    """CPU and memory of /web include /web/worker in the kernel's files; waits, blame and states are added up here."""
    observed, alone, like = of(build_view(with_worker(interference_cycles(5)[-1])), WEB), of(view, WEB), of(view, BATCH)
    assert (observed.cpu_cores, observed.memory_bytes) == (alone.cpu_cores, alone.memory_bytes)
    assert observed.blame == BlameView(
        culprits=((BATCH, 740.0), (BUILD, 400.0), (WEB, 27.0)), rest_ms=0.0, throttled_ms=110.0, higher_class_ms=4.0,
        other_ms=26.0,
    )  # fmt: skip
    assert observed.wait is not None
    assert alone.wait is not None
    assert like.wait is not None
    assert observed.wait.count == alone.wait.count + like.wait.count
    assert observed.wait.p99_us == pytest.approx(31_512, abs=1), "27.7 of the 30 of 16 to 33 ms, behind 200 short ones"
    assert observed.wait_cores == pytest.approx(0.4 + 0.9)
    assert observed.threads == 24
    assert observed.threads_by_state == ThreadStates(runnable=6, uninterruptible=4, iowait=2, sleeping=14)
    assert observed.reclaim is not None
    assert observed.reclaim.pages == 1280


def test_a_cgroup_that_came_below_a_container_is_no_jump() -> None:
    """Waits before the first listing do not belong to this cycle; an unmeasured cgroup makes the sum unknown."""
    finished = with_worker(interference_cycles(5)[-1])
    assert finished.previous is not None
    before = {path: sample for path, sample in finished.previous.cgroups.items() if path != WORKER}
    came = msgspec.structs.replace(finished, previous=msgspec.structs.replace(finished.previous, cgroups=before))
    observed = of(build_view(came), WEB)
    assert observed.wait_cores == pytest.approx(0.4)
    assert observed.threads == 24
    assert of(build_view(changed(finished, WORKER, wait=None)), WEB).wait is None


def test_the_evaluated_latency_excludes_waits_of_the_containers_own_quota() -> None:
    finished = busy_cycle(2)
    assert finished.previous is not None
    before, web = finished.previous.cgroups["/web"], finished.snapshot.cgroups["/web"]
    throttled = msgspec.structs.replace(
        web,
        threads=1,
        throttled_periods=(before.throttled_periods or 0) + 1,
        throttled_ns=(before.throttled_ns or 0) + 20_000_000,
    )
    cgroups = {**finished.snapshot.cgroups, "/web": throttled}
    snapshot = msgspec.structs.replace(finished.snapshot, cgroups=cgroups)
    view = build_view(msgspec.structs.replace(finished, snapshot=snapshot))
    (container,) = (c for c in view.containers if c.cgroup == "/web")
    assert container.wait is not None
    assert container.evaluated_wait is not None
    assert container.evaluated_wait.count == container.wait.count - 1, "the wait of 16 ms"
    batch = next(c for c in view.containers if c.qos == "reclaimed_cores")
    assert batch.evaluated_wait is None


def test_interference_is_what_online_pods_wait_for_reclaimed_pods(view: View) -> None:
    """240 ms a second of /web for /batch; a node without the probe knows nothing, and one without batch pods has none."""
    assert view.interference_ms == 240.0
    assert build_view(busy_cycle(2)).interference_ms is None
    last = interference_cycles(5, pods=interference_node.PODS[:1])[-1]
    assert build_view(last).interference_ms == 0.0


def test_the_history_has_no_totals(view: View) -> None:
    totals = ColocationTotals(since_wall_ns=1)
    last = msgspec.structs.replace(interference_cycles(5)[-1], totals=totals)
    assert build_view(last, "node1").totals == totals
    assert build_view(last, "node1").node_name == "node1"
    assert past_view(build_view(last)).totals is None


def test_the_verdict_on_the_cpu_quota_is_one_text_for_page_and_terminal() -> None:
    finished = busy_cycle(2)
    assert finished.advice is not None
    assert build_view(finished).quota_trial == ""
    advice = msgspec.structs.replace(finished.advice, quota_verdict=quota_verdict())
    assert build_view(msgspec.structs.replace(finished, advice=advice)).quota_trial == (
        "The CPU quota of reclaimed pods helped default/web: run-queue latency p99 41 ms -> 6 ms, over 20 s without and 25 s "
        "with the quota (difference 4.12 standard errors; noise stays below 1.94). The quota is tested again after 23:13 UTC."
    )
