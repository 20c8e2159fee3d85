"""Option types and errors that commands share: durations, listen addresses, the agent's URL, "did you mean" groups."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, NoReturn
from urllib.parse import urlsplit

import click

from api.interfaces import Unavailable
from api.text import quote

DEFAULT_LISTEN = "127.0.0.1:9102"
MAX_DURATION_S = 366 * 86_400


class SuggestingGroup(click.Group):
    """Commands by name; the error for an unknown name suggests the nearest one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = get_close_matches(args[0], self.list_commands(ctx), 1)
            message = error.format_message() + (f" Did you mean {near[0]}?" if near else "")
            raise click.UsageError(message, ctx) from error


class Seconds(click.FloatRange):
    """A time span in seconds, at most a year; rejects `nan`, `inf` and values that `time.sleep` does not accept."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not math.isfinite(seconds):
            self.fail(f"{quote(value)} is not a number of seconds such as 10 or 0.5", param, ctx)
        if seconds > MAX_DURATION_S:
            self.fail(f"{quote(value)} is more than a year", param, ctx)
        return float(super().convert(seconds, param, ctx))


def parse_listen(value: str, option: str = "--listen") -> tuple[str, int]:
    """Parse `HOST:PORT`, with IPv6 in brackets; port 0 stands for a free one. Raises BadParameter that names the option."""
    host, separator, port = value.rpartition(":")
    if not separator or not host or not (port.isascii() and port.isdigit()):
        raise click.BadParameter(f"{quote(value)} is not HOST:PORT, for example {DEFAULT_LISTEN}", param_hint=option)
    if len(port) > 5 or int(port) > 65535:
        raise click.BadParameter(
            f"{quote(value)}: there is no port above 65535; 0 selects a free one", param_hint=option
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def parse_listen_hosts(value: str) -> tuple[tuple[str, ...], int]:
    """Parse `HOST[,HOST...]:PORT` of --listen, with or without brackets around IPv6: the chart passes the addresses of a node
    as Kubernetes writes them (`status.hostIPs`: `10.0.0.1,fd00::1`). Raises BadParameter."""
    hosts, port = parse_listen(value)
    parsed = tuple(host.removeprefix("[").removesuffix("]") for host in hosts.split(","))
    if "" in parsed:
        raise click.BadParameter(
            f"{quote(value)} has an empty host; write HOST,HOST:PORT, for example 10.0.0.1,{DEFAULT_LISTEN}",
            param_hint="--listen",
        )
    return parsed, port


DEFAULT_URL = "http://127.0.0.1:9102"


def validate_url(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    """Callback of --url: return the URL, or raise BadParameter if it is not HTTP."""
    try:
        parts = urlsplit(value)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise click.BadParameter(f"{quote(value)} is not an address such as {DEFAULT_URL}")
    return value


def url_option(command: Callable[..., None]) -> Callable[..., None]:
    """Add --url, the address of a running agent, to a command."""
    return click.option(
        "--url", default=DEFAULT_URL, show_default=True, callback=validate_url, help="Address of the agent."
    )(command)


def exit_unavailable(command: str, error: Unavailable) -> NoReturn:
    """Print the reason and the remedy of a failed command, and end the program with status 1."""
    click.echo(f"dioptase {command}: {error.reason}\n  remedy: {error.remedy}", err=True)
    sys.exit(1)
