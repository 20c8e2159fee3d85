"""Options, settings file, HTTP server and end of the controller's programs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import ssl
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from api.interfaces import Unavailable
from common.http.listener import HttpListener
from common.http.web_config import WebConfig, WebSecurity
from common.validation import describe_validation_error
from common.yaml_guard import check_yaml

log = logging.getLogger("dioptase.controller")
MAX_SETTINGS_BYTES = 1 << 20
SettingsT = TypeVar("SettingsT")


class ProgramOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Command-line options of a program."""

    hosts: tuple[str, ...]
    port: int
    config: Path | None = None
    web_config: Path | None = None


def parse_settings(text: str, kind: type[SettingsT]) -> SettingsT:
    """Parse the text of a settings file. Raises ValueError that names the field and the remedy."""
    check_yaml(text)
    document = msgspec.yaml.decode(text)
    try:
        return msgspec.convert({} if document is None else document, kind)
    except msgspec.ValidationError as error:
        raise ValueError(describe_validation_error(error, document, kind)) from None


def load_settings(path: Path | None, kind: type[SettingsT]) -> SettingsT:
    """Read and parse a settings file; without one, return the defaults. Raises ValueError as parse_settings, with the file."""
    if path is None:
        return kind()
    try:
        with path.open("rb") as file:
            text = file.read(MAX_SETTINGS_BYTES + 1).decode()
        return parse_settings(text, kind)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


async def serve_with_tls(
    listener: HttpListener, hosts: Sequence[str], port: int, web_config: Path | None, stack: contextlib.AsyncExitStack
) -> None:
    """Listen until `stack` is closed, with TLS as the file `web_config` states, which is followed. Raises Unavailable."""
    config = None if web_config is None else WebConfig(web_config, check_yaml)
    tls = None if config is None else _tls_without_users(web_config, config.load())
    bound = await listener.open(hosts, port, "--listen", tls)
    stack.push_async_callback(listener.close)
    log.info("metrics and health at %s", ", ".join(f"{host}:{port}" for host, port in bound))
    if config is not None:

        async def renew(web: WebSecurity) -> None:
            await listener.renew(_tls_without_users(web_config, web))

        following = asyncio.create_task(config.follow(renew))
        stack.callback(following.cancel)


def _tls_without_users(path: Path | None, web: WebSecurity) -> ssl.SSLContext | None:
    if web.users:
        raise Unavailable(
            f"{path}: basic_auth_users: the kubelet's probes cannot send passwords",
            "remove it, and restrict access by a NetworkPolicy",
        )
    return web.tls


async def run_until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run until SIGTERM or SIGINT cancels it, or until it ends or raises."""
    working = asyncio.create_task(work)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, working.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await working
