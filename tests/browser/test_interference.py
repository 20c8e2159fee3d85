"""Victims, aggressors, memory and threads on the page, against values that can be computed by hand."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from cli import formats
from cli.top.blame_matrix import average_blame, blame_summary
from cli.top.container_table import cgroup_labels
from exporters.view.cycle_view import View, build_view
from tests.browser.chromium import Browser
from tests.browser.page_reader import LIVE, choose, heat_rows, opened, rows
from tests.builders import four_cpu_node, interference_node
from tests.builders.agent_server import AgentServer
from tests.builders.interference_node import BATCH, BUILD, HOSTILE, PODS, WEB

pytestmark = pytest.mark.browser


def test_the_interference_matrix_can_be_computed_by_hand(browser: Browser, agent: AgentServer) -> None:
    """See the table at the top of tests/builders/interference_node.py."""
    created = interference_node.interference_cycles(40)
    agent.show(created)
    page = opened(browser, agent)
    assert rows(page, "#blame") == [
        ["victim ↓ aggressor →", "all waits", "lab/batch train", BUILD, "shop/web", "the rest", "own throttling",
         "real-time tasks", "other"],
        ["lab/batch train", "900", "500", "300", "", "", "80", "", "20"],
        ["shop/web", "400", "240", "100", "20", "", "30", "4.0", "6.0"],
        [BUILD, "120", "100", "15", "", "", "", "", "5.0"],
    ]  # fmt: skip
    views = [build_view(finished) for finished in created]
    assert page.text("#blame-top") == blame_summary(average_blame(views[-30:]), cgroup_labels(views[-1].containers)), (
        "as top says it"
    )
    assert page.text("#blame-top") == (
        "lab/batch train waits most for its own tasks, 56 % of its waits; "
        f"among other cgroups most for {BUILD}: 300 ms a second, 33 %."
    )
    selfs = page.eval("[...document.querySelectorAll('#blame .self')].map(c => c.textContent)")
    assert selfs == ["500", "20", "15"], "a cgroup's own tasks are marked"
    assert page.errors() == []


def test_the_matrix_is_walked_with_the_arrow_keys(browser: Browser, agent: AgentServer) -> None:
    agent.show(interference_node.interference_cycles(40))
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
    agent.show(interference_node.interference_cycles(44)[40:])
    page.until("document.querySelector('#live-text').textContent.startsWith('cycle 44 ')")
    assert page.eval("document.activeElement.textContent") == "6.0", "a new round leaves the place"
    roles = page.eval("document.activeElement.closest('table').getAttribute('role')")
    assert roles == "grid"


def test_the_filter_governs_all_pictures_and_the_table(browser: Browser, agent: AgentServer) -> None:
    agent.show(interference_node.interference_cycles(40, more=5))
    page = opened(browser, agent)
    choose(page, "#filter", "SHOP web")
    assert heat_rows(page) == ["shop/web"]
    assert [line[0] for line in rows(page, "#blame")[1:]] == ["shop/web"]
    assert [line[0] for line in rows(page, "#workloads")[1:]] == ["shop/web"]
    assert [line[0] for line in rows(page, "#threads")[1:]] == ["shop/web"]
    assert page.text("#matches") == "1 of 8"
    assert page.eval("document.querySelector('#matches').getAttribute('role')") == "status"
    choose(page, "#filter", "")
    choose(page, "#whose", "others")
    assert set(heat_rows(page)) == {BUILD, *(f"/kubepods/burstable/pod{k:03}" for k in range(5))}
    choose(page, "#filter", "nothing is called so")
    assert page.text("#no-workloads") == "No cgroup matches this filter; 1 more with lower values, see /metrics."


def test_the_table_is_sorted_by_its_heads(browser: Browser, agent: AgentServer) -> None:
    agent.show(interference_node.interference_cycles(40))
    page = opened(browser, agent)

    def press(head: str) -> tuple[list[str], Any]:
        actual = (
            f"[...document.querySelectorAll('#workloads th button')].find(b => b.textContent === {json.dumps(head)})"
        )
        page.eval(f"{actual}.click()")
        return [line[0] for line in rows(page, "#workloads")[1:]], page.eval(
            f"{actual}.parentElement.getAttribute('aria-sort')"
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
def test_columns_of_other_resources(
    browser: Browser, agent: AgentServer, columns: str, batch: list[str | None]
) -> None:
    agent.show(interference_node.interference_cycles(40))
    page = opened(browser, agent)
    page.eval(f"document.querySelector('#columns input[value={columns}]').click()")
    line = next(line for line in rows(page, "#workloads") if line[0] == "lab/batch")
    for actual, intended in zip(line[3:], batch, strict=True):
        assert intended is None or actual == intended


def test_memory_and_threads_are_the_views(browser: Browser, agent: AgentServer) -> None:
    agent.show(interference_node.interference_cycles(40))
    page = opened(browser, agent)
    assert page.text("#memory-free") == "2.00 GiB of 8.00 GiB available (25 %)"
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
    message = page.eval(
        """(() => { const plot = document.querySelector('#reclaim-chart .plot'); plot.focus();
        plot.dispatchEvent(new KeyboardEvent('keydown', {key: 'End'})); return plot.getAttribute('aria-valuetext'); })()"""
    )
    assert message.endswith("direct 82 ms, at limits 200 ms, kswapd 400 ms")


def test_a_node_without_listed_pods_is_worth_looking_at(browser: Browser, agent: AgentServer) -> None:
    created = interference_node.interference_cycles(40, pods=())
    agent.show(created)
    page = opened(browser, agent)
    assert page.text("#reason") == (
        "No pods are listed: every cgroup is measured, and nothing is decided. "
        "List pods with --kubelet, or in a file with --pods."
    )
    shown = page.eval(
        "[...document.querySelectorAll('.tile')].filter(t => t.offsetParent).map(t => t.querySelector('dt').textContent)"
    )
    assert shown == [
        "Node busy", "Run-queue latency p99", "Tasks waiting for a CPU", "CPU pressure", "Memory free",
        "Throttled most",
    ]  # fmt: skip
    assert page.text("#waiting") == formats.cores(1.42)
    assert page.text("#stalled") == "30 %"
    assert page.text("#wait-pod") == BATCH
    assert [line[0] for line in rows(page, "#blame")[1:]] == [BATCH, WEB, BUILD]
    assert rows(page, "#waits-table")[1][:2] == ["all cgroups", formats.integer(30 * 250)]
    assert page.errors() == []


def test_names_are_text_whatever_they_contain(browser: Browser, agent: AgentServer) -> None:
    agent.show(interference_node.interference_cycles(20, pods=(), hostile=True))
    page = browser.page()
    page.call(
        "Page.addScriptToEvaluateOnNewDocument", source="window.alarms = []; window.alert = (x) => alarms.push(x)"
    )
    page.go(agent.url)
    page.until(LIVE)
    names = {line[0] for line in rows(page, "#workloads")[1:]}
    assert {name.strip() for name in HOSTILE} <= names, "the table has them whole"
    page.until("document.querySelectorAll('.heat-names li').length > 0")  # drawn once its size is known
    titles = set(page.eval("[...document.querySelectorAll('.heat-names li')].map(n => n.title)"))
    assert set(HOSTILE) <= titles
    assert page.eval("alarms") == []
    assert page.eval("document.querySelectorAll('main script, main b b').length") == 0
    assert page.eval("document.documentElement.scrollWidth") == 1440
    assert page.errors() == []


def test_two_hundred_containers(browser: Browser, agent: AgentServer) -> None:
    many = tuple(
        msgspec.structs.replace(
            PODS[0], uid=f"p{k}", name=f"pod-{k:03}",
            containers=(msgspec.structs.replace(PODS[0].containers[0], cgroup=f"/kubepods/burstable/pod{k:03}"),),
        )
        for k in range(200)
    )  # fmt: skip
    agent.show(interference_node.interference_cycles(30, pods=many, more=200, waves=True))
    page = opened(browser, agent)
    assert len(heat_rows(page)) == 40
    assert page.text("#heat .note") == "163 more cgroups have lower values: use the filter"
    assert len(rows(page, "#blame")) == 17
    assert len(rows(page, "#workloads")) == 1 + 200 + 4, "the root too"
    assert len(rows(page, "#threads")) == 13
    choose(page, "#filter", "pod-199")
    assert heat_rows(page) == ["shop/pod-199 web"]
    assert page.eval("document.documentElement.scrollWidth") == 1440
    assert page.errors() == []


def test_what_was_not_measured_is_said_and_not_drawn(browser: Browser, agent: AgentServer) -> None:
    agent.show([four_cpu_node.bare_cycle()])
    page = opened(browser, agent)
    assert page.text("#no-blame").startswith("Aggressors are not measured")
    assert page.text("#heat .empty") == "Nothing has been measured yet."
    assert page.text("#no-threads").startswith("Threads are not measured, because the probe")
    assert page.text("#no-workloads") == "No cgroup runs, waits, reclaims or holds memory."
    for table in ("#zones", "#kswapd", "#threads"):
        assert page.eval(f"document.querySelector('{table}').hidden") is True
    assert page.text("#memory-free") == f"{formats.ABSENT} of {formats.ABSENT} available"
    assert page.errors() == []


def test_view_has_what_the_pictures_read() -> None:
    """A renamed field would leave a dash on the page and no error anywhere."""
    view = build_view(interference_node.interference_cycles(3)[-1])
    assert {"node", "others", "other_cgroups", "containers"} <= set(View.__struct_fields__)
    blame = view.containers[0].blame
    assert blame is not None
    assert {"culprits", "rest_ms", "throttled_ms", "higher_class_ms", "other_ms"} == set(blame.__struct_fields__)
