"""The screens of `dioptase top` besides the overview, and the keys that select them."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import pytest
from rich.console import Group
from rich.text import Text

from cli import formats
from cli.top.blame_matrix import BlameRow, blame_matrix, blame_summary
from cli.top.frame import overview_lines, render
from cli.top.screens import SCREENS, SORT_BY_NAME, ScreenSelection, handle_key
from exporters.view.cycle_view import View, build_view
from tests.builders import colocation_run, four_cpu_node, interference_node
from tests.builders.full_node import RICH_MEMORY


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def views(count: int = 40, **kinds: object) -> list[View]:
    return [build_view(finished) for finished in interference_node.interference_cycles(count, **kinds)]  # type: ignore[arg-type]


def frame_of(observed: list[View], choice: ScreenSelection, width: int, height: int) -> list[Text]:
    """Render the lines of a terminal of this size."""
    group = render(observed[-1], observed, (), (width, height), choice)
    assert isinstance(group, Group)
    return [line for line in group.renderables if isinstance(line, Text)]


def screen(
    key: str, *, width: int = 80, height: int = 24, sort: int = 0, observed: list[View] | None = None
) -> list[str]:
    shown = observed or views()
    return [line.plain.rstrip() for line in frame_of(shown, ScreenSelection(screen=key, sort=sort), width, height)]


@pytest.mark.parametrize("key", ["2", "3", "4", "5"])
def test_golden_screens(key: str, golden: Callable[[str, str], None]) -> None:
    golden(f"top-{key}-80x24.txt", "".join(f"{line}\n" for line in screen(key)))


def test_the_interference_matrix_can_be_computed_by_hand() -> None:
    """See the table at the top of tests/builders/interference_node.py; a dot is less than 0.05 ms a second."""
    frame = screen("2", width=100)
    rows: dict[str, list[str]] = {}
    for line in frame:
        if line.startswith(("shop/web", "lab/batch", "/system")):
            rows.setdefault(line.split()[0], line.split()[1:])
    head = next(line for line in frame if line.startswith("ms of wait"))
    assert head.split()[-8:] == ["all", "A", "B", "C", "rest", "quota", "rt", "other"]
    # A is /batch (500 + 240 + 100), B the build (300 + 100 + 15), C /web.
    assert frame.index("A lab/batch train") < frame.index("B /system.slice/build") < frame.index("C shop/web")
    assert rows["shop/web"][:8] == ["400", "240", "100", "20", "·", "30", "4.0", "6.0"]


@pytest.mark.parametrize(
    ("by", "apart", "text"),
    [
        ({"/y": 71.0, "/x": 5.0}, (12.0, 6.0, 6.0), "/x waits most for /y: 71 ms a second, 71 % of its waits."),
        ({"/y": 12.0, "/x": 5.0}, (71.0, 6.0, 6.0), ("/x waits most for its own quota, 71 % of its waits; "
         "among other cgroups most for /y: 12 ms a second, 12 %.")),
        ({"/y": 12.0, "/x": 71.0}, (5.0, 6.0, 6.0), ("/x waits most for its own tasks, 71 % of its waits; "
         "among other cgroups most for /y: 12 ms a second, 12 %.")),
        ({"/y": 4.0}, (0.0, 6.0, 0.0), ("/x waits most for real-time tasks, 60 % of its waits; "
         "among other cgroups most for /y: 4.0 ms a second, 40 %.")),
        ({"/y": 4.0}, (0.0, 0.0, 6.0), ("/x waits most for other causes, 60 % of its waits; "
         "among other cgroups most for /y: 4.0 ms a second, 40 %.")),
        ({"/x": 4.0}, (6.0, 0.0, 0.0), ("No cgroup waits for another cgroup. The columns on the right "
         "have the other causes.")),
    ],
)  # fmt: skip
def test_the_summary_names_the_largest_cause_first(
    by: dict[str, float], apart: tuple[float, float, float], text: str
) -> None:
    victim = BlameRow("/x")
    victim.by_cgroup, victim.other_causes = by, list(apart)
    assert blame_summary([victim], {}) == text


@pytest.mark.parametrize("by_ms", [-3_600_000, 3_600_000])
def test_a_clock_change_does_not_affect_the_interference_matrix(by_ms: int) -> None:
    """Half of the averaged 30 s has timestamps of another clock; all of its waits count."""
    observed = views(40, waves=True)
    moved = [
        msgspec.structs.replace(view, wall_time_ms=view.wall_time_ms + by_ms) if view.seq > 25 else view
        for view in observed
    ]
    assert blame_matrix(moved[-1], moved, 100, 12) == blame_matrix(observed[-1], observed, 100, 12)
    assert blame_matrix(observed[-1], observed[25:], 100, 12) != blame_matrix(observed[-1], observed, 100, 12), (
        "the waves differ over time"
    )


def test_the_table_is_sorted_as_chosen() -> None:
    def order(sort: int) -> list[str]:
        # The table is below the matrix: take what follows its heading.
        frame = screen("3", sort=sort, width=100)
        start = next(i for i, line in enumerate(frame) if line.startswith("cgroup"))
        return [line.split()[0] for line in frame[start + 1 : start + 4]]

    assert order(0)[0] == "lab/batch", "most memory"
    direct = [column.title for column in SCREENS["3"].columns].index("direct")
    assert order(direct) == ["/system.slice/build", "shop/web", "lab/batch"], "70, 12 and 0 ms a second"
    assert order(SORT_BY_NAME) == ["/system.slice/build", "lab/batch", "shop/web"]


def test_memory_shows_the_headroom_for_batch_work() -> None:
    observed = views()
    assert "GiB headroom" not in "\n".join(screen("3", observed=observed)), "nothing was advised"
    observed[-1] = msgspec.structs.replace(observed[-1], memory=RICH_MEMORY)
    assert "batch   3.00 GiB headroom · no_risk: 4 GiB are free." in "\n".join(screen("3", observed=observed))


def test_memory_shows_shortage_and_killed_processes() -> None:
    frame = "\n".join(screen("3", width=120))
    assert "2.00 GiB of 8.00 GiB available" in frame
    assert "direct reclaim 82.0 ms/s · at limits 200 ms/s · stalled some 12 % · all 3.0 %" in frame
    assert "kswapd0 active 40 % · wakeups 3.0/s" in frame
    assert "below the low watermark: 0 Normal" in frame
    assert (
        f"{formats.clock((interference_node.STARTED_AT_NS + 5 * interference_node.S) / 1e6)} killed for "
        f"memory: train<b> (process 4242)" in frame
    )
    batch = next(line for line in frame.splitlines() if line.startswith("lab/batch"))
    assert batch.split()[2:7] == ["300M", "320M", "94%", "0", "200"]


def test_a_value_that_is_read_rarely_stays_on_the_screen() -> None:
    observed = views(6)
    stripped = [
        view if i == 2 else _without_refaults(view) for i, view in enumerate(observed)
    ]  # only the third cycle read the file
    batch = next(line for line in screen("3", width=120, observed=stripped) if line.startswith("lab/batch"))
    assert "40" in batch.split()


def _without_refaults(view: View) -> View:
    return msgspec.structs.replace(
        view, containers=tuple(msgspec.structs.replace(c, refaults=None) for c in view.containers)
    )


def test_threads_and_pressure() -> None:
    frame = screen("4", width=120)
    assert any("memory" in line and "some 12 % · all 3.0 %" in line for line in frame)
    assert any(f"some 30 % · all {formats.ABSENT}" in line for line in frame)
    web = next(line for line in frame if line.startswith("shop/web"))
    assert web.split()[1:] == ["3", "1", "1", "7", "1.50", "25%", "2.0%", "0.5%"], (
        "two are stuck, one of them for a disk"
    )


def test_disk_and_network() -> None:
    frame = screen("5", width=120)
    assert any(line.startswith("io ") and "some 5.0 % · all 1.0 %" in line for line in frame)
    web = next(line for line in frame if line.startswith("shop/web"))
    # 1 MiB a second in requests of 3 ms, in the slot up to 4.1 ms; 2 MiB sent, 1 received, 3 segments again.
    assert web.split()[1:] == ["1.00M", "0B", "4.08ms", "0.5%", "2.00M", "1.00M", "3.0"]


def test_missing_blame_is_reported() -> None:
    texts = [build_view(four_cpu_node.busy_cycle(seq)) for seq in range(1, 6)]
    assert any("The aggressors are unknown" in line for line in screen("2", observed=texts))


@pytest.mark.parametrize("size", [(20, 3), (40, 10), (60, 16), (80, 24), (140, 40), (300, 90)])
@pytest.mark.parametrize("key", ["1", "2", "3", "4", "5", "?"])
@pytest.mark.parametrize("kind", ["plain", "hostile", "many", "nobody", "bare", "story"])
def test_no_screen_leaves_its_terminal(size: tuple[int, int], key: str, kind: str) -> None:
    observed = {
        "plain": lambda: views(3),
        "hostile": lambda: views(3, hostile=True, pods=()),
        "many": lambda: views(3, more=200),
        "nobody": lambda: views(3, pods=()),
        "bare": lambda: [build_view(four_cpu_node.bare_cycle())],
        "story": lambda: [
            build_view(r) for r in colocation_run.simulate_run(3, others=(colocation_run.HOSTILE,)).rounds
        ],
    }[kind]()
    width, height = size
    choice = ScreenSelection(help=True) if key == "?" else ScreenSelection(screen=key)
    frame = frame_of(observed, choice, width, height)
    assert len(frame) == height
    assert max(line.cell_len for line in frame) <= width
    assert not any(char for line in frame for char in line.plain if not char.isprintable())


def test_without_pods_the_overview_lists_running_and_waiting_cgroups() -> None:
    frame = screen("1", observed=views(pods=()), width=100, height=30)
    assert any(line.startswith("/batch") for line in frame)
    assert any("No pods are listed: the agent watches every cgroup" in line for line in frame)
    assert any("all p50" in line and "slowest p50" in line for line in frame)


def test_the_last_line_names_the_keys_and_marks_the_screen() -> None:
    observed = views(3)
    for key, chosen in SCREENS.items():
        last = frame_of(observed, ScreenSelection(screen=key), 124, 24)[-1]
        assert [
            span.style for span in last.spans if last.plain[span.start : span.end] == f" {key} {chosen.title} "
        ] == ["reverse"]
        assert last.plain.endswith("q quit")
    assert "q quit" not in overview_lines(observed[-1], observed, (), 120, 24)[-1].plain, "a frame on paper has no keys"


def test_keys() -> None:
    start = ScreenSelection()
    assert handle_key(start, "q") is None
    assert handle_key(start, "x") == start
    assert handle_key(start, "s") == start, "nothing to sort on the overview"
    memory = handle_key(start, "3")
    assert memory == ScreenSelection(screen="3")
    assert memory is not None
    assert handle_key(memory, "s") == ScreenSelection(screen="3", sort=1)
    assert handle_key(memory, "S") == ScreenSelection(screen="3", sort=len(SCREENS["3"].columns) - 1)
    by_name = handle_key(memory, "n")
    assert by_name == ScreenSelection(screen="3", sort=SORT_BY_NAME)
    assert by_name is not None
    assert handle_key(by_name, "s") == ScreenSelection(screen="3", sort=0)
    helped = handle_key(memory, "?")
    assert helped == ScreenSelection(screen="3", help=True)
    assert helped is not None
    assert handle_key(helped, "?") == memory
    assert handle_key(helped, "2") == ScreenSelection(screen="2")
