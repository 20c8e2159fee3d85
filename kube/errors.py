"""Errors of the API client: rejection (ApiError), no response (ApiUnreachable), or an invalid response.
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
"""Limit for the shown part of a response that is not a Status, such as a proxy's page."""


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
    """Field of another manager that an apply would change."""

    manager: str
    field: str
    """Path such as `.status.topologyPolicy`."""


class ApiError(Exception):
    """Rejection by the API server. `status` is the HTTP status, `reason` the API's reason, empty if there is none."""

    def __init__(self, status: int, reason: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(f"{status} {reason}: {message}" if reason else f"{status}: {message}")
        self.status, self.reason, self.message, self.retry_after_s = status, reason, message, retry_after_s
        self.name = ""
        """Name of the object that the error is about, if the API server states it."""
        self.causes: tuple[str, ...] = ()
        """Reasons of the causes, such as `DisruptionBudget`."""
        self.claims: tuple[FieldConflict, ...] = ()
        """Fields of other managers, if an apply without `force` failed."""

    @property
    def missing(self) -> bool:
        """Whether the object does not exist: the API server serves its kind and names the object. Any other 404 says nothing
        about objects (`path_not_served`)."""
        return self.status == 404 and self.reason == "NotFound" and bool(self.name)

    @property
    def path_not_served(self) -> bool:
        """Whether the path does not exist: the kind's CRD is not installed, or the response is not the API server's."""
        return self.status == 404 and not self.missing

    @property
    def conflict(self) -> bool:
        """Whether another client changed the object first, or it already exists."""
        return self.status == 409

    @property
    def expired(self) -> bool:
        """Whether the version or page to continue from has expired, so that a new list is needed."""
        return self.status == 410 or self.reason in ("Expired", "Gone")


class ApiUnreachable(Exception):
    """No complete response; it is unknown whether a write was carried out."""


class InvalidResponse(ApiUnreachable):
    """The response is not the API server's: a proxy's page, or a line of unlimited length."""


def parse_api_error(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> ApiError:
    """Convert an error response. Never raises, whatever the body is."""
    try:
        answer = msgspec.json.decode(body, type=_Status)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        answer = _Status(message=" ".join(body[:_MAX_SHOWN_LETTERS].decode(errors="replace").split()))
    details = answer.details or _Details()
    wait_s = _retry_after_s((headers or {}).get("Retry-After", ""))
    wait_s = details.retry_after_seconds if wait_s is None else wait_s
    error = ApiError(answer.code or status, answer.reason, answer.message or "no reason given", retry_after_s=wait_s)
    error.name = details.name
    error.causes = tuple(cause.reason for cause in details.causes)
    error.claims = tuple(
        FieldConflict(match[1] if (match := _CONFLICTING_MANAGER.search(cause.message)) else "unknown", cause.field)
        for cause in details.causes
        if cause.reason == _CONFLICT_REASON
    )
    return error


def _retry_after_s(text: str) -> float | None:
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else None
