"""Errors of the API client: refusal (ApiError), no answer (ApiUnreachable), or an invalid response.
After ApiUnreachable it is unknown whether a write was carried out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

_CONFLICTING_MANAGER = re.compile(r'conflict with "([^"]{1,128})"')
_CONFLICT_REASON = "FieldManagerConflict"
_MAX_SHOWN_LETTERS = 500
"""Letters of an answer that is no Status: a proxy's page, or text."""


class _Cause(msgspec.Struct, frozen=True):
    reason: str = ""
    message: str = ""
    field: str = ""


class _Details(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    causes: tuple[_Cause, ...] = ()
    retry_after_seconds: float | None = None


class _Status(msgspec.Struct, frozen=True):
    message: str = ""
    reason: str = ""
    code: int = 0
    details: _Details | None = None


class FieldConflict(NamedTuple):
    """Somebody else's field that an apply would change."""

    manager: str
    field: str
    """As `.status.topologyPolicy`."""


class ApiError(Exception):
    """The API server's own refusal. `status` is HTTP's, `reason` the API's word for it, empty where nobody said one."""

    def __init__(self, status: int, reason: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(f"{status} {reason}: {message}" if reason else f"{status}: {message}")
        self.status, self.reason, self.message, self.retry_after_s = status, reason, message, retry_after_s
        self.name = ""
        """Of the object that is meant, where the API server says it."""
        self.causes: tuple[str, ...] = ()
        """Reasons of the parts, such as `DisruptionBudget`."""
        self.claims: tuple[FieldConflict, ...] = ()
        """Of an apply that takes nothing over: what it would have had to."""

    @property
    def missing(self) -> bool:
        """There is no such object: the API server knows its kind, and says its name. Of a kind that it does not have, or a path
        that a proxy does not know, a 404 says nothing of any object (`unserved`)."""
        return self.status == 404 and self.reason == "NotFound" and bool(self.name)

    @property
    def path_not_served(self) -> bool:
        """Nobody serves that path here: the kind's definition may not be installed, or who answers is no API server."""
        return self.status == 404 and not self.missing

    @property
    def conflict(self) -> bool:
        """Somebody else wrote first, or the object is there already."""
        return self.status == 409

    @property
    def expired(self) -> bool:
        """What was asked to be continued is not kept any longer: list anew."""
        return self.status == 410 or self.reason in ("Expired", "Gone")


class ApiUnreachable(Exception):
    """No answer, or half of one: nobody knows whether a write was carried out."""


class InvalidResponse(ApiUnreachable):
    """What came is no answer of an API server: a proxy's page, or a line without end."""


def parse_api_error(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> ApiError:
    """The error that an answer means. Never raises, whatever the body is."""
    try:
        said = msgspec.json.decode(body, type=_Status)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        said = _Status(message=" ".join(body[:_MAX_SHOWN_LETTERS].decode(errors="replace").split()))
    details = said.details or _Details()
    wait_s = _retry_after_s((headers or {}).get("Retry-After", ""))
    wait_s = details.retry_after_seconds if wait_s is None else wait_s
    error = ApiError(said.code or status, said.reason, said.message or "no reason given", retry_after_s=wait_s)
    error.name = details.name
    error.causes = tuple(cause.reason for cause in details.causes)
    error.claims = tuple(
        FieldConflict(found[1] if (found := _CONFLICTING_MANAGER.search(cause.message)) else "somebody", cause.field)
        for cause in details.causes
        if cause.reason == _CONFLICT_REASON
    )
    return error


def _retry_after_s(text: str) -> float | None:
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else None
