"""Accessibility of the page: screen readers, keyboard, and reduced motion."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from api.decision import Cycle
from api.snapshot import ThreadStates
from tests.browser.audit import AUDIT
from tests.browser.chromium import Browser, Page
from tests.browser.page_reader import opened
from tests.builders import four_cpu_node, interference_node
from tests.builders.agent_server import AgentServer

pytestmark = pytest.mark.browser


def kinds(kind: str) -> tuple[Any, ...]:
    return {
        "pods": lambda: interference_node.interference_cycles(40, more=30, waves=True),
        "nobody": lambda: interference_node.interference_cycles(40, pods=(), hostile=True, waves=True),
        "empty": lambda: (four_cpu_node.bare_cycle(),),
    }[kind]()


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_the_last_numbers_of_an_agent_that_is_away_can_be_read(
    browser: Browser, agent: AgentServer, scheme: str
) -> None:
    agent.show(kinds("pods"))
    page = opened(browser, agent, scheme=scheme)
    frame = "getComputedStyle(document.querySelector('main')).outlineStyle"
    assert page.eval(frame) == "none"
    agent.go_away()
    page.until("document.body.dataset.live === 'away'")
    assert page.eval(AUDIT) == []
    assert page.eval(frame) == "dashed"
    page.close()


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("kind", ["pods", "nobody", "empty"])
@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_can_be_used_by_everybody(
    browser: Browser, agent: AgentServer, scheme: str, kind: str, width: int
) -> None:
    agent.show(kinds(kind))
    page = opened(browser, agent, width, 900, scheme)
    page.eval("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.until("true")
    assert page.eval(AUDIT) == []
    assert page.eval("document.documentElement.scrollWidth") == width
    page.close()


def test_the_audit_finds_what_it_is_there_to_find(browser: Browser, agent: AgentServer) -> None:
    agent.show(kinds("pods"))
    page = opened(browser, agent)
    page.eval(
        """document.querySelector('footer').insertAdjacentHTML('beforeend',
        '<button></button><table id=t><tr><th>x</th></tr></table>' +
        '<h5>deep</h5><p class=pale id=act>pale</p><div id=veil><p class=faint>faint</p></div>' +
        '<svg></svg><a href=/ tabindex=3>first</a>')"""
    )
    page.eval("document.querySelector('.pale').style.color = getComputedStyle(document.body).backgroundColor")
    page.eval("document.querySelector('#veil').style.opacity = 0.5")
    actual = page.eval(AUDIT)
    for what in ("id act twice", "h2 is followed by h5", "table#t has no caption", "has no scope: x", "button has no name",
                 "svg is neither hidden nor named", "has a place of its own", "p#act.pale in footer: 1.00",
                 "p.faint in div#veil: "):  # fmt: skip
        assert any(what in line for line in actual), (what, actual)


def test_tab_goes_through_the_page_in_its_order_and_is_seen(browser: Browser, agent: AgentServer) -> None:
    agent.show(kinds("pods"))
    page = opened(browser, agent)
    page.eval("document.querySelector('#main').focus()")
    observed: list[tuple[float, str]] = []
    for _ in range(60):
        page.press("Tab")
        place, what, outline = page.eval(
            """(() => { const a = document.activeElement, own = getComputedStyle(a);
            const adjacent = a.nextElementSibling ? getComputedStyle(a.nextElementSibling) : own;
            const order = [...document.querySelectorAll('*')].indexOf(a);
            const what = a.id || a.className || a.name || a.getAttribute('aria-label') || a.textContent;
            return [order, what, [own, adjacent].some(s => s.outlineStyle !== 'none')]; })()"""
        )
        if what == "" or (observed and place < observed[-1][0]):
            break
        assert outline, f"the focus on {what} is not seen"
        observed.append((place, what))
    stops = [what for _, what in observed]
    for stop in ("filter", "whose", "metric", "order", "heat-plot"):
        assert stop in stops
    assert stops.index("filter") < stops.index("heat-plot")
    assert [place for place, _ in observed] == sorted(place for place, _ in observed)


def test_nothing_moves_with_reduced_motion(browser: Browser, agent: AgentServer) -> None:
    agent.show(interference_node.interference_cycles(10))
    page = opened(browser, agent)
    moving = page.eval(
        """[...document.querySelectorAll('*')].map(e => getComputedStyle(e))
        .filter(s => parseFloat(s.transitionDuration) > 0 || s.animationName !== 'none').length"""
    )
    assert moving == 0


def test_landmarks_and_names_for_readers(page: Page) -> None:
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles: dict[str, list[str]] = {}
    for node in nodes:
        roles.setdefault(node.get("role", {}).get("value", ""), []).append(node.get("name", {}).get("value", ""))
    assert len(roles["main"]) == 1
    assert {
        "Decisions",
        "Run-queue latency",
        "Run-queue latency by cgroup",
        "Aggressors",
        "Memory",
        "Threads by state",
        "Workloads",
        "Sources",
        "Result of the latest cycle",
    } <= set(roles["region"])
    assert all(name for role in ("slider", "searchbox", "combobox", "radio", "table") for name in roles.get(role, []))
    assert len(roles["slider"]) == 10
    heads = page.eval("[...document.querySelectorAll('h1, h2')].map(h => Number(h.tagName[1]))")
    assert all(b - a <= 1 for a, b in pairwise(heads))


def busier(finished: Cycle) -> Cycle:
    """The same round with other numbers wherever a test's node always has the same."""
    observed = finished.snapshot
    states = ThreadStates(runnable=4, uninterruptible=3, iowait=1, sleeping=5)
    node = msgspec.structs.replace(
        observed.node,
        memory_available_bytes=1 << 30,
        zones=tuple(msgspec.structs.replace(zone, free=zone.free // 2) for zone in observed.node.zones),
        kswapd={0: msgspec.structs.replace(observed.node.kswapd[0], wakeups=10**6)},
    )
    changed = msgspec.structs.replace(
        observed,
        node=node,
        sources=tuple(msgspec.structs.replace(s, ok=False, error="gone", remedy="wait") for s in observed.sources),
        cgroups={path: msgspec.structs.replace(c, threads_by_state=states) for path, c in observed.cgroups.items()},
    )
    return msgspec.structs.replace(finished, snapshot=changed)


def test_a_new_cycle_keeps_the_readers_place(browser: Browser, agent: AgentServer) -> None:
    """Every number may change; replacing an element would lose a screen reader's place."""
    created = interference_node.interference_cycles(40, waves=True)
    agent.show(created[:39])
    page = opened(browser, agent)
    page.eval("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.until("document.querySelectorAll('#latency-chart tbody tr').length === 39")
    places = (
        "#sources",
        "#threads",
        "#zones",
        "#kswapd",
        "#memory-free",
        "#blame",
        "#workloads",
        "#latency-chart table",
    )
    before = {place: page.text(place) for place in places}
    page.eval(
        """(() => { window.lost = []; new MutationObserver(all => all.forEach(change => change.removedNodes.forEach(node => {
    if (node.nodeType === 1 && !change.target.closest('[aria-hidden=true]')) lost.push(change.target.outerHTML.slice(0, 70));
        }))).observe(document.querySelector('main'), {childList: true, subtree: true}); })()"""
    )
    page.eval("(window.reading = document.querySelector('#blame [tabindex=\"0\"]')).focus()")
    agent.show([busier(created[39])])
    page.until("document.querySelector('#live-text').textContent.startsWith('cycle 40 ')")
    assert [place for place in places if page.text(place) == before[place]] == []
    assert page.eval("lost") == []
    assert page.eval("document.activeElement === reading")
    assert page.text("#sources li") == "✕ waitsfailed: gone310 µswait"
