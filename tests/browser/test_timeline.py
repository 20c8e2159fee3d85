"""The page's picture of decisions over time, and what was advised behind the sums, in a real browser."""

from __future__ import annotations

import msgspec
import pytest

from api.decision import OutcomeStatus
from cli import formats
from exporters.view.cycle_view import build_view
from tests.browser.chromium import Browser, Page
from tests.browser.page_reader import choose, opened, rows
from tests.builders import colocation_run
from tests.builders.agent_server import AgentServer
from tests.builders.colocation_run import ColocationRun
from tests.builders.full_node import RICH_CPU, RICH_MEMORY, RICH_REJECTED

pytestmark = pytest.mark.browser


def marks(page: Page) -> int:
    count: int = page.eval("document.querySelectorAll('#lanes .deed').length")
    return count


def pick(page: Page, seq: int, event: str) -> None:
    """Have the pointer do that on the mark of a decision."""
    page.eval(
        f"""(() => {{ const mark = document.querySelector('#lanes .deed[data-seq="{seq}"]'), at = mark.getBoundingClientRect();
        mark.dispatchEvent(new PointerEvent('{event}', {{bubbles: true, clientX: at.x + at.width / 2, clientY: at.y + 3}}));
        }})()"""
    )


def test_every_decision_is_a_mark_on_the_axis_of_reclaimable_cpu(page: Page, reported: ColocationRun) -> None:
    page.until(f"document.querySelectorAll('#lanes .deed').length === {len(reported.entries)}")
    lanes = page.eval("[...document.querySelectorAll('#lanes text')].map(t => t.textContent)")
    assert "default/batch · cpu.idle" in lanes
    assert "default/batch · cpu.max" in lanes
    pick(page, reported.entries[-1].seq, "pointermove")
    off_px = page.eval(
        """(() => { const x = (s) => document.querySelector(s).getBoundingClientRect().x;
        return Math.abs(x('#lanes .hand line') - x('#then-lent .hand line')); })()"""
    )
    assert off_px < 2, "one moment is one place on all of them"


def test_pointing_tells_the_reason_and_a_click_opens_it_in_the_list(page: Page, reported: ColocationRun) -> None:
    page.until("document.querySelectorAll('#lanes .deed').length > 0")
    spike = next(e for e in reported.entries if e.outcome.decision.reason.rule == "wait_far_above_target")
    pick(page, spike.seq, "pointermove")
    message = page.text("#decisions-at")
    for part in (
        formats.clock(spike.wall_time_ns / 1e6),
        formats.knob_change(spike.outcome),
        spike.outcome.decision.reason.text,
    ):
        assert part in message
    around = [e.seq for e in reported.entries if abs(e.wall_time_ns - spike.wall_time_ns) <= 5 * colocation_run.S]
    assert page.eval("[...document.querySelectorAll('#lens .deed')].map(mark => Number(mark.dataset.seq))") == around
    seconds_px = page.eval("(() => { const t = [...document.querySelectorAll('#lens line')]; return t[1].x1.baseVal.value - "
                           "t[0].x1.baseVal.value; })()")  # fmt: skip
    shown_px = page.eval("document.querySelector('#lanes').clientWidth")
    assert seconds_px > 10 * shown_px / 300, "the seconds around it are drawn large"
    choose(page, "#find", "nothing fits this")
    pick(page, spike.seq, "click")
    opened_one = page.eval("document.querySelector('.entry details[open]').textContent")
    assert spike.outcome.decision.reason.text in opened_one
    pick(page, spike.seq, "pointerleave")
    page.eval("document.querySelector('#lanes').dispatchEvent(new PointerEvent('pointerleave'))")
    assert spike.outcome.decision.reason.text in page.text("#decisions-at"), "the chosen decision stays listed"


def test_the_arrow_keys_walk_from_one_decision_to_the_next(page: Page, reported: ColocationRun) -> None:
    page.until("document.querySelectorAll('#lanes .deed').length > 0")
    heard = []
    for _ in range(2):
        page.eval("document.querySelector('#lanes').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}))")
        heard.append(page.eval("document.querySelector('#lanes').getAttribute('aria-valuetext')"))
    newest, before = reported.entries[-1], reported.entries[-2]
    for text, entry in zip(heard, (newest, before), strict=True):
        assert text.startswith(formats.clock(entry.wall_time_ns / 1e6))
        assert text.endswith(entry.outcome.decision.reason.text)


def test_lanes_are_by_what_is_chosen_and_what_was_not_written_looks_so(
    browser: Browser, agent: AgentServer, reported: ColocationRun
) -> None:
    entries = list(reported.entries)
    for i, status in enumerate((OutcomeStatus.REFUSED, OutcomeStatus.DRY_RUN, OutcomeStatus.VANISHED), 1):
        outcome = msgspec.structs.replace(entries[-i].outcome, status=status)
        entries[-i] = msgspec.structs.replace(entries[-i], outcome=outcome)
    agent.journal.all = entries
    agent.show(reported.rounds)
    page = opened(browser, agent)
    page.until("document.querySelectorAll('#lanes .deed').length > 0")
    choose(page, "#lanes-by", "status")
    lanes = page.eval("[...document.querySelectorAll('#lanes text')].map(t => t.textContent)")
    assert {"applied", "dry-run", "refused", "vanished"} <= set(lanes)
    looks = page.eval(
        """['applied', 'dry-run', 'refused', 'vanished'].map(status => { const s = getComputedStyle(document.querySelector(
        `.deed.${status}`)); return [s.fill, s.strokeDasharray, s.stroke].join(); })"""
    )
    assert len(set(looks)) == 4
    written = page.eval("document.querySelectorAll('#cpu-chart .mark').length")
    assert written == len(entries) - 3, "the CPU chart has the writes alone"


def test_pools_regions_rejected_pods_and_memory_are_shown(
    browser: Browser, agent: AgentServer, reported: ColocationRun
) -> None:
    last = reported.rounds[-1]
    assert last.advice is not None
    advice = msgspec.structs.replace(last.advice, cpu=RICH_CPU, rejected=RICH_REJECTED)
    last = msgspec.structs.replace(last, advice=advice, memory=RICH_MEMORY)
    agent.show((*reported.rounds[:-1], last))
    page = opened(browser, agent)
    page.until("document.querySelectorAll('#regions li').length > 0")
    pools = {cells[0]: cells[1:] for cells in rows(page, "#pool-rows tbody")}
    assert pools["share-NUMA0"] == ["none", "3 on NUMA 0"]
    assert pools["reclaim"] == [build_view(last).pools["reclaim"], "1, at most 1.50 cores"]
    region = page.text("#regions")
    assert "rama · 1.00 to 4.00 cores · non-reclaimed-cpu-requirement 3.00 · cpu_sched_wait 450 of 400" in region
    assert RICH_CPU.regions[0].reason.text in region
    assert page.text("#rejected li") == f"default/db {RICH_REJECTED['default/db'].text}"
    memory = rows(page, "#memory-rows tbody")
    assert memory == [
        ["node", "3.00 GiB", formats.ABSENT, "✓ no risk"],
        ["NUMA 0", "3.00 GiB", "2.00 GiB", "▲ tune memcg, 256 MiB short"],
        ["NUMA 1", formats.ABSENT, formats.ABSENT, "? unknown"],
    ]
    assert "The cache reaper is switched off." in page.text("#memory-reasons")
