"""The page's card of evictions: thresholds and observed values, conditions, and evicted pods."""

from __future__ import annotations

import msgspec
import pytest

from api.decision import Cycle
from cli import formats
from tests.browser.audit import AUDIT
from tests.browser.chromium import Browser
from tests.browser.page_reader import opened, rows
from tests.builders.agent_server import AgentServer
from tests.builders.four_cpu_node import busy_cycle
from tests.builders.full_node import MEMORY_PLUGIN, RICH_EVICTIONS, RICH_KILLS

pytestmark = pytest.mark.browser


def reported(seq: int) -> Cycle:
    kills = RICH_KILLS if seq == 3 else ()
    return msgspec.structs.replace(busy_cycle(seq), evictions=RICH_EVICTIONS, kills=kills)


def test_the_card_shows_thresholds_conditions_and_evicted_pods(browser: Browser, agent: AgentServer) -> None:
    agent.show(reported(seq) for seq in (1, 2, 3))
    page = opened(browser, agent)
    page.until("document.querySelectorAll('#evicted li').length > 0")
    note = "2 of 3 thresholds met · 1 not evaluated · terminating: default/batch"
    assert page.text("#evictions-note") == f"{note} · default/needed is blocked for now: budget"
    assert [row[:4] for row in rows(page, "#thresholds tbody")] == [
        [f"{MEMORY_PLUGIN} free", "■ hard for 2.00 s", "64.0 MiB", "< 96.0 MiB"],
        ["rss-overuse-eviction-plugin rss", "▲ soft for 2.00 s, dry run", "1.5", "> 1.05"],
        [f"{MEMORY_PLUGIN} psi", "not evaluated", formats.ABSENT, formats.ABSENT],
    ]
    assert rows(page, "#thresholds tbody")[0][4] == "64.0 MiB of memory are free; the watermark is 96.0 MiB."
    condition = page.text("#conditions li")
    assert condition == f"Condition MemoryPressure (NoSchedule) is set; {MEMORY_PLUGIN} met its threshold 2.00 s ago."
    actual = page.eval(
        "[...document.querySelectorAll('#evicted li')].map(e => [e.dataset.fate, e.textContent.replace(/\\s+/g, ' ')])"
    )
    assert [fate for fate, _ in actual] == ["done", "bad", "done", "done", "shown", "done"]
    assert "default/stuck EvictExceededGracePeriod" in actual[1][1]
    assert "default/web would be evicted" in actual[4][1]
    assert f"default/batch is evicted{MEMORY_PLUGIN}: plugin met threshold: 64.0 MiB are free" in actual[5][1]
    assert not page.eval("document.querySelector('#evictions').hidden")
    page.close()


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("width", [320, 1280])
def test_the_card_fits_and_can_be_used_by_everybody(
    browser: Browser, agent: AgentServer, width: int, scheme: str
) -> None:
    agent.show(reported(seq) for seq in (1, 2, 3))
    page = opened(browser, agent, width, 800, scheme)
    page.until("document.querySelectorAll('#evicted li').length > 0")
    assert page.eval("document.documentElement.scrollWidth") == width
    assert page.eval(AUDIT) == []
    page.close()


def test_without_a_plugin_there_is_no_card_and_no_request(browser: Browser, agent: AgentServer) -> None:
    agent.show(busy_cycle(seq) for seq in (1, 2))
    page = opened(browser, agent)
    assert page.eval("document.querySelector('#evictions').hidden")
    assert page.eval("performance.getEntriesByType('resource').filter(e => e.name.includes('/evictions?')).length") == 0
    page.close()
