"""The built-in page in a real browser against the real server: what a person reads is what the View says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import dist
from typing import Any

import msgspec
import pytest

from api.decisions import Act, Round
from api.facts import Wait
from api.histograms import BOUNDS_NS
from api.samples import CgroupSample
from cli import words
from exporters.view import View, build
from tests.browser.chromium import Browser, Page, chromium
from tests.cli import story
from tests.cli.agent import Agent

pytestmark = pytest.mark.browser

LIVE = "document.body.dataset.live === 'live'"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.close()


@pytest.fixture(scope="module")
def told() -> story.Story:
    return story.tell(240)


def opened(browser: Browser, agent: Agent, width: int = 1440, height: int = 900, scheme: str = "dark") -> Page:
    page = browser.page(width, height, scheme)
    page.go(agent.url)
    page.until(LIVE)
    return page


def shown(page: Page, table: str) -> list[list[str]]:
    rows: list[list[str]] = page.eval(
        f"[...document.querySelectorAll('{table} tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    return rows


def test_headline_numbers_are_the_views(browser: Browser, agent: Agent, told: story.Story) -> None:
    agent.show(told.rounds)
    view = build(told.rounds[-1])
    web = view.containers[0]
    assert web.latency is not None
    assert web.wait is not None
    page = opened(browser, agent)
    assert page.text("#act") == "● on: writes to cgroups"
    assert page.text("#policy") == "latency"
    assert page.text("#reason") == view.reason
    assert page.text("#action").endswith(view.action)
    assert page.text("#live-text") == f"round {view.seq} · {words.clock(view.wall_time_ms)}"
    assert page.text("#lent") == words.cores(view.lent_cores)
    assert page.text("#used") == words.cores(view.reclaimed_cores)
    assert page.text("#need") == words.cores(view.requirement_cores)
    assert page.text("#need-note") == f"estimated; uses {words.cores(web.cpu_cores)}"
    assert page.text("#busy") == words.cores(view.busy_cores)
    assert f"{page.text('#latency')} {page.text('#latency-unit')}" == words.milliseconds(web.latency.p99_ms)
    assert page.text("#latency-note") == (
        f"p50 {words.milliseconds(web.latency.p50_ms)} · {words.integer(web.latency.per_second)} requests/s"
    )
    assert f"{page.text('#wait')} {page.text('#wait-unit')}" == words.duration(web.wait.p99_us)
    assert page.text("#wait-note") == f"p50 {words.duration(web.wait.p50_us)} · target 10 ms"
    assert page.errors() == []


def test_headroom_is_said_to_hold_what_is_used(browser: Browser, agent: Agent, told: story.Story) -> None:
    """Nothing comes on top: right after the spike all of the headroom is in use."""
    agent.show(told.rounds[:206])
    view = build(told.rounds[205])
    assert view.reclaimed_cores == view.headroom_cores == view.lent_cores
    assert view.lent_cores < 1
    page = opened(browser, agent)
    assert page.text("#lent-note") == f"headroom {words.cores(view.headroom_cores)}, what they use included"


def test_workloads_table_is_the_views(browser: Browser, agent: Agent) -> None:
    last = story.tell(230, others=(story.LONG,)).rounds[-2:]
    agent.show(last)
    page = opened(browser, agent)
    rows = shown(page, "#workloads")
    for row, c in zip(rows, build(last[-1]).containers, strict=True):
        wait, latency = c.wait, c.latency
        assert row == [
            c.pod, c.container, c.qos, words.cores(c.cpu_cores), words.percent(c.throttled_ratio),
            words.percent(c.cpu_pressure_ratio), words.integer(c.threads), words.size(c.memory_bytes),
            words.integer(wait.count if wait else None), words.duration(wait.p50_us if wait else None),
            words.duration(wait.p99_us if wait else None), words.milliseconds(latency.p50_ms if latency else None),
            words.milliseconds(latency.p99_ms if latency else None), words.integer(latency.per_second if latency else None),
        ]  # fmt: skip
    assert rows[3][3:] == [words.NONE] * 11, "a container whose cgroup is gone has no number at all"


def test_distribution_of_one_round_is_the_views(browser: Browser, agent: Agent, told: story.Story) -> None:
    agent.show(told.rounds)
    page = opened(browser, agent)
    page.eval("document.querySelector('#span input[value=\"1\"]').click()")
    page.eval("document.querySelector('#waits-chart details').open = true")
    page.until("document.querySelectorAll('#waits-chart tbody tr').length === 27")
    web, batch = (c.wait for c in build(told.rounds[-1]).containers)
    assert web is not None
    assert batch is not None
    assert web.slots is not None
    assert batch.slots is not None
    for k, (_, online, reclaimed) in enumerate(shown(page, "#waits-chart")):
        assert online == f"{words.integer(web.slots[k])} ({words.percent(web.slots[k] / web.count)})"
        assert reclaimed == f"{words.integer(batch.slots[k])} ({words.percent(batch.slots[k] / batch.count)})"
    for side, wait in (("online", web), ("batch", batch)):
        assert wait.slots is not None
        bars = page.eval(f"document.querySelectorAll('#waits-chart rect.s-{side}').length")
        assert bars == sum(1 for count in wait.slots if count)
    throttled = build(told.rounds[-1]).containers[1].throttled_ratio
    assert shown(page, "#waits-table") == [
        ["online", words.integer(web.count), words.duration(web.p50_us), words.duration(web.p99_us), "0 %"],
        ["batch", words.integer(batch.count), words.duration(batch.p50_us), words.duration(batch.p99_us),
         words.percent(throttled)],
    ]  # fmt: skip


def test_half_a_minute_of_waits_is_the_sum_of_its_rounds(browser: Browser, agent: Agent, told: story.Story) -> None:
    agent.show(told.rounds)
    page = opened(browser, agent)
    views = [build(finished) for finished in told.rounds[-30:]]
    total = sum(view.containers[0].wait.count for view in views if view.containers[0].wait)
    assert shown(page, "#waits-table")[0][1] == words.integer(total)


def test_bars_are_where_the_waits_are(browser: Browser, agent: Agent, told: story.Story) -> None:
    """One slot further right is twice as long a wait: p99's line stands inside the bar of p99's slot."""
    agent.show(told.rounds)
    page = opened(browser, agent)
    page.eval("document.querySelector('#span input[value=\"1\"]').click()")
    web = build(told.rounds[-1]).containers[0].wait
    assert web is not None
    assert web.slots is not None
    assert web.p99_us is not None
    slot = next(k for k, bound in enumerate(BOUNDS_NS) if web.p99_us * 1000 <= bound)
    index = sum(1 for count in web.slots[:slot] if count)
    left, width, line = page.eval(
        f"""(() => {{ const bar = document.querySelectorAll('#waits-chart rect.s-online')[{index}];
        const line = document.querySelectorAll('#waits-chart line.at')[1];
        return [bar, bar, line].map((node, i) => Number(node.getAttribute(['x', 'width', 'x1'][i]))); }})()"""
    )
    assert left - 1 <= line <= left + width + 1


def test_charts_tell_their_numbers_to_the_keyboard(browser: Browser, agent: Agent, told: story.Story) -> None:
    agent.show(told.rounds)
    page = opened(browser, agent)
    page.eval("document.querySelector('#cpu-chart .plot').focus()")
    page.press("End")
    page.press("ArrowLeft")
    view = build(told.rounds[-2])
    said = page.eval("document.querySelector('#cpu-chart .plot').getAttribute('aria-valuetext')")
    busy, online = view.busy_cores, view.containers[0].cpu_cores
    assert busy is not None
    assert online is not None
    assert view.reclaimed_cores is not None
    assert said == (
        f"{words.clock(view.wall_time_ms)}: batch {words.cores(view.reclaimed_cores)}, online {words.cores(online)}, "
        f"other {words.cores(busy - online - view.reclaimed_cores)}, lent {words.cores(view.lent_cores)}"
    )
    page.press("Home")
    said = page.eval("document.querySelector('#latency-chart .plot').getAttribute('aria-valuetext')")
    assert (
        said == f"{words.clock(build(told.rounds[0]).wall_time_ms)}: p99 not known, p50 not known, wait p99 not known"
    )


def test_chart_tables_hold_every_round(browser: Browser, agent: Agent, told: story.Story) -> None:
    agent.show(told.rounds)
    page = opened(browser, agent)
    page.eval("document.querySelector('#cpu-chart details').open = true")
    page.until("document.querySelectorAll('#cpu-chart tbody tr').length > 0")
    rows = shown(page, "#cpu-chart")
    assert len(rows) == len(told.rounds)
    lent = [build(finished).lent_cores for finished in reversed(told.rounds)]
    assert [row[4] for row in rows] == [words.cores(value) for value in lent]


def test_every_decision_is_listed_newest_first_with_its_reason(
    browser: Browser, agent: Agent, told: story.Story
) -> None:
    agent.journal.all = list(told.entries)
    agent.show(told.rounds)
    page = opened(browser, agent)
    page.until(f"document.querySelectorAll('.entry').length === {len(told.entries)}")
    texts = page.eval("[...document.querySelectorAll('.entry summary')].map(e => e.textContent.replace(/\\s+/g, ' '))")
    for text, entry in zip(texts, reversed(told.entries), strict=True):
        decision = entry.outcome.decision
        assert text.startswith(words.clock(entry.wall_time_ns / 1e6))
        for part in (
            decision.pod,
            decision.knob.value,
            words.change(entry.outcome),
            "✓ applied",
            decision.verdict.text,
        ):
            assert part in text
    marks = page.eval("document.querySelectorAll('#cpu-chart .mark').length")
    assert marks == len(told.entries), "every write is a mark on the CPU chart"
    facts = page.eval("document.querySelector('.entry dl').textContent")
    for name, value in told.entries[-1].outcome.decision.verdict.inputs.items():
        assert name in facts
        assert isinstance(value, float) or ("not known" if value is None else str(value)) in facts


def test_statuses_differ_by_word_sign_and_line_and_can_be_filtered(
    browser: Browser, agent: Agent, told: story.Story
) -> None:
    agent.journal.all = list(story.every_status(told))
    agent.show(told.rounds)
    page = opened(browser, agent)
    looks = {}
    for status in ("applied", "dry-run", "refused", "vanished", "mismatch"):
        text, line, paint = page.eval(
            f"""(() => {{ const e = document.querySelector('[data-status="{status}"] .status'), s = getComputedStyle(e);
            return [e.textContent, s.borderTopStyle, s.backgroundColor]; }})()"""
        )
        assert text.endswith(status)
        looks[status] = (text[0], line, paint)
    assert len({sign for sign, _, _ in looks.values()}) == 5
    assert looks["applied"][1:] != looks["dry-run"][1:] != looks["refused"][1:]
    page.eval("document.querySelector('#status').value = 'refused'")
    page.eval("document.querySelector('#status').dispatchEvent(new Event('change'))")
    assert page.eval("[...document.querySelectorAll('.entry:not([hidden])')].map(e => e.dataset.status)") == ["refused"]
    assert page.text("#decisions-count") == f"1 of {len(agent.journal.all)}"
    page.eval("document.querySelector('#find').value = 'no such thing'")
    page.eval("document.querySelector('#find').dispatchEvent(new Event('input'))")
    assert page.text("#no-entries") == "No decision fits this filter."


def test_names_are_text_whatever_they_contain(browser: Browser, agent: Agent, told: story.Story) -> None:
    hostile = story.tell(220, others=(story.HOSTILE,), banner=("<img src=x onerror=alert(3)> is missing",))
    agent.journal.all = list(story.every_status(told))
    agent.show(hostile.rounds)
    page = browser.page()
    page.call(
        "Page.addScriptToEvaluateOnNewDocument", source="window.alarms = []; window.alert = (x) => alarms.push(x)"
    )
    page.go(agent.url)
    page.until(LIVE)
    assert shown(page, "#workloads")[2][:2] == [story.HOSTILE.key, story.HOSTILE.containers[0].name]
    assert story.HOSTILE.key in page.text(".entry")
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


def test_an_agent_that_goes_away_is_missed_and_its_return_is_noticed(
    browser: Browser, agent: Agent, told: story.Story
) -> None:
    agent.journal.all = list(told.entries)
    agent.show(told.rounds)
    page = opened(browser, agent)
    agent.go_away()
    page.until("document.body.dataset.live === 'away'")
    assert f"127.0.0.1:{agent.port} does not answer" in page.text("#alert")
    assert f"of {words.clock(build(told.rounds[-1]).wall_time_ms)}" in page.text("#alert")
    assert page.eval("document.querySelector('#alert').getAttribute('role')") == "alert"
    assert page.text("#live-text").startswith("no answer for")
    assert page.text("#lent") == words.cores(build(told.rounds[-1]).lent_cores), "the last numbers stay readable"
    agent.journal.all = list(told.entries[:1])
    agent.start()
    agent.show(told.rounds[:7])
    page.until(LIVE)
    assert page.eval("document.querySelector('#alert').hidden") is True
    assert page.text("#live-text").startswith("round 7 ")
    page.until("document.querySelectorAll('.entry').length === 1")
    page.eval("document.querySelector('#cpu-chart details').open = true")
    page.until("document.querySelectorAll('#cpu-chart tbody tr').length > 0")
    assert len(shown(page, "#cpu-chart")) == 7, "rounds of the agent that was are not mixed with those of the new one"


def test_rounds_that_come_later_are_drawn(browser: Browser, agent: Agent, told: story.Story) -> None:
    agent.show(told.rounds[:100])
    page = opened(browser, agent)
    agent.show(told.rounds[100:101])
    page.until("document.querySelector('#live-text').textContent.startsWith('round 101 ')")
    agent.show(told.rounds[101:140])
    page.until("document.querySelector('#live-text').textContent.startsWith('round 140 ')")
    page.eval("document.querySelector('#cpu-chart details').open = true")
    page.until("document.querySelectorAll('#cpu-chart tbody tr').length === 140")
    assert page.errors() == []


@pytest.mark.parametrize("by_s", [-3600, 3600])
def test_a_clock_that_is_set_moves_nothing(browser: Browser, agent: Agent, told: story.Story, by_s: int) -> None:
    """Set at round 120 while the page looks on; what is shown of each round is the time that it was then."""
    moved = story.clock_set(told, 120, by_s)
    agent.journal.all = list(moved.entries)
    agent.show(moved.rounds[:118])
    page = opened(browser, agent)
    page.eval("document.querySelector('#cpu-chart details').open = true")
    for known in range(119, 141):
        agent.show(moved.rounds[known - 1 : known])
        page.until(f"document.querySelector('#live-text').textContent.startsWith('round {known} ')")
    page.until("document.querySelectorAll('#cpu-chart tbody tr').length === 140")
    times = [words.clock(build(finished).wall_time_ms) for finished in reversed(moved.rounds[:140])]
    assert [row[0] for row in shown(page, "#cpu-chart")] == times
    waits = [build(finished).containers[0].wait for finished in told.rounds[110:140]]
    assert shown(page, "#waits-table")[0][1] == words.integer(sum(wait.count for wait in waits if wait))
    writes = [entry for entry in moved.entries if entry.round_seq <= 140]
    assert page.eval("document.querySelectorAll('#cpu-chart .mark').length") == len(writes) > 0
    lent, inside = page.eval(
        """(() => { const box = document.querySelector('#cpu-chart svg').getBoundingClientRect();
        const lines = [...document.querySelectorAll('#cpu-chart .line')];
        const within = (b) => b.left >= box.left && b.right <= box.right;
        return [document.querySelectorAll('#cpu-chart .line.s-lent').length,
                lines.every((line) => within(line.getBoundingClientRect()))]; })()"""
    )
    assert lent == 1, "no gap where no round is missing"
    assert inside
    page.eval("document.querySelector('.heat-plot').focus()")
    page.press("Home")
    said = page.eval("document.querySelector('.heat-plot').getAttribute('aria-valuetext')")
    assert f" at {times[-1]}: " in said
    assert page.errors() == []


def test_before_the_first_round(browser: Browser, agent: Agent) -> None:
    page = browser.page()
    page.go(agent.url)
    page.until("document.body.dataset.live === 'away'")
    assert "no round has finished yet" in page.text("#alert")
    assert page.text("#reason") == "Waiting for the first round."


@pytest.mark.parametrize(
    ("act", "text"), [(Act.OFF, "○ off: decides nothing"), (Act.DRY_RUN, "◌ dry-run: writes nothing")]
)
def test_act_mode_is_always_said(browser: Browser, agent: Agent, act: Act, text: str) -> None:
    quiet = story.tell(3, act=act)
    agent.journal.all = list(quiet.entries)
    agent.show(quiet.rounds)
    page = opened(browser, agent)
    assert page.text("#act") == text
    entries = page.eval("[...document.querySelectorAll('.entry')].map(e => e.dataset.status)")
    assert set(entries) == ({"dry-run"} if act is Act.DRY_RUN else set())
    if act is Act.OFF:
        assert page.text("#reason") == "The agent was told to decide nothing (--act off)."
        assert page.text("#no-entries") == "No cgroup was changed yet."
        assert page.text("#lent") == words.NONE


def sums_only(finished: Round) -> Round:
    def without(sample: CgroupSample) -> CgroupSample:
        wait = sample.wait
        return (
            sample if wait is None else msgspec.structs.replace(sample, wait=Wait(sum_ns=wait.sum_ns, count=wait.count))
        )

    def strip(snapshot: Any) -> Any:
        return msgspec.structs.replace(snapshot, cgroups={p: without(s) for p, s in snapshot.cgroups.items()})

    previous = finished.previous
    return msgspec.structs.replace(
        finished, snapshot=strip(finished.snapshot), previous=None if previous is None else strip(previous)
    )


def test_a_source_that_knows_sums_only(browser: Browser, agent: Agent, told: story.Story) -> None:
    rounds = [sums_only(finished) for finished in told.rounds[:20]]
    agent.show(rounds)
    page = opened(browser, agent)
    wait = build(rounds[-1]).containers[0].wait
    assert wait is not None
    assert wait.p99_us is None
    assert page.text("#wait-name") == "Online run-queue wait, mean"
    assert f"{page.text('#wait')} {page.text('#wait-unit')}" == words.duration(wait.mean_us)
    assert "sum of waits only" in page.text("#waits-chart .empty")
    assert shown(page, "#workloads")[0][9] == f"mean {words.duration(wait.mean_us)}"


def test_what_is_missing_is_said_with_its_remedy(browser: Browser, agent: Agent) -> None:
    banner = ("No histogram of waits: BPF is refused; run with CAP_BPF and CAP_PERFMON.",)
    agent.show(story.tell(3, sources=(*story.SOURCES, story.FAILING), banner=banner).rounds)
    page = opened(browser, agent)
    assert page.text("#limits li") == banner[0]
    failed = page.text("#sources [data-ok=false]")
    assert "psi" in failed
    assert story.FAILING.error in failed
    assert story.FAILING.remedy in failed
    assert "tp_btf" in page.text("#sources")
    assert page.text("#waits-form") == "tp_btf"


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("width", [320, 400, 768, 1280])
def test_nothing_scrolls_sideways(browser: Browser, agent: Agent, width: int, scheme: str) -> None:
    long = story.tell(30, others=(story.LONG, story.HOSTILE), banner=("x" * 300,))
    agent.journal.all = list(story.every_status(long))
    agent.show(long.rounds)
    page = opened(browser, agent, width, 800, scheme)
    assert page.eval("document.documentElement.scrollWidth") == width
    clipped = page.eval(
        """[...document.querySelectorAll('header *, #verdict *, .tile b, .pill')]
        .filter(e => e.getBoundingClientRect().right > innerWidth).length"""
    )
    assert clipped == 0
    page.close()


def test_the_core_fits_a_laptop_screen(browser: Browser, agent: Agent, told: story.Story) -> None:
    agent.show(told.rounds)
    page = opened(browser, agent, 1366, 650)
    assert page.eval("document.querySelector('.core').getBoundingClientRect().bottom <= innerHeight")


def test_nothing_comes_from_elsewhere(browser: Browser, agent: Agent, told: story.Story) -> None:
    agent.show(told.rounds)
    page = opened(browser, agent)
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


# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
SIGHTS = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no long cones": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "no middle cones": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "no short cones": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
WHITE = (0.95047, 1.0, 1.08883)
Matrix = Sequence[Sequence[float]]


def linear(color: str) -> list[float]:
    """Linear RGB of `#rrggbb`."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def sumprod(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def times(matrix: Matrix, vector: Sequence[float]) -> list[float]:
    return [min(max(sumprod(row, vector), 0.0), 1.1) for row in matrix]


