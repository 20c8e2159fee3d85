"""The built-in page in a real browser against the real server: what a person reads is what the View says."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from api.decision import ActMode, Cycle
from api.snapshot import CgroupSample, RunqLatency
from cli import formats
from exporters.view.cycle_view import View, build_view
from tests.browser.chromium import Browser, Page
from tests.browser.page_reader import LIVE, opened, rows
from tests.builders import colocation_run
from tests.builders.agent_server import AgentServer
from tests.builders.colocation_run import ColocationRun

pytestmark = pytest.mark.browser


def test_headline_numbers_are_the_views(browser: Browser, agent: AgentServer, reported: ColocationRun) -> None:
    agent.show(reported.rounds)
    view = build_view(reported.rounds[-1])
    web = view.containers[0]
    assert web.latency is not None
    assert web.wait is not None
    page = opened(browser, agent)
    assert page.text("#act") == "● on: writes to cgroups"
    assert page.text("#policy") == "latency"
    assert page.text("#reason") == view.reason
    assert page.text("#action").endswith(view.action)
    assert page.text("#live-text") == f"cycle {view.seq} · {formats.clock(view.wall_time_ms)}"
    assert page.text("#lent") == formats.cores(view.reclaimable_cores)
    assert page.text("#used") == formats.cores(view.reclaimed_cores)
    assert page.text("#need") == formats.cores(view.requirement_cores)
    assert page.text("#need-note") == f"estimated; uses {formats.cores(web.cpu_cores)}"
    assert page.text("#busy") == formats.cores(view.busy_cores)
    assert f"{page.text('#latency')} {page.text('#latency-unit')}" == formats.milliseconds(web.latency.p99_ms)
    assert page.text("#latency-note") == (
        f"p50 {formats.milliseconds(web.latency.p50_ms)} · {formats.integer(web.latency.per_second)} req/s"
    )
    assert f"{page.text('#wait')} {page.text('#wait-unit')}" == formats.duration(web.wait.p99_us)
    assert page.text("#wait-note") == f"p50 {formats.duration(web.wait.p50_us)} · target 10 ms"
    assert web.evaluated_wait is not None
    assert page.text("#wait-evaluated") == (f"evaluated: {formats.duration(web.evaluated_wait.p99_us)}")
    assert page.errors() == []


def test_a_cycle_without_finished_waits_differs_from_unmeasured_waits(
    browser: Browser, agent: AgentServer, reported: ColocationRun
) -> None:
    last = reported.rounds[-1]
    before = msgspec.structs.replace(last.snapshot, taken_at_ns=last.snapshot.taken_at_ns - 20_000_000)
    agent.show([*reported.rounds[:-1], msgspec.structs.replace(last, previous=before)])
    page = opened(browser, agent)
    assert (page.text("#wait"), page.text("#wait-note")) == (formats.ABSENT, "no wait ended")


def test_headroom_is_said_to_hold_what_is_used(browser: Browser, agent: AgentServer, reported: ColocationRun) -> None:
    """Nothing comes on top: right after the spike all of the headroom is in use. What is advertised moves slowly."""
    agent.show(reported.rounds[:206])
    view = build_view(reported.rounds[205])
    assert view.headroom is not None
    assert view.reclaimed_cores == view.headroom.cores == view.reclaimable_cores
    assert view.reclaimable_cores < 1
    page = opened(browser, agent)
    assert view.reported_headroom is not None
    assert page.text("#lent-note") == f"headroom {formats.cores(view.headroom.cores)}, use included"
    assert page.text("#reported-note") == f"reported {formats.cores(view.reported_headroom.cores)}"


def test_workloads_table_is_the_views(browser: Browser, agent: AgentServer) -> None:
    last = colocation_run.simulate_run(230, others=(colocation_run.LONG,)).rounds[-2:]
    agent.show(last)
    page = opened(browser, agent)
    actual = rows(page, "#workloads tbody")
    for row, c in zip(actual, build_view(last[-1]).containers, strict=True):
        wait, latency = c.wait, c.latency
        assert row == [
            c.pod, c.container, c.qos, formats.cores(c.cpu_cores), formats.percent(c.throttled_ratio),
            formats.percent(c.cpu_pressure_ratio), formats.integer(c.threads), formats.size(c.memory_bytes),
            formats.integer(wait.count if wait else None), formats.duration(wait.p50_us if wait else None),
            formats.duration(wait.p99_us if wait else None), formats.milliseconds(latency.p50_ms if latency else None),
            formats.milliseconds(latency.p99_ms if latency else None), formats.integer(latency.per_second if latency else None),
            formats.duration(c.evaluated_wait.p99_us if c.evaluated_wait else None),
        ]  # fmt: skip
    assert actual[3][3:] == [formats.ABSENT] * 12, "a container whose cgroup is gone has no number at all"


def test_names_are_text_whatever_they_contain(browser: Browser, agent: AgentServer, reported: ColocationRun) -> None:
    hostile = colocation_run.simulate_run(
        220, others=(colocation_run.HOSTILE,), startup_warnings=("<img src=x onerror=alert(3)> is missing",)
    )
    agent.journal.all = list(colocation_run.with_every_status(reported))
    agent.show(hostile.rounds)
    page = browser.page()
    page.call(
        "Page.addScriptToEvaluateOnNewDocument", source="window.alarms = []; window.alert = (x) => alarms.push(x)"
    )
    page.go(agent.url)
    page.until(LIVE)
    assert rows(page, "#workloads tbody")[2][:2] == [
        colocation_run.HOSTILE.key,
        colocation_run.HOSTILE.containers[0].name,
    ]
    assert colocation_run.HOSTILE.key in page.text(".entry")
    assert "<i>read back</i> 0-1" in page.text(".entry .error")
    assert page.text("#limits li") == "<img src=x onerror=alert(3)> is missing"
    assert (
        page.eval(
            "document.querySelectorAll('main img, main script, #limits img, "
            "main i:not(.bar i):not(.readout i):not(.legend i):not(thead i)').length"
        )
        == 0
    )
    assert page.eval("alarms") == []
    assert page.errors() == []


def test_an_address_with_a_user_and_a_password(browser: Browser, agent: AgentServer, reported: ColocationRun) -> None:
    agent.show(reported.rounds[:3])
    page = browser.page()
    page.go(agent.url.replace("//", "//user:secret@"))
    page.until(LIVE)
    assert page.errors() == []


def test_before_the_first_round(browser: Browser, agent: AgentServer) -> None:
    page = browser.page()
    page.go(agent.url)
    page.until("document.body.dataset.live === 'away'")
    assert "no cycle has finished yet" in page.text("#alert")
    assert page.text("#reason") == "Waiting for the first cycle."


@pytest.mark.parametrize(
    ("act", "text"), [(ActMode.OFF, "○ off: decides nothing"), (ActMode.DRY_RUN, "◌ dry-run: writes nothing")]
)
def test_act_mode_is_always_said(browser: Browser, agent: AgentServer, act: ActMode, text: str) -> None:
    quiet = colocation_run.simulate_run(3, act=act)
    agent.journal.all = list(quiet.entries)
    agent.show(quiet.rounds)
    page = opened(browser, agent)
    assert page.text("#act") == text
    entries = page.eval("[...document.querySelectorAll('.entry')].map(e => e.dataset.status)")
    assert set(entries) == ({"dry-run"} if act is ActMode.DRY_RUN else set())
    if act is ActMode.OFF:
        assert page.text("#reason") == (
            "Decisions are switched off (--act off). Use --act dry-run to see them, --act on to apply them."
        )
        assert page.text("#no-entries") == (
            "No cgroup has been changed yet. Decisions appear here when the load of online pods changes."
        )
        assert page.text("#lent") == formats.ABSENT


def sums_only(finished: Cycle) -> Cycle:
    def without(sample: CgroupSample) -> CgroupSample:
        wait = sample.wait
        return (
            sample
            if wait is None
            else msgspec.structs.replace(sample, wait=RunqLatency(sum_ns=wait.sum_ns, count=wait.count))
        )

    def strip(snapshot: Any) -> Any:
        return msgspec.structs.replace(snapshot, cgroups={p: without(s) for p, s in snapshot.cgroups.items()})

    previous = finished.previous
    return msgspec.structs.replace(
        finished, snapshot=strip(finished.snapshot), previous=None if previous is None else strip(previous)
    )


def test_a_source_that_knows_sums_only(browser: Browser, agent: AgentServer, reported: ColocationRun) -> None:
    rounds = [sums_only(finished) for finished in reported.rounds[:20]]
    agent.show(rounds)
    page = opened(browser, agent)
    wait = build_view(rounds[-1]).containers[0].wait
    assert wait is not None
    assert wait.p99_us is None
    assert page.text("#wait-name") == "Run-queue latency, mean"
    assert f"{page.text('#wait')} {page.text('#wait-unit')}" == formats.duration(wait.mean_us)
    assert "Only sums of waits" in page.text("#waits-chart .empty")
    assert rows(page, "#workloads tbody")[0][9] == f"mean {formats.duration(wait.mean_us)}"


def test_what_is_missing_is_said_with_its_remedy(browser: Browser, agent: AgentServer) -> None:
    banner = ("No histogram of waits: BPF is refused; run with CAP_BPF and CAP_PERFMON.",)
    agent.show(
        colocation_run.simulate_run(
            3, sources=(*colocation_run.SOURCES, colocation_run.FAILING), startup_warnings=banner
        ).rounds
    )
    page = opened(browser, agent)
    assert page.text("#limits li") == banner[0]
    failed = page.text("#sources [data-ok=false]")
    assert "psi" in failed
    assert colocation_run.FAILING.error in failed
    assert colocation_run.FAILING.remedy in failed
    assert "tp_btf" in page.text("#sources")
    assert page.text("#waits-form") == "tp_btf"


def test_nothing_comes_from_elsewhere(page: Page, agent: AgentServer) -> None:
    urls = page.requests()
    assert len(urls) > 8
    assert all(url.startswith(agent.url) for url in urls), urls
    html = page.eval("fetch('/').then(r => r.text())")
    assert "style=" not in html
    assert "<style" not in html
    refused = page.eval(
        """new Promise(done => { document.addEventListener('securitypolicyviolation', e => done(e.effectiveDirective));
        fetch('https://example.invalid/').catch(() => null); setTimeout(() => done('nothing'), 5000); })"""
    )
    assert refused == "connect-src"


def test_view_has_what_the_page_reads() -> None:
    """A renamed field would leave a dash on the page and no error anywhere."""
    assert {"threshold", "rule", "reason", "banner", "sources", "bounds_us", "requirement_cores"} <= set(
        View.__struct_encode_fields__
    )
