"""Tables that people see in a terminal."""

from __future__ import annotations

from rich.console import Console

from cli.tables import check_table


def test_a_check_never_controls_the_terminal() -> None:
    """Messages come from pods of others too."""
    console = Console(force_terminal=True, width=200)
    with console.capture() as captured:
        console.print(
            check_table(("what", "found", "remedy"), [(False, ("pods", "\x1b]0;title\x07 waits", "first\nthen"))])
        )
    assert "\x1b]0" not in captured.get()
    assert "\\x1b]0;title\\x07 waits" in captured.get()
    assert [line.split()[-1] for line in captured.get().splitlines()[1:]] == ["first", "then"]
