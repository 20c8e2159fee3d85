"""Renders rich output as plain lines, for tests of terminal views."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def rendered_lines(renderable: RenderableType, width: int = 100) -> list[str]:
    """Return the lines of the output in a terminal of this width, without trailing spaces."""
    output = io.StringIO()
    Console(file=output, width=width).print(renderable)
    return [line.rstrip() for line in output.getvalue().splitlines()]
