"""The page while it is looked at: new rounds, a clock that is set, an agent that goes away and comes back."""

from __future__ import annotations

import pytest

from cli import formats
from exporters.view.cycle_view import build_view
from tests.browser.chromium import Browser, Page
from tests.browser.page_reader import LIVE, choose, heat_rows, opened, rows
from tests.builders import colocation_run, interference_node
from tests.builders.agent_server import AgentServer
from tests.builders.colocation_run import ColocationRun

pytestmark = pytest.mark.browser


def test_an_agent_that_goes_away_is_missed_and_its_return_is_noticed(
    page: Page, agent: AgentServer, reported: ColocationRun
) -> None:
    agent.go_away()
    page.until("document.body.dataset.live === 'away'")
    assert f"127.0.0.1:{agent.port} does not answer" in page.text("#alert")
    assert f"of {formats.clock(build_view(reported.rounds[-1]).wall_time_ms)}" in page.text("#alert")
    assert page.eval("document.querySelector('#alert').getAttribute('role')") == "alert"
    assert page.text("#live-text").startswith("no answer for")
    assert page.text("#lent") == formats.cores(build_view(reported.rounds[-1]).reclaimable_cores), (
        "the last numbers stay readable"
    )
    agent.journal.all = list(reported.entries[:1])
    agent.start()
    agent.show(reported.rounds[:7])
    page.until(LIVE)
    assert page.eval("document.querySelector('#alert').hidden") is True
    assert page.text("#live-text").startswith("cycle 7 ")
    page.until("document.querySelectorAll('.entry').length === 1")
    page.eval("document.querySelector('#cpu-chart details').open = true")
    page.until("document.querySelectorAll('#cpu-chart tbody tr').length > 0")
    assert len(rows(page, "#cpu-chart tbody")) == 7, (
        "rounds of the agent that was are not mixed with those of the new one"
    )


def test_rounds_that_come_later_are_drawn(browser: Browser, agent: AgentServer, reported: ColocationRun) -> None:
    agent.show(reported.rounds[:100])
    page = opened(browser, agent)
    agent.show(reported.rounds[100:101])
    page.until("document.querySelector('#live-text').textContent.startsWith('cycle 101 ')")
    agent.show(reported.rounds[101:140])
    page.until("document.querySelector('#live-text').textContent.startsWith('cycle 140 ')")
    page.eval("document.querySelector('#cpu-chart details').open = true")
    page.until("document.querySelectorAll('#cpu-chart tbody tr').length === 140")
    assert page.errors() == []


@pytest.mark.parametrize("by_s", [-3600, 3600])
def test_a_clock_that_is_set_moves_nothing(
    browser: Browser, agent: AgentServer, reported: ColocationRun, by_s: int
) -> None:
    """Set at round 120 while the page looks on; what is shown of each round is the time that it was then."""
    moved = colocation_run.with_clock_step(reported, 120, by_s)
    agent.journal.all = list(moved.entries)
    agent.show(moved.rounds[:118])
    page = opened(browser, agent)
    page.eval("document.querySelector('#cpu-chart details').open = true")
    for existing in range(119, 141):
        agent.show(moved.rounds[existing - 1 : existing])
        page.until(f"document.querySelector('#live-text').textContent.startsWith('cycle {existing} ')")
    page.until("document.querySelectorAll('#cpu-chart tbody tr').length === 140")
    clocks = [formats.clock(build_view(finished).wall_time_ms) for finished in reversed(moved.rounds[:140])]
    assert [row[0] for row in rows(page, "#cpu-chart tbody")] == clocks
    waits = [build_view(finished).containers[0].wait for finished in reported.rounds[110:140]]
    assert rows(page, "#waits-table tbody")[0][1] == formats.integer(sum(wait.count for wait in waits if wait))
    writes = [entry for entry in moved.entries if entry.cycle_seq <= 140]
    assert page.eval("document.querySelectorAll('#cpu-chart .mark').length") == len(writes) > 0
    reclaimable, inside = page.eval(
        """(() => { const box = document.querySelector('#cpu-chart svg').getBoundingClientRect();
        const lines = [...document.querySelectorAll('#cpu-chart .line')];
        const within = (b) => b.left >= box.left && b.right <= box.right;
        return [document.querySelectorAll('#cpu-chart .line.s-lent').length,
                lines.every((line) => within(line.getBoundingClientRect()))]; })()"""
    )
    assert reclaimable == 1, "no gap where no round is missing"
    assert inside
    page.eval("document.querySelector('.heat-plot').focus()")
    page.press("Home")
    message = page.eval("document.querySelector('.heat-plot').getAttribute('aria-valuetext')")
    assert f" at {clocks[-1]}: " in message
    assert page.errors() == []


def test_when_the_agent_dies_the_last_numbers_stay(browser: Browser, agent: AgentServer) -> None:
    agent.show(interference_node.interference_cycles(20))
    page = opened(browser, agent)
    before = rows(page, "#blame")
    agent.go_away()
    page.until("document.body.dataset.live === 'away'")
    assert rows(page, "#blame") == before
    assert "does not answer" in page.text("#alert")
    choose(page, "#filter", "web")
    assert heat_rows(page) == ["shop/web"], "they can still be looked through"


def test_a_page_that_is_paused_stands_still_and_then_misses_nothing(browser: Browser, agent: AgentServer) -> None:
    created = interference_node.interference_cycles(46, waves=True)
    agent.show(created[:40])
    page = opened(browser, agent)
    page.press("p", alt=True)
    page.until("document.querySelector('#pause').textContent === 'Resume'")
    assert page.text("[role=status]#pause-status") == "Paused: the page is not updated."
    assert page.text("#live-text").startswith("paused: cycle 40 ")
    page.eval("window.changes = 0; new MutationObserver((all) => { changes += all.length; })"
              ".observe(document.body, {childList: true, subtree: true, attributes: true, characterData: true})")  # fmt: skip
    agent.show(created[40:45])
    agent.journal.all = list(colocation_run.simulate_run(220).entries)
    page.eval("new Promise((done) => setTimeout(done, 2500))")  # more than two rounds
    assert page.eval("changes") == 0
    page.eval("document.querySelector('#pause').click()")
    page.until("document.querySelector('#live-text').textContent.startsWith('cycle 45 ')")
    assert page.text("#pause-status") == "Resumed: the page is updated."
    page.eval("document.querySelector('#cpu-chart details').open = true")
    page.until("document.querySelectorAll('#cpu-chart tbody tr').length === 45")
    agent.show(created[45:])
    page.until("document.querySelector('#live-text').textContent.startsWith('cycle 46 ')")
    assert page.errors() == []


def test_a_pause_is_not_taken_for_the_agents_silence(browser: Browser, agent: AgentServer) -> None:
    agent.show(interference_node.interference_cycles(5))
    page = opened(browser, agent)
    page.eval(
        "((now) => { window.ahead = 0; performance.now = () => now() + ahead; })(performance.now.bind(performance))"
    )
    page.eval("document.querySelector('#pause').click(); ahead = 3600000; document.querySelector('#pause').click()")
    page.until("/^cycle 5 |^no /.test(document.querySelector('#live-text').textContent)")
    assert page.text("#live-text").startswith("cycle 5 ")
