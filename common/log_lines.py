"""Formats log records so that text from outside cannot forge a line or control a terminal.
Names, annotations and messages of peers are arguments of log records: a line break among them would begin a line of its
own, with a level and a text that the agent never wrote.
"""

from __future__ import annotations

import logging

from api.text import MAX_MESSAGE_CHARS, printable

TRACEBACK_INDENT = "  "
"""Prefix of every line of a traceback. The message of an exception may contain line breaks, and no line of it must look like a
record."""


class PrintableFormatter(logging.Formatter):
    """Formatter with one printable line per record, followed by the indented lines of its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record."""
        record.exc_text = None  # another formatter's traceback, which is not indented
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is that of logging.Formatter
        """Return the line of a record without its traceback."""
        return printable(super().formatMessage(record), MAX_MESSAGE_CHARS)

    def formatException(self, ei: object) -> str:  # noqa: N802 - as above
        """Return the lines of a traceback."""
        return _indent(super().formatException(ei))  # type: ignore[arg-type]  # typeshed's own type is private

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 - as above
        """Return the lines of a stack."""
        return _indent(super().formatStack(stack_info))


def write_printable_lines(format_: str, handler: logging.Handler | None = None) -> None:
    """Log with this handler, or to standard error, from level INFO on."""
    chosen = logging.StreamHandler() if handler is None else handler
    chosen.setFormatter(PrintableFormatter(format_))
    logging.basicConfig(level=logging.INFO, handlers=[chosen])


def _indent(text: str) -> str:
    return "\n".join(f"{TRACEBACK_INDENT}{printable(line)}" for line in text.split("\n"))
