"""What every server here does alike: listen, log its own faults alone, and on loopback answer to names of loopback alone.

A web page elsewhere can make a name of its own point to 127.0.0.1 and have a browser ask there; such a Host is refused.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from api.ports import Unavailable

log = logging.getLogger(__name__)

KEEPALIVE_S = 75.0
"""Longer than readers pause between two requests; aiohttp's own hour would let idle ones hold every descriptor."""


async def listen(app: web.Application, host: str, port: int, option: str, **limits: Any) -> tuple[web.AppRunner, int]:
    """Serve and return the port, which the kernel chooses where it is 0. Raises Unavailable, naming the option."""
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=0.5, keepalive_timeout=KEEPALIVE_S, logger=own_faults(), **limits
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: a name that IDNA cannot spell
        await runner.cleanup()
        raise cannot_listen(host, port, error, option) from error
    return runner, int(runner.addresses[0][1])


def cannot_listen(host: str, port: int, error: Exception, option: str) -> Unavailable:
    """What to say where listening failed."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return Unavailable(
        f"cannot listen on {host}:{port}: {reason}",
        f"choose another address with {option} HOST:PORT, or stop the program that has this one",
    )


def is_loopback(address: str) -> bool:
    """Whether nobody else can reach it."""
    return _is_address(address) and ipaddress.ip_address(address).is_loopback


def tell_open(addresses: Sequence[str], remedy: str) -> None:
    """A warning where others than this machine can read what is served."""
    told = ", ".join(address for address in addresses if not is_loopback(address))
    if told:
        log.warning("whoever reaches %s can read all that this agent sees: %s", told, remedy)


def names_loopback(host: str) -> bool:
    """Whether a Host header can only mean this machine: an address (no name server can point it elsewhere) or localhost.

    Without the header (HTTP/1.0) there is no browser and so nothing to defend against.
    """
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    return not host or name.lower().rstrip(".") == "localhost" or _is_address(name)


def own_faults() -> logging.Logger:
    """The server's log without a traceback for every request that is no HTTP: anyone can send those, at any rate."""

    def is_own(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))

    logger = logging.getLogger("exporters.http.server")
    if not logger.filters:
        logger.addFilter(is_own)
    return logger


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