def lab(color: str, sight: Matrix) -> tuple[float, float, float]:
    """CIELAB of a colour as an eye of that kind sees it."""
    x, y, z = (value / white for value, white in zip(times(XYZ, times(sight, linear(color))), WHITE, strict=True))
    fx, fy, fz = (t ** (1 / 3) if t > 216 / 24389 else t * 24389 / 3132 + 4 / 29 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def luminance(color: str) -> float:
    return times(XYZ, linear(color))[1]


def contrast(one: str, other: str) -> float:
    """WCAG 2's ratio, 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def palette(page: Page, *names: str) -> dict[str, str]:
    values = page.eval(
        f"{json.dumps(names)}.map(n => getComputedStyle(document.documentElement).getPropertyValue('--' + n).trim())"
    )
    return dict(zip(names, values, strict=True))


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_colours_can_be_read(browser: Browser, agent: Agent, scheme: str) -> None:
    """Everything in these colours is, somewhere, text: 4.5 to 1 on all that it may stand on."""
    page = browser.page(scheme=scheme)
    page.go(agent.url)
    inks = ("text", "dim", "online", "batch", "rest", "lent", "wait", "good", "bad", "warn", "brand")
    grounds = ("panel", "raised", "ground")
    colors = palette(page, *inks, *grounds)
    found = {(ink, ground): contrast(colors[ink], colors[ground]) for ink in inks for ground in grounds}
    assert {pair: round(ratio, 2) for pair, ratio in found.items() if ratio < 4.5} == {}


@pytest.mark.parametrize("sight", list(SIGHTS))
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_colours_that_meet_differ_for_every_eye(browser: Browser, agent: Agent, scheme: str, sight: str) -> None:
    """A distance of 20 in CIELAB is two clearly different colours side by side."""
    page = browser.page(scheme=scheme)
    page.go(agent.url)
    colors = palette(page, "online", "batch", "rest", "wait")
    for one, other in (("online", "batch"), ("online", "rest"), ("batch", "rest"), ("online", "wait")):
        distance = dist(lab(colors[one], SIGHTS[sight]), lab(colors[other], SIGHTS[sight]))
        assert distance > 20, (one, other, distance)


def test_landmarks_and_names_for_readers(browser: Browser, agent: Agent, told: story.Story) -> None:
    agent.show(told.rounds)
    page = opened(browser, agent)
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles: dict[str, list[str]] = {}
    for node in nodes:
        roles.setdefault(node.get("role", {}).get("value", ""), []).append(node.get("name", {}).get("value", ""))
    assert len(roles["main"]) == 1
    assert {
        "Decisions",
        "Run-queue waits",
        "Who waits",
        "Who makes them wait",
        "Memory",
        "Threads by state",
        "Workloads",
        "Sources",
        "Verdict of the latest round",
    } <= set(roles["region"])
    assert all(name for role in ("slider", "searchbox", "combobox", "radio", "table") for name in roles.get(role, []))
    assert len(roles["slider"]) == 7
    heads = page.eval("[...document.querySelectorAll('h1, h2')].map(h => Number(h.tagName[1]))")
    assert all(b - a <= 1 for a, b in pairwise(heads))


def test_view_has_what_the_page_reads() -> None:
    """A renamed field would leave a dash on the page and no error anywhere."""
    assert {"threshold", "rule", "reason", "banner", "sources", "bounds_us", "requirement_cores"} <= set(
        View.__struct_fields__
    )
