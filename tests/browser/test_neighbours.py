"""Who waits, for whom, and what the kernel says of memory and threads: on the page, for every eye, ear and hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from cli import words
from exporters.view import View, build
from tests import fakes
from tests.browser.audit import AUDIT
from tests.browser.chromium import Browser, Page, chromium
from tests.cli import neighbours
from tests.cli.agent import Agent
from tests.cli.neighbours import BATCH, BUILD, HOSTILE, PODS, WEB

pytestmark = pytest.mark.browser

LIVE = "document.body.dataset.live === 'live'"
STEPS = 9


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.close()


def opened(browser: Browser, agent: Agent, width: int = 1440, height: int = 1000, scheme: str = "dark") -> Page:
    page = browser.page(width, height, scheme)
    page.go(agent.url)
    page.until(LIVE)
    return page


def rows(page: Page, table: str) -> list[list[str]]:
    found: list[list[str]] = page.eval(
        f"[...document.querySelectorAll('{table} tr')].map(r => [...r.cells].map(c => c.textContent.trim()))"
    )
    return found


def choose(page: Page, control: str, value: str) -> None:
    page.eval(
        f"""(() => {{ const c = document.querySelector({json.dumps(control)}); c.value = {json.dumps(value)};
        c.dispatchEvent(new Event('input', {{bubbles: true}})); }})()"""
    )


def test_who_waits_for_whom_can_be_computed_by_hand(browser: Browser, agent: Agent) -> None:
    """See the table at the top of tests/cli/neighbours.py."""
    agent.show(neighbours.rounds(40))
    page = opened(browser, agent)
    assert rows(page, "#blame") == [
        ["waits ↓ for →", "all waits", "lab/batch train", BUILD, "shop/web", "the rest", "own throttling", "real-time tasks",
         "other"],
        ["lab/batch train", "900", "500", "300", "", "", "80", "", "20"],
        ["shop/web", "400", "240", "100", "20", "", "30", "4.0", "6.0"],
        [BUILD, "120", "100", "15", "", "", "", "", "5.0"],
    ]  # fmt: skip
    assert page.text("#blame-top") == f"lab/batch train waits most for {BUILD}: 300 ms a second, 33 % of its waits."
    selfs = page.eval("[...document.querySelectorAll('#blame .self')].map(c => c.textContent)")
    assert selfs == ["500", "20", "15"], "a cgroup's own tasks are marked"
    assert page.errors() == []


def test_the_matrix_is_walked_with_the_arrow_keys(browser: Browser, agent: Agent) -> None:
    agent.show(neighbours.rounds(40))
    page = opened(browser, agent)
    assert page.eval("document.querySelectorAll('#blame [tabindex=\"0\"]').length") == 1, "one stop for Tab"
    page.eval("document.querySelector('#blame [tabindex=\"0\"]').focus()")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        page.press(key)
    assert page.eval("document.activeElement.textContent") == "500"
    page.press("End")
    assert page.eval("document.activeElement.textContent") == "20"
    page.press("ArrowDown")
    assert page.eval("document.activeElement.textContent") == "6.0"
    assert page.eval("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    agent.show(neighbours.rounds(44)[40:])
    page.until("document.querySelector('#live-text').textContent.startsWith('round 44 ')")
    assert page.eval("document.activeElement.textContent") == "6.0", "a new round leaves the place"
    roles = page.eval("document.activeElement.closest('table').getAttribute('role')")
    assert roles == "grid"


def heat_rows(page: Page) -> list[str]:
    names: list[str] = page.eval("[...document.querySelectorAll('.heat-names li')].map(n => n.textContent)")
    return names


def test_colours_of_the_heat_map_are_the_waits(browser: Browser, agent: Agent) -> None:
    made = neighbours.rounds(40)
    agent.show(made)
    page = opened(browser, agent)
    assert heat_rows(page) == ["lab/batch train", BUILD, "shop/web"], "the longest wait first"
    bounds_us = [100, 300, 1e3, 3e3, 1e4, 3e4, 1e5, 1e6]
    view = build(made[-1])
    for line, cgroup in enumerate((BATCH, BUILD, WEB)):
        wait = next(c.wait for c in (*view.containers, *view.others) if c.cgroup == cgroup)
        assert wait is not None
        assert wait.p99_us is not None
        step = sum(wait.p99_us >= bound for bound in bounds_us)
        painted, meant = page.eval(
            f"""(() => {{ const canvas = document.querySelector('.heat-plot canvas'), box = canvas.getBoundingClientRect();
            const scale = canvas.width / box.width;
            const at = [canvas.width - 2, Math.round(({line} * 18 + 9) * scale)];
            const [r, g, b] = canvas.getContext('2d').getImageData(...at, 1, 1).data;
            const probe = document.createElement('i'); probe.className = 'h{step}'; document.body.append(probe);
            const want = getComputedStyle(probe).backgroundColor; probe.remove();
            return [`rgb(${{r}}, ${{g}}, ${{b}})`, want]; }})()"""
        )
        assert painted == meant, cgroup
    page.eval("document.querySelector('#heat details').open = true")
    page.until("document.querySelectorAll('#heat tbody tr').length === 3")
    batch = next(c.wait for c in view.containers if c.cgroup == BATCH)
    assert batch is not None
    assert rows(page, "#heat")[1][:2] == ["lab/batch train", words.duration(batch.p99_us)]


def test_the_heat_map_tells_its_values_to_the_keyboard(browser: Browser, agent: Agent) -> None:
    agent.show(neighbours.rounds(40))
    page = opened(browser, agent)
    page.eval("document.querySelector('.heat-plot').focus()")
    page.press("End")
    page.press("ArrowDown")
    page.press("ArrowLeft")
    said = page.eval("document.querySelector('.heat-plot').getAttribute('aria-valuetext')")
    at = words.clock(build(neighbours.rounds(39)[-1]).wall_time_ms)
    assert said.startswith(f"{BUILD} at {at}: wait p99 ")
    assert said.endswith(f"tasks waiting 0.12, waits 20, most because of {BATCH}")
    hand = page.eval("document.querySelector('#cpu-chart .readout').hidden")
    assert hand is False, "the other charts are at the same moment"
    page.press("Escape")
    assert page.eval("document.querySelector('.heat-mark').hidden") is True


def test_pointing_at_a_cell_shows_its_value(browser: Browser, agent: Agent) -> None:
    agent.show(neighbours.rounds(40))
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
def test_other_numbers_can_be_coloured(browser: Browser, agent: Agent, metric: str, first: str) -> None:
    agent.show(neighbours.rounds(40))
    page = opened(browser, agent)
    choose(page, "#metric", metric)
    assert heat_rows(page)[0] == first
    names = page.eval("document.querySelector('#heat .legend').getAttribute('aria-label')")
    assert names.startswith("Colours change at ")
    assert len(page.eval("[...document.querySelectorAll('#heat .legend i')].map(i => i.textContent)")) == STEPS


def test_the_filter_governs_all_pictures_and_the_table(browser: Browser, agent: Agent) -> None:
    agent.show(neighbours.rounds(40, more=5))
    page = opened(browser, agent)
    choose(page, "#filter", "SHOP web")
    assert heat_rows(page) == ["shop/web"]
    assert [line[0] for line in rows(page, "#blame")[1:]] == ["shop/web"]
    assert [line[0] for line in rows(page, "#workloads")[1:]] == ["shop/web"]
    assert [line[0] for line in rows(page, "#threads")[1:]] == ["shop/web"]
    choose(page, "#filter", "")
    choose(page, "#whose", "others")
    assert set(heat_rows(page)) == {BUILD, *(f"/kubepods/burstable/pod{k:03}" for k in range(5))}
    choose(page, "#filter", "nothing is called so")
    assert page.text("#no-workloads") == "No cgroup fits this filter."


def test_the_table_is_sorted_by_its_heads(browser: Browser, agent: Agent) -> None:
    agent.show(neighbours.rounds(40))
    page = opened(browser, agent)

    def press(head: str) -> tuple[list[str], Any]:
        found = (
            f"[...document.querySelectorAll('#workloads th button')].find(b => b.textContent === {json.dumps(head)})"
        )
        page.eval(f"{found}.click()")
        return [line[0] for line in rows(page, "#workloads")[1:]], page.eval(
            f"{found}.parentElement.getAttribute('aria-sort')"
        )

    assert [line[0] for line in rows(page, "#workloads")[1:]] == ["shop/web", "lab/batch", BUILD]
    assert press("CPU cores") == (["lab/batch", "shop/web", BUILD], "descending")
    assert press("CPU cores") == ([BUILD, "shop/web", "lab/batch"], "ascending")
    assert press("CPU cores") == (["shop/web", "lab/batch", BUILD], None)
    assert press("Pod or cgroup") == ([BUILD, "lab/batch", "shop/web"], "ascending")


@pytest.mark.parametrize(
    ("columns", "batch"),
    [
        ("memory", ["300 MiB", "320 MiB", "94 %", "2.0 %", "0", "200 ms/s", "640", "2.0", "40", "1"]),
        ("io", ["1.00 MiB/s", "0 B/s", None, "0.5 %", "2.00 MiB/s", "1.00 MiB/s", "3.0"]),
        ("threads", ["12", "3", "2", "1", "7", "1.50", "1.25", "1.00", "0.90", None]),
    ],
)
def test_columns_of_other_resources(browser: Browser, agent: Agent, columns: str, batch: list[str | None]) -> None:
    agent.show(neighbours.rounds(40))
    page = opened(browser, agent)
    page.eval(f"document.querySelector('#columns input[value={columns}]').click()")
    line = next(line for line in rows(page, "#workloads") if line[0] == "lab/batch")
    for found, meant in zip(line[3:], batch, strict=True):
        assert meant is None or found == meant


def test_memory_and_threads_are_the_views(browser: Browser, agent: Agent) -> None:
    agent.show(neighbours.rounds(40))
    page = opened(browser, agent)
    assert page.text("#memory-free") == "2.00 GiB of 8.00 GiB could be had (25 %)"
    assert (
        page.text("#memory-facts") == "direct reclaim82.0 ms a secondreclaim at limits200 ms a secondrefaults80 pages/s"
    )
    assert rows(page, "#kswapd")[1] == ["NUMA node 0", "40 %", "3.0", "5,000", "4,000"]
    zones = rows(page, "#zones")
    assert zones[1][:3] == ["0 DMA32", "19 %", "45.0 \u00d7 high"]
    assert zones[2][:3] == ["0 Normal", "0.8 %", "below low"]
    assert page.eval("document.querySelectorAll('#zones [data-state=low]').length") == 1
    assert "train<b> (process 4242) of /batch" in page.text("#oom")
    assert rows(page, "#threads")[1] == ["shop/web", "3", "1", "1", "7", "1.50", ""], "stuck: not for a disk"
    said = page.eval(
        """(() => { const plot = document.querySelector('#reclaim-chart .plot'); plot.focus();
        plot.dispatchEvent(new KeyboardEvent('keydown', {key: 'End'})); return plot.getAttribute('aria-valuetext'); })()"""
    )
    assert said.endswith("direct 82 ms, at limits 200 ms, kswapd 400 ms")


def test_a_node_without_listed_pods_is_worth_looking_at(browser: Browser, agent: Agent) -> None:
    made = neighbours.rounds(40, pods=())
    agent.show(made)
    page = opened(browser, agent)
    assert page.text("#reason") == "No pods are listed: every cgroup is watched, and nothing is decided."
    shown = page.eval(
        "[...document.querySelectorAll('.tile')].filter(t => t.offsetParent).map(t => t.querySelector('dt').textContent)"
    )
    assert shown == [
        "Node busy", "Longest run-queue wait p99", "Tasks waiting for a CPU", "CPU pressure", "Memory free", "Throttled most",
    ]  # fmt: skip
    assert page.text("#waiting") == words.cores(1.42)
    assert page.text("#stalled") == "30 %"
    assert page.text("#wait-who") == BATCH
    assert [line[0] for line in rows(page, "#blame")[1:]] == [BATCH, WEB, BUILD]
    assert rows(page, "#waits-table")[1][:2] == ["all cgroups", words.integer(30 * 250)]
    assert page.errors() == []


def test_names_are_text_whatever_they_contain(browser: Browser, agent: Agent) -> None:
    agent.show(neighbours.rounds(20, pods=(), hostile=True))
    page = browser.page()
    page.call(
        "Page.addScriptToEvaluateOnNewDocument", source="window.alarms = []; window.alert = (x) => alarms.push(x)"
    )
    page.go(agent.url)
    page.until(LIVE)
    names = {line[0] for line in rows(page, "#workloads")[1:]}
    assert {name.strip() for name in HOSTILE} <= names, "the table has them whole"
    titles = set(page.eval("[...document.querySelectorAll('.heat-names li')].map(n => n.title)"))
    assert set(HOSTILE) <= titles
    assert page.eval("alarms") == []
    assert page.eval("document.querySelectorAll('main script, main b b').length") == 0
    assert page.eval("document.documentElement.scrollWidth") == 1440
    assert page.errors() == []


def test_two_hundred_containers(browser: Browser, agent: Agent) -> None:
    many = tuple(
        msgspec.structs.replace(
            PODS[0], uid=f"p{k}", name=f"pod-{k:03}",
            containers=(msgspec.structs.replace(PODS[0].containers[0], cgroup=f"/kubepods/burstable/pod{k:03}"),),
        )
        for k in range(200)
    )  # fmt: skip
    agent.show(neighbours.rounds(30, pods=many, more=200, waves=True))
    page = opened(browser, agent)
    assert len(heat_rows(page)) == 40
    assert page.text("#heat .note") == "and 163 more that wait less; the filter finds them"
    assert len(rows(page, "#blame")) == 17
    assert len(rows(page, "#workloads")) == 1 + 200 + 4, "the root too"
    assert len(rows(page, "#threads")) == 13
    choose(page, "#filter", "pod-199")
    assert heat_rows(page) == ["shop/pod-199 web"]
    assert page.eval("document.documentElement.scrollWidth") == 1440
    assert page.errors() == []


def test_what_was_not_measured_is_said_and_not_drawn(browser: Browser, agent: Agent) -> None:
    agent.show([fakes.bare_round()])
    page = opened(browser, agent)
    assert page.text("#no-blame").startswith("Who had the CPU meanwhile is not known")
    assert page.text("#heat .empty") == "Nothing has been measured yet."
    assert page.text("#no-threads").startswith("Not measured")
    assert page.text("#no-workloads") == "No cgroup runs, waits or reclaims."
    for table in ("#zones", "#kswapd", "#threads"):
        assert page.eval(f"document.querySelector('{table}').hidden") is True
    assert page.text("#memory-free") == f"{words.NONE} of {words.NONE} could be had"
    assert page.errors() == []


def test_when_the_agent_dies_the_last_numbers_stay(browser: Browser, agent: Agent) -> None:
    agent.show(neighbours.rounds(20))
    page = opened(browser, agent)
    before = rows(page, "#blame")
    agent.go_away()
    page.until("document.body.dataset.live === 'away'")
    assert rows(page, "#blame") == before
    assert "does not answer" in page.text("#alert")
    choose(page, "#filter", "web")
    assert heat_rows(page) == ["shop/web"], "they can still be looked through"


def kinds(kind: str) -> tuple[Any, ...]:
    return {
        "pods": lambda: neighbours.rounds(40, more=30, waves=True),
        "nobody": lambda: neighbours.rounds(40, pods=(), hostile=True, waves=True),
        "empty": lambda: (fakes.bare_round(),),
    }[kind]()


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("kind", ["pods", "nobody", "empty"])
@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_can_be_used_by_everybody(browser: Browser, agent: Agent, scheme: str, kind: str, width: int) -> None:
    agent.show(kinds(kind))
    page = opened(browser, agent, width, 900, scheme)
    page.eval("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.until("true")
    assert page.eval(AUDIT) == []
    assert page.eval("document.documentElement.scrollWidth") == width
    page.close()


def test_the_audit_finds_what_it_is_there_to_find(browser: Browser, agent: Agent) -> None:
    agent.show(kinds("pods"))
    page = opened(browser, agent)
    page.eval(
        """document.querySelector('footer').insertAdjacentHTML('beforeend',
        '<button></button><table id=t><tr><th>x</th></tr></table>' +
        '<h5>deep</h5><p class=pale id=act>pale</p><svg></svg><a href=/ tabindex=3>first</a>')"""
    )
    page.eval("document.querySelector('.pale').style.color = getComputedStyle(document.body).backgroundColor")
    found = page.eval(AUDIT)
    for what in ("id act twice", "h2 is followed by h5", "table#t has no caption", "has no scope: x", "button has no name",
                 "svg is neither hidden nor named", "has a place of its own", "p#act.pale in footer: 1.00"):  # fmt: skip
        assert any(what in line for line in found), (what, found)


def test_tab_goes_through_the_page_in_its_order_and_is_seen(browser: Browser, agent: Agent) -> None:
    agent.show(kinds("pods"))
    page = opened(browser, agent)
    page.eval("document.querySelector('#main').focus()")
    seen: list[tuple[float, str]] = []
    for _ in range(60):
        page.press("Tab")
        place, what, outline = page.eval(
            """(() => { const a = document.activeElement, own = getComputedStyle(a);
            const beside = a.nextElementSibling ? getComputedStyle(a.nextElementSibling) : own;
            const order = [...document.querySelectorAll('*')].indexOf(a);
            const what = a.id || a.className || a.name || a.getAttribute('aria-label') || a.textContent;
            return [order, what, [own, beside].some(s => s.outlineStyle !== 'none')]; })()"""
        )
        if what == "" or (seen and place < seen[-1][0]):
            break
        assert outline, f"the focus on {what} is not seen"
        seen.append((place, what))
    stops = [what for _, what in seen]
    for stop in ("filter", "whose", "metric", "order", "heat-plot"):
        assert stop in stops
    assert stops.index("filter") < stops.index("heat-plot")
    assert [place for place, _ in seen] == sorted(place for place, _ in seen)


def test_nothing_moves_for_those_who_asked_for_that(browser: Browser, agent: Agent) -> None:
    agent.show(neighbours.rounds(10))
    page = opened(browser, agent)
    moving = page.eval(
        """[...document.querySelectorAll('*')].map(e => getComputedStyle(e))
        .filter(s => parseFloat(s.transitionDuration) > 0 || s.animationName !== 'none').length"""
    )
    assert moving == 0


def test_view_has_what_the_pictures_read() -> None:
    """A renamed field would leave a dash on the page and no error anywhere."""
    view = build(neighbours.rounds(3)[-1])
    assert {"node", "others", "other_cgroups", "containers"} <= set(View.__struct_fields__)
    blame = view.containers[0].blame
    assert blame is not None
    assert {"culprits", "rest_ms", "throttled_ms", "higher_class_ms", "other_ms"} == set(blame.__struct_fields__)
