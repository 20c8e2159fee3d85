"""The `dioptase config` command: shows every setting of a running agent, its source and since when it applies."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

import click

from api.diagnostics import AppliedConfigObject, EffectiveConfiguration, EffectiveSetting
from api.interfaces import Unavailable
from cli import formats
from cli.client import AgentClient
from cli.options import url_option


def config_lines(found: EffectiveConfiguration, names: Sequence[str], now_ns: int) -> Iterator[str]:
    """The settings below these names, or all; then the objects of the cluster's that are obeyed, or cannot be."""
    shown = [one for one in found.settings if not names or any(is_below(one.name, name) for name in names)]
    width = max((len(one.name) for one in shown), default=0)
    for one in shown:
        yield f"{one.name.ljust(width)}  {formats.printable(one.value)}  {setting_source_text(one, now_ns)}"
    if names:
        return
    if found.node:
        yield ""
        yield f"node {formats.printable(found.node)}: " + (
            f"nothing new is heard: {formats.printable(found.problem)}"
            if found.problem
            else "its CustomNodeConfig is followed"
        )
    for each in found.objects:
        yield from config_object_text(each, now_ns)


def is_below(name: str, wanted: str) -> bool:
    """Whether a setting is that one, or one of that part."""
    return name == wanted or name.startswith(f"{wanted}.")


def setting_source_text(one: EffectiveSetting, now_ns: int) -> str:
    """Where it came from, and since when."""
    if one.source in ("default", "file"):
        since = "" if one.since_wall_ns is None else f", since {_format_time(one.since_wall_ns, now_ns)}"
        return f"({one.source}{since})"
    of = f"{formats.printable(one.source)} {formats.printable(one.object)} {formats.printable(one.hash)}"
    since = "" if one.since_wall_ns is None else f", since {_format_time(one.since_wall_ns, now_ns)}"
    return f"({of}: {formats.printable(one.field)}{since})"


def config_object_text(each: AppliedConfigObject, now_ns: int) -> Iterator[str]:
    """Whether it is obeyed, and what of it is not."""
    of = f"{formats.printable(each.kind)} {formats.printable(each.object)} {formats.printable(each.hash)}".rstrip()
    if each.problem:
        yield f"{of} cannot be obeyed: {formats.printable(each.problem)}"
    elif each.since_wall_ns is not None:
        yield f"{of} is obeyed since {_format_time(each.since_wall_ns, now_ns)}"
    for unused in each.unused:
        yield f"  not obeyed: {formats.printable(unused)}"


def _format_time(wall_ns: int, now_ns: int) -> str:
    """The time of the day, with the date where it was not today."""
    at = time.localtime(wall_ns / 1e9)
    today = time.localtime(now_ns / 1e9)
    same = (at.tm_year, at.tm_yday) == (today.tm_year, today.tm_yday)
    return time.strftime("%H:%M:%S" if same else "%Y-%m-%d %H:%M:%S", at)


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@url_option
def config(names: tuple[str, ...], url: str) -> None:
    """Show every setting of a running agent, or those below NAME, such as advisor.headroom."""
    try:
        found = AgentClient(url).configuration()
    except Unavailable as error:
        click.echo(f"dioptase config: {error.reason}\n  remedy: {error.remedy}", err=True)
        sys.exit(1)
    unknown = [name for name in names if not any(is_below(one.name, name) for one in found.settings)]
    if unknown:
        raise click.UsageError(f"there is no setting {unknown[0]!r:.80}; dioptase config without a name lists them")
    for line in config_lines(found, names, time.time_ns()):
        click.echo(line)
