"""Bytes to lines, lines to events, and the position where a watch resumes."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kube.errors import ApiError, InvalidResponse
from kube.objects import PartialObjectMetadata, ResourceType
from kube.watch import LineSplitter, WatchEvent, WatchEventType, WatchPosition, parse_watch_event

PODS = ResourceType("", "v1", "pods", "Pod", PartialObjectMetadata, namespaced=True)
TOO_OLD = ApiError(410, "Expired", "too old resource version: 5 (90)")
FORBIDDEN = ApiError(403, "Forbidden", "pods is forbidden")
BUSY = ApiError(429, "TooManyRequests", "try later", retry_after_s=7)


@given(st.lists(st.binary(max_size=40).filter(lambda line: b"\n" not in line)), st.data())
def test_lines_are_complete_however_the_stream_is_cut(lines: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    reader = LineSplitter()
    assert [line for piece in pieces for line in reader.feed(piece)] == [line for line in lines if line.strip()]


def test_an_incomplete_line_is_no_event() -> None:
    reader = LineSplitter()
    assert reader.feed(b'{"type":"ADDED"') == []
    assert reader.feed(b"}") == []
    assert reader.feed(b"\n\n") == [b'{"type":"ADDED"}']


@pytest.mark.parametrize("pieces", [[b"12345678901"], [b"123456", b"78901"], [b"1\n12345678901"]])
def test_a_line_that_is_too_long_is_an_invalid_response(pieces: list[bytes]) -> None:
    reader = LineSplitter(max_bytes=10)
    with pytest.raises(InvalidResponse, match="more than 10 bytes"):
        list(map(reader.feed, pieces))


def line(kind: str, **metadata: object) -> bytes:
    return json.dumps({"type": kind, "object": {"kind": "Pod", "metadata": metadata}}).encode()


def test_events_have_key_version_and_object() -> None:
    event = parse_watch_event(line("MODIFIED", name="web", namespace="shop", resourceVersion="17", uid="u"), PODS)
    assert (event.what, event.key, event.resource_version) == (WatchEventType.MODIFIED, "shop/web", "17")
    assert event.object is not None
    assert event.object.metadata.uid == "u"


def test_a_bookmark_has_a_version_and_nothing_else() -> None:
    assert parse_watch_event(line("BOOKMARK", resourceVersion="99"), PODS) == WatchEvent(
        WatchEventType.BOOKMARK, "", "99"
    )


def test_an_object_that_does_not_fit_is_an_event_with_a_problem() -> None:
    class Odd(PartialObjectMetadata, frozen=True, kw_only=True):
        spec: int = 0

    text = b'{"type":"ADDED","object":{"metadata":{"name":"a","resourceVersion":"3"},"spec":"none"}}'
    event = parse_watch_event(text, ResourceType("", "v1", "odds", "Odd", Odd))
    assert (event.key, event.resource_version, event.object) == ("a", "3", None)
    assert event.problem == "Expected `int`, got `str` - at `$.spec`"


def test_an_error_in_the_stream_is_the_error_that_it_names() -> None:
    text = b'{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired","message":"too old"}}'
    with pytest.raises(ApiError) as caught:
        parse_watch_event(text, PODS)
    assert (caught.value.status, caught.value.expired, caught.value.message) == (410, True, "too old")


@pytest.mark.parametrize(
    "text",
    [
        b"<html>gateway</html>",
        b"{}",
        b"null",
        b'{"type":"RENAMED","object":{}}',
        b'{"type":"ADDED"}',
        b'{"type":"ADDED","object":7}',
        b'{"type":"ADDED","object":{"metadata":{"name":7}}}',
        b'{"type":"ADDED","object":' + b"[" * 5000,
        b"\xff\xfe",
    ],
)
def test_an_invalid_event_is_an_invalid_response(text: bytes) -> None:
    with pytest.raises(InvalidResponse, match="not an event of a watch"):
        parse_watch_event(text, PODS)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_event_or_an_error(text: bytes) -> None:
    with contextlib.suppress(InvalidResponse, ApiError):
        parse_watch_event(text, PODS)


AT_5 = WatchPosition(resource_version="5")
OFTEN = WatchPosition(resource_version="5", failures=3, wait_s=2)


@pytest.mark.parametrize(
    ("after", "version", "wait_s", "failures", "relists"),
    [
        (WatchPosition().listed("5"), "5", 0, 0, 0),
        (AT_5.event_received("6"), "6", 0, 0, 0),
        (AT_5.event_received(""), "5", 0, 0, 0),
        (OFTEN.event_received("6"), "6", 0, 0, 0),
        (AT_5.ended(300, 0), "5", 0, 0, 0),
        (OFTEN.ended(300, 0), "5", 0, 0, 0),
        (AT_5.ended(0.1, 0), "5", 0.5, 1, 0),  # a watch that ends at once would be repeated without pause
        (AT_5.connection_lost(0), "5", 0.5, 1, 0),
        (AT_5.connection_lost(0).connection_lost(0), "5", 1, 2, 0),
        (OFTEN.connection_lost(0), "5", 4, 4, 0),
        (OFTEN.connection_lost(0.5), "5", 5, 4, 0),
        (WatchPosition(resource_version="5", failures=40).connection_lost(0), "5", 30, 41, 0),
        (WatchPosition().connection_lost(0), None, 0.5, 1, 0),
        (AT_5.refused(TOO_OLD, 0), None, 0, 1, 1),  # compacted history: list at once
        (AT_5.refused(TOO_OLD, 0).listed("90").refused(TOO_OLD, 0), None, 1, 2, 2),  # repeatedly: after a delay
        (AT_5.refused(FORBIDDEN, 0), None, 0.5, 1, 1),
        (WatchPosition().refused(FORBIDDEN, 0), None, 0.5, 1, 0),
        (AT_5.refused(FORBIDDEN, 0).listed("9").refused(FORBIDDEN, 0), None, 1, 2, 2),
        (AT_5.refused(BUSY, 0), "5", 7, 1, 0),  # must retry later: nothing was missed
        (AT_5.refused(ApiError(429, "", "", retry_after_s=900), 0), "5", 30, 1, 0),
        (AT_5.invalid_data_received(0), None, 0.5, 1, 1),
    ],
)
def test_where_a_watch_resumes(
    after: WatchPosition, version: str | None, wait_s: float, failures: int, relists: int
) -> None:
    assert after == WatchPosition(resource_version=version, wait_s=wait_s, failures=failures, relists=relists)
