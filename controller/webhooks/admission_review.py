"""AdmissionReview of admission.k8s.io/v1: request, result, JSON patch (RFC 6902). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from api.text import limit_sentences, printable

REVIEW_VERSION, REVIEW_KIND = "admission.k8s.io/v1", "AdmissionReview"
MAX_WARNINGS = 8
MAX_WARNING_CHARS = 240
"""The API server cuts a warning after 256 characters (apiserver/pkg/warning), and drops those beyond 4096 in all."""
MAX_MESSAGE_CHARS = 2000
MAX_JSON_PARTS = 100_000
"""Maximum number of objects and lists in a review; a pod has 5,000. Decoding 2 million of them in 7 MiB takes 4 s, in
which the controller does nothing else."""
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
"""A string of JSON, also one without an end. Braces in strings, for example 100,000 in an annotation, are no objects."""
T = TypeVar("T")


class _ReviewStruct(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    pass


class AdmissionResource(_ReviewStruct, frozen=True, kw_only=True):
    """Resource that the request writes."""

    group: str = ""
    version: str = ""
    resource: str = ""


class AdmissionUser(_ReviewStruct, frozen=True, kw_only=True):
    """User that sent the request to the API server."""

    username: str = ""


class ReviewRequest(_ReviewStruct, frozen=True, kw_only=True):
    """Request to the API server that a webhook reviews. Objects stay encoded until a webhook decodes what it reads."""

    uid: str
    resource: AdmissionResource = AdmissionResource()
    sub_resource: str = ""
    name: str = ""
    """Empty if the API server generates the name."""
    namespace: str = ""
    operation: Literal["CREATE", "UPDATE", "DELETE", "CONNECT"]
    user_info: AdmissionUser = AdmissionUser()
    object: msgspec.Raw = msgspec.Raw(b"null")
    old_object: msgspec.Raw = msgspec.Raw(b"null")


class _AdmissionReview(_ReviewStruct, frozen=True, kw_only=True):
    api_version: str
    kind: str
    request: ReviewRequest


class PatchOperation(msgspec.Struct, frozen=True, omit_defaults=True):
    """One operation of a JSON patch. `add` of an existing field replaces it."""

    op: Literal["add", "remove"]
    path: str
    value: Any = None


class ReviewResult(msgspec.Struct, frozen=True):
    """Result of a webhook: a rejection if `problems` are given, else a patch, empty if nothing changes."""

    problems: tuple[str, ...] = ()
    patch: tuple[PatchOperation, ...] = ()
    warnings: tuple[str, ...] = ()
    """Sentences for the client, which kubectl prints."""

    @property
    def outcome(self) -> Literal["rejected", "changed", "unchanged"]:
        """Return the label of the result in metrics."""
        if self.problems:
            return "rejected"
        return "changed" if self.patch else "unchanged"


class InvalidReview(ValueError):
    """Body that is not an AdmissionReview of a supported version, or whose object does not have the fields of its kind."""


def decode_review(body: bytes) -> ReviewRequest:
    """Decode the body of a request. Raises InvalidReview."""
    if _count_parts(body) > MAX_JSON_PARTS and (parts := _count_parts(_STRING.sub(b"", body))) > MAX_JSON_PARTS:
        raise InvalidReview(f"the review has {parts} objects and lists, more than {MAX_JSON_PARTS}")
    review = _decode(body, _AdmissionReview)
    if (review.api_version, review.kind) != (REVIEW_VERSION, REVIEW_KIND):
        raise InvalidReview(
            f"{printable(review.api_version, 60)} {printable(review.kind, 60)} is not supported; set"
            " admissionReviewVersions: [v1] in the webhook configuration"
        )
    return review.request


def decode_admitted(raw: msgspec.Raw, kind: type[T]) -> T:
    """Decode an object of a request. Raises InvalidReview."""
    return _decode(bytes(raw), kind)


def _count_parts(body: bytes) -> int:
    return body.count(b"{") + body.count(b"[")


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidReview(f"the review cannot be decoded: {printable(str(error), 200)}") from None


def encode_review(request: ReviewRequest, result: ReviewResult) -> bytes:
    """Encode the response to a request."""
    response: dict[str, Any] = {"uid": request.uid, "allowed": not result.problems}
    if result.problems:
        message = printable("; ".join(limit_sentences(result.problems, MAX_WARNINGS)), MAX_MESSAGE_CHARS)
        response["status"] = {"code": 422, "reason": "Invalid", "message": message}
    elif result.patch:
        # Bytes are encoded in base64, as the API server expects.
        response |= {"patchType": "JSONPatch", "patch": msgspec.json.encode(result.patch)}
    if result.warnings:
        response["warnings"] = limit_sentences(result.warnings, MAX_WARNINGS, MAX_WARNING_CHARS)
    return msgspec.json.encode({"apiVersion": REVIEW_VERSION, "kind": REVIEW_KIND, "response": response})


def patch_mapping(path: str, old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> tuple[PatchOperation, ...]:
    """Return the patch that replaces a mapping as a whole; empty if it does not change."""
    if new == (old or {}):
        return ()
    return (PatchOperation("add", path, dict(new)) if new else PatchOperation("remove", path),)


def patch_text(path: str, old: str, new: str) -> tuple[PatchOperation, ...]:
    """Return the patch that sets a text; empty if it does not change."""
    return () if new == old else (PatchOperation("add", path, new),)


def remove_fields(path: str, present: Iterable[tuple[str, object]]) -> tuple[PatchOperation, ...]:
    """Return the patch that removes those fields that have a value."""
    return tuple(PatchOperation("remove", f"{path}/{name}") for name, value in present if value is not None)
