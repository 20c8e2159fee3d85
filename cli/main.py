"""`dioptase`: the commands, each loaded only when it is called, so that `dioptase agent` never pays for terminal views."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from typing import Any

import click

from cli.options import Suggesting

COMMANDS = {
    "agent": "run the node agent",
    "demo": "see it work: an online service and a batch job on this machine, with the agent between them",
    "top": "watch a running agent in the terminal",
    "explain": "say why a knob, pod or pool is what it is",
    "doctor": "say what this node can and cannot do, with remedies",
    "reset": "put back every cgroup value that an agent changed",
    "probe": "run one probe alone",
    "capture": "write an archive of what the agent reads on this machine, for a report of a problem",
}


INTERRUPTED = 130
"""What shells give a program that Ctrl-C ended."""


class LazyGroup(Suggesting):
    """Commands by name; cli/NAME.py holds the command object NAME."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)  # wherever it was, a probe that still compiled included; click would say Aborted!

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(f"cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("dioptase"), prog_name="dioptase")
def main() -> None:
    """Lend idle CPU to batch work, take it back the moment it is needed, and show why."""
