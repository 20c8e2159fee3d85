"""The `dioptase config` command: shows every setting of a running agent, its source and since when it applies."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import click

from api.diagnostics import AppliedConfigObject, EffectiveConfiguration, EffectiveSetting
from api.interfaces import Unavailable
from api.text import printable, quote
from api.units import NS_PER_S
from cli.client import AgentClient
from cli.options import exit_unavailable, url_option


def config_lines(effective: EffectiveConfiguration, names: Sequence[str], now_ns: int) -> Iterator[str]:
    """Yield the settings below these names, or all; without names also the state of the cluster's configuration objects."""
    shown = [
        setting for setting in effective.settings if not names or any(is_below(setting.name, name) for name in names)
    ]
    width = max((len(setting.name) for setting in shown), default=0)
    for setting in shown:
        yield f"{setting.name.ljust(width)}  {printable(setting.value)}  {setting_source_text(setting, now_ns)}"
    if names:
        return
    if effective.node:
        yield ""
        yield f"node {printable(effective.node)}: " + (
            f"no changes are received: {printable(effective.problem)}"
            if effective.problem
            else "its CustomNodeConfig is watched"
        )
    for applied in effective.objects:
        yield from config_object_text(applied, now_ns)


def is_below(name: str, group: str) -> bool:
    """Whether a setting has this name or belongs to this group."""
    return name == group or name.startswith(f"{group}.")


def setting_source_text(setting: EffectiveSetting, now_ns: int) -> str:
    """Describe where a setting's value came from, and since when it applies."""
    since = "" if setting.since_wall_ns is None else f", since {_format_time(setting.since_wall_ns, now_ns)}"
    if not setting.object:
        return f"({printable(setting.source)}{since})"
    origin = f"{printable(setting.source)} {printable(setting.object)} {printable(setting.hash)}"
    since = "" if setting.since_wall_ns is None else f", since {_format_time(setting.since_wall_ns, now_ns)}"
    return f"({origin}: {printable(setting.field)}{since})"


def config_object_text(applied: AppliedConfigObject, now_ns: int) -> Iterator[str]:
    """Describe whether a configuration object is applied, and which of its fields are not."""
    label = f"{printable(applied.kind)} {printable(applied.object)} {printable(applied.hash)}".rstrip()
    if applied.problem:
        yield f"{label} cannot be applied: {printable(applied.problem)}"
    elif applied.since_wall_ns is not None:
        yield f"{label} applies since {_format_time(applied.since_wall_ns, now_ns)}"
    for unused in applied.unused:
        yield f"  not applied: {printable(unused)}"


def _format_time(wall_ns: int, now_ns: int) -> str:
    """Format the local time of day, with the date if it is not today."""
    at = time.localtime(wall_ns / NS_PER_S)
    today = time.localtime(now_ns / NS_PER_S)
    same = (at.tm_year, at.tm_yday) == (today.tm_year, today.tm_yday)
    return time.strftime("%H:%M:%S" if same else "%Y-%m-%d %H:%M:%S", at)


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@url_option
def config(names: tuple[str, ...], url: str) -> None:
    """Show every setting of a running agent, or those below NAME, such as advisor.headroom."""
    try:
        effective = AgentClient(url).configuration()
    except Unavailable as error:
        exit_unavailable("config", error)
    unknown = [name for name in names if not any(is_below(setting.name, name) for setting in effective.settings)]
    if unknown:
        raise click.UsageError(f"there is no setting {quote(unknown[0])}; dioptase config without a name lists them")
    for line in config_lines(effective, names, time.time_ns()):
        click.echo(line)
