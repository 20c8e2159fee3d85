"""Entry point of `dioptase`: the command table, lazy loading of commands, and one-line errors for lost output.
A command's module is imported only when the command runs, so that `dioptase agent` never loads terminal libraries.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from importlib import import_module
from typing import Any

import click

from api import VERSION
from cli.options import SuggestingGroup

COMMANDS = {
    "agent": "run the node agent",
    "demo": "run an online service, a batch job and the agent on this machine",
    "top": "watch a running agent in the terminal",
    "value": "show gain and cost of colocation: core-hours of batch work, online latency, CPU taken back",
    "explain": "explain why a knob, pod or pool has its value",
    "config": "show every setting of a running agent, its source and since when it applies",
    "doctor": "list what this node supports and lacks, with remedies",
    "reset": "restore every cgroup value that an agent changed",
    "probe": "run one probe alone",
    "replay": "evaluate a recording again and compare policies",
    "simulate": "compare policies on a simulated node",
    "controller": "run the cluster's controllers: configuration of nodes, and handling of nodes without an agent",
    "scheduler": "run the scheduler extender, which places pods by what the nodes' agents report",
    "withdraw": "remove what agents and controller wrote to a cluster's API server, before they are uninstalled",
    "kubectl": "query all agents of a cluster through its API server; the same as kubectl dioptase",
    "capture": "write an archive of the files that the agent reads, for a problem report",
}
MODULES = {
    "top": "cli.top.live",
    "explain": "cli.explain.command",
    "probe": "cli.probe.commands",
    "replay": "cli.offline",
    "simulate": "cli.offline",
    "withdraw": "cli.controller",
}
"""Modules of the commands that do not have the name of their command."""

OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Errors of writing to standard output. EPIPE is not one of them: click ends a command silently when the reader has gone."""
FD_LIMIT_ERRORS = (errno.EMFILE, errno.ENFILE)
EXIT_INTERRUPTED = 130
"""Exit status that shells report for a program ended by Ctrl-C."""


class OutputGuardGroup(SuggestingGroup):
    """The outermost group of a program: ends it with one line when its output cannot be written."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command. Lost output and a lack of file descriptors end the program with one line and status 1."""
        _open_output()
        try:
            try:
                return super().main(*args, **extra)
            except SystemExit as ended:
                _flush_output(error_reported=bool(ended.code))
                raise
        except OSError as error:
            if error.errno in OUTPUT_ERRORS and error.filename is None:
                message = f"cannot write to standard output: {error.strerror}"
            elif error.errno in FD_LIMIT_ERRORS:
                message = f"{error.strerror}: raise the limit: ulimit -n 1024"
            else:
                raise
            _drop_output()
            click.echo(f"dioptase: {message}", err=True)
            sys.exit(1)
        finally:
            if sys.platform != "win32":
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)  # also while a probe compiles; click would print "Aborted!"


class LazyGroup(OutputGuardGroup):
    """Imports the module of a command when the command runs: cli/NAME.py, or the entry of `MODULES`, holds the object NAME."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name == "agent" and sys.platform != "win32":
            # Its import takes a second, on a loaded node several. SIGTERM waits until agent.__main__ handles it, because an
            # agent that ends must not leave the values of its predecessor changed.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        command = getattr(import_module(MODULES.get(cmd_name, f"cli.{cmd_name}")), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="dioptase")
def main() -> None:
    """Lend idle CPU to batch work, take it back the moment it is needed, and show why."""


def _open_output() -> None:
    """Make standard output accept every character. A closed one becomes a read-only /dev/null, so that writes to it fail and
    no other file gets descriptor 1."""
    if sys.stdout is None:
        while (fd := os.open(os.devnull, os.O_RDONLY)) < 1:
            pass
        if fd > 1:
            os.close(fd)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - until the end
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def _flush_output(*, error_reported: bool) -> None:
    """Write what is still buffered. Raises OSError, unless the command has already reported an error."""
    try:
        sys.stdout.flush()
    except OSError:
        if not error_reported:
            raise
        _drop_output()


def _drop_output() -> None:
    """Discard what is still buffered; otherwise Python writes it at exit and reports the error a second time."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


if __name__ == "__main__":
    main(prog_name="dioptase")
