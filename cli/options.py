"""Kinds of values that several commands take as options."""

from __future__ import annotations

import math
from typing import Any

import click

DEFAULT_LISTEN = "127.0.0.1:9102"


LONGEST_S = 366 * 86_400


class Seconds(click.FloatRange):
    """A time span of a year at most; `nan` and `inf` are numbers to click, and 1e10 is one that nobody can sleep for."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is no number of seconds", param, ctx)
        if seconds > LONGEST_S:
            self.fail(f"{value!r} is more than a year", param, ctx)
        return seconds


def parse_listen(value: str) -> tuple[str, int]:
    """`HOST:PORT`, IPv6 in brackets; port 0 takes a free one."""
    host, separator, port = value.rpartition(":")
    if not separator or not host or not (port.isascii() and port.isdigit()):
        raise click.BadParameter(f"{value!r} is not HOST:PORT, for example {DEFAULT_LISTEN}")
    if len(port) > 5 or int(port) > 65535:
        raise click.BadParameter(f"{value!r}: there is no port above 65535; 0 takes a free one")
    return host.removeprefix("[").removesuffix("]"), int(port)
