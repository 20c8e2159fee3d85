"""The heat map of waits in a real browser: its colours are the waits, and pointer and keyboard get their numbers."""

from __future__ import annotations

import pytest

from cli import formats
from exporters.view.cycle_view import build_view
from tests.browser.chromium import Browser
from tests.browser.page_reader import choose, heat_rows, opened, rows
from tests.builders import interference_node
from tests.builders.agent_server import AgentServer
from tests.builders.interference_node import BATCH, BUILD, WEB

pytestmark = pytest.mark.browser


STEPS = 9


def test_colours_of_the_heat_map_are_the_waits(browser: Browser, agent: AgentServer) -> None:
    created = interference_node.interference_cycles(40)
    agent.show(created)
    page = opened(browser, agent)
    assert heat_rows(page) == ["lab/batch train", BUILD, "shop/web"], "the longest wait first"
    bounds_us = [100, 300, 1e3, 3e3, 1e4, 3e4, 1e5, 1e6]
    view = build_view(created[-1])
    for line, cgroup in enumerate((BATCH, BUILD, WEB)):
        wait = next(c.wait for c in (*view.containers, *view.others) if c.cgroup == cgroup)
        assert wait is not None
        assert wait.p99_us is not None
        step = sum(wait.p99_us >= bound for bound in bounds_us)
        painted, intended = page.eval(
            f"""(() => {{ const canvas = document.querySelector('.heat-plot canvas'), box = canvas.getBoundingClientRect();
            const scale = canvas.width / box.width;
            const at = [canvas.width - 2, Math.round(({line} * 18 + 9) * scale)];
            const [r, g, b] = canvas.getContext('2d').getImageData(...at, 1, 1).data;
            const probe = document.createElement('i'); probe.className = 'h{step}'; document.body.append(probe);
            const want = getComputedStyle(probe).backgroundColor; probe.remove();
            return [`rgb(${{r}}, ${{g}}, ${{b}})`, want]; }})()"""
        )
        assert painted == intended, cgroup
    page.eval("document.querySelector('#heat details').open = true")
    page.until("document.querySelectorAll('#heat tbody tr').length === 3")
    batch = next(c.wait for c in view.containers if c.cgroup == BATCH)
    assert batch is not None
    assert rows(page, "#heat")[1][:2] == ["lab/batch train", formats.duration(batch.p99_us)]


def test_the_heat_map_tells_its_values_to_the_keyboard(browser: Browser, agent: AgentServer) -> None:
    agent.show(interference_node.interference_cycles(40))
    page = opened(browser, agent)
    page.eval("document.querySelector('.heat-plot').focus()")
    page.press("End")
    page.press("ArrowDown")
    page.press("ArrowLeft")
    message = page.eval("document.querySelector('.heat-plot').getAttribute('aria-valuetext')")
    at = formats.clock(build_view(interference_node.interference_cycles(39)[-1]).wall_time_ms)
    assert message.startswith(f"{BUILD} at {at}: wait p99 ")
    assert message.endswith("tasks waiting 0.12, waits 20, most because of lab/batch train")
    hand = page.eval("document.querySelector('#cpu-chart .readout').hidden")
    assert hand is False, "the other charts are at the same moment"
    page.press("Escape")
    assert page.eval("document.querySelector('.heat-mark').hidden") is True


def test_pointing_at_a_cell_shows_its_value(browser: Browser, agent: AgentServer) -> None:
    agent.show(interference_node.interference_cycles(40))
    page = opened(browser, agent)
    page.eval("document.querySelector('.heat-plot').scrollIntoView({block: 'center'})")
    x, y, width = page.eval("(b => [b.x, b.y, b.width])(document.querySelector('.heat-plot').getBoundingClientRect())")
    page.point(x + width - 3, y + 9)
    page.until("!document.querySelector('.heat-plot .readout').hidden")
    text = page.text(".heat-plot .readout")
    assert text.startswith("lab/batch train, ")
    assert "tasks waiting 0.90" in text


@pytest.mark.parametrize(
    ("metric", "first"), [("waiting", "lab/batch train"), ("throttled", "lab/batch train"), ("pressure", BUILD)]
)
def test_other_numbers_can_be_coloured(browser: Browser, agent: AgentServer, metric: str, first: str) -> None:
    agent.show(interference_node.interference_cycles(40))
    page = opened(browser, agent)
    choose(page, "#metric", metric)
    assert heat_rows(page)[0] == first
    names = page.eval("document.querySelector('#heat .legend').getAttribute('aria-label')")
    assert names.startswith("Colours change at ")
    assert len(page.eval("[...document.querySelectorAll('#heat .legend i')].map(i => i.textContent)")) == STEPS
