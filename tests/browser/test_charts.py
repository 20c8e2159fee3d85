"""The page's charts in a real browser: their bars, lines and tables are the View's numbers, by eye and by keyboard."""

from __future__ import annotations

import msgspec
import pytest

from api.histogram import BOUNDS_NS
from cli import formats
from exporters.view.cycle_view import build_view
from tests.browser.chromium import Browser, Page
from tests.browser.page_reader import opened, rows
from tests.builders.agent_server import AgentServer
from tests.builders.colocation_run import ColocationRun
from tests.builders.full_node import FORECASTS, RICH_NODE

pytestmark = pytest.mark.browser


def test_distribution_of_one_round_is_the_views(page: Page, reported: ColocationRun) -> None:
    page.eval("document.querySelector('#span input[value=\"1\"]').click()")
    page.eval("document.querySelector('#waits-chart details').open = true")
    page.until("document.querySelectorAll('#waits-chart tbody tr').length === 27")
    web, batch = (c.wait for c in build_view(reported.rounds[-1]).containers)
    assert web is not None
    assert batch is not None
    assert web.slots is not None
    assert batch.slots is not None
    for k, (_, online, reclaimed) in enumerate(rows(page, "#waits-chart tbody")):
        assert online == f"{formats.integer(web.slots[k])} ({formats.percent(web.slots[k] / web.count)})"
        assert reclaimed == f"{formats.integer(batch.slots[k])} ({formats.percent(batch.slots[k] / batch.count)})"
    for side, wait in (("online", web), ("batch", batch)):
        assert wait.slots is not None
        bars = page.eval(f"document.querySelectorAll('#waits-chart rect.s-{side}').length")
        assert bars == sum(1 for count in wait.slots if count)
    throttled = build_view(reported.rounds[-1]).containers[1].throttled_ratio
    assert rows(page, "#waits-table tbody") == [
        ["online", formats.integer(web.count), formats.duration(web.p50_us), formats.duration(web.p99_us), "0 %"],
        ["batch", formats.integer(batch.count), formats.duration(batch.p50_us), formats.duration(batch.p99_us),
         formats.percent(throttled)],
    ]  # fmt: skip


def test_half_a_minute_of_waits_is_the_sum_of_its_rounds(page: Page, reported: ColocationRun) -> None:
    views = [build_view(finished) for finished in reported.rounds[-30:]]
    total = sum(view.containers[0].wait.count for view in views if view.containers[0].wait)
    assert rows(page, "#waits-table tbody")[0][1] == formats.integer(total)


def test_bars_are_where_the_waits_are(page: Page, reported: ColocationRun) -> None:
    """One slot further right is twice as long a wait: p99's line stands inside the bar of p99's slot."""
    page.eval("document.querySelector('#span input[value=\"1\"]').click()")
    web = build_view(reported.rounds[-1]).containers[0].wait
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


def test_the_shadow_policy_is_described_and_drawn(
    browser: Browser, agent: AgentServer, reported: ColocationRun
) -> None:
    advice = reported.rounds[-1].advice
    assert advice is not None
    shadow = msgspec.structs.replace(advice, policy="canonical", reclaimable_cores=1.0)
    agent.show([msgspec.structs.replace(finished, shadow=shadow) for finished in reported.rounds])
    page = opened(browser, agent)
    text = page.eval("document.getElementById('shadow').textContent")
    assert text.startswith(f"Shadow policy canonical: 1.00 reclaimable cores ({advice.action}). ")
    assert text.endswith(advice.reason.text)
    height = page.eval("document.querySelector('#cpu-chart path.s-shadow').getBBox().height")
    assert height < 1, "one core from the first round to the last is a level line"


def test_advice_for_the_node_is_shown(browser: Browser, agent: AgentServer, reported: ColocationRun) -> None:
    agent.show([msgspec.structs.replace(finished, node=RICH_NODE) for finished in reported.rounds])
    page = opened(browser, agent)
    assert page.eval("document.getElementById('answers').textContent") == (
        "Power: The node draws 100 W of 80 W at alert s0: power is capped to 80 W. Overcommitment: CPU: 1.60. Memory: 1.17."
    )
    agent.show(reported.rounds)
    page = opened(browser, agent)
    assert page.eval("document.getElementById('answers').hidden")


def test_without_a_shadow_nothing_is_said_of_one(page: Page) -> None:
    assert page.eval("document.getElementById('shadow').hidden")
    assert page.eval("document.querySelectorAll('#cpu-chart path.s-shadow').length") == 0
    page.eval("document.querySelector('#cpu-chart details').open = true")
    page.until("document.querySelectorAll('#cpu-chart tbody tr').length > 1")
    assert "shadow" not in page.eval("document.querySelector('#cpu-chart thead').textContent")


def test_charts_tell_their_numbers_to_the_keyboard(page: Page, reported: ColocationRun) -> None:
    page.eval("document.querySelector('#cpu-chart .plot').focus()")
    page.press("End")
    page.press("ArrowLeft")
    view = build_view(reported.rounds[-2])
    message = page.eval("document.querySelector('#cpu-chart .plot').getAttribute('aria-valuetext')")
    busy, online = view.busy_cores, view.containers[0].cpu_cores
    assert busy is not None
    assert online is not None
    assert view.reclaimed_cores is not None
    assert message == (
        f"{formats.clock(view.wall_time_ms)}: batch {formats.cores(view.reclaimed_cores)}, online {formats.cores(online)}, "
        f"other {formats.cores(busy - online - view.reclaimed_cores)}, reclaimable {formats.cores(view.reclaimable_cores)}"
    )
    page.press("Home")
    message = page.eval("document.querySelector('#latency-chart .plot').getAttribute('aria-valuetext')")
    assert (
        message == f"{formats.clock(build_view(reported.rounds[0]).wall_time_ms)}: "
        "p99 unknown, p50 unknown, queue p99 unknown"
    )


def test_chart_tables_hold_every_round(page: Page, reported: ColocationRun) -> None:
    page.eval("document.querySelector('#cpu-chart details').open = true")
    page.until("document.querySelectorAll('#cpu-chart tbody tr').length > 0")
    actual = rows(page, "#cpu-chart tbody")
    assert len(actual) == len(reported.rounds)
    reclaimable = [build_view(finished).reclaimable_cores for finished in reversed(reported.rounds)]
    assert [row[4] for row in actual] == [formats.cores(value) for value in reclaimable]


def test_the_forecast_is_shown_with_its_miss_ratio(
    browser: Browser, agent: AgentServer, reported: ColocationRun
) -> None:
    agent.show([msgspec.structs.replace(finished, forecasts=FORECASTS) for finished in reported.rounds])
    page = opened(browser, agent)
    assert page.eval("document.getElementById('forecast').textContent") == (
        "Forecast for the next hour, without batch work: at most 2.25 cores, 1.50 cores now, missed 6.3 % of the last day's"
        " (5.5 % allowed); at most 2.93 GiB of memory, 1.95 GiB now, missed 25 % of the last day's (5.5 % allowed)."
    )
