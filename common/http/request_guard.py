"""Errors of refused HTTP requests, and the check that a Host header names loopback.
A web page elsewhere can point a name of its own to 127.0.0.1; a server on loopback refuses such a Host (DNS
rebinding).
"""

from __future__ import annotations

import ipaddress

import msgspec

from api.text import make_printable


class HttpProblem(msgspec.Struct, frozen=True):
    """Body of every error response. It quotes the request, and clients show it in terminals."""

    error: str
    remedy: str

    def __post_init__(self) -> None:
        make_printable(self, "error", "remedy")


class HttpRefused(Exception):
    """Rejection of a request, sent as HttpProblem."""

    def __init__(self, status: int, error: str, remedy: str) -> None:
        super().__init__(error)
        self.status = status
        self.problem = HttpProblem(error, remedy)


def is_loopback(address: str) -> bool:
    return _is_address(address) and ipaddress.ip_address(address).is_loopback


def is_loopback_host(host: str) -> bool:
    """Whether a Host header can only mean this machine: an address, which DNS cannot redirect, or localhost.

    A request without the header (HTTP/1.0) does not come from a browser and needs no check.
    """
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    return not host or name.lower().rstrip(".") == "localhost" or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
