"""Addresses and names of loopback: a server that only this machine can reach answers to no others.

A web page elsewhere can make a name of its own point to 127.0.0.1 and have a browser ask there; such a Host is refused.
"""

from __future__ import annotations

import ipaddress


def is_loopback(address: str) -> bool:
    """Whether nobody else can reach it."""
    return _is_address(address) and ipaddress.ip_address(address).is_loopback


def names_loopback(host: str) -> bool:
    """Whether a Host header can only mean this machine: an address (no name server can point it elsewhere) or localhost.

    Without the header (HTTP/1.0) there is no browser and so nothing to defend against.
    """
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    return not host or name.lower().rstrip(".") == "localhost" or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
