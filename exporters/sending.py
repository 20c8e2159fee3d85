"""Bodies on their way out, in pieces: of what a slow reader has not taken yet, no more than a piece or two is held for it.

What is large is kept in gzip, once for all readers, and unpacked on the way for those that do not take gzip: the text of
8 MiB that 500 cgroups make would otherwise be in memory for every one of them.
"""

from __future__ import annotations

import asyncio
import gzip
import io
from collections.abc import Callable, Iterator, Mapping

from aiohttp import web

TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
}
"""Fixed, because the system's table differs between distributions and `nosniff` makes a wrong type fatal."""
PIECE_BYTES = 64 << 10
"""A quarter of a millisecond to unpack, so the loop is not held up between two of them."""
COMPRESS_FROM = 1024
"""Bytes; below this gzip saves nothing worth its headers."""
Headers = Mapping[str, str]


async def send(request: web.Request, body: bytes, headers: Headers) -> web.StreamResponse:
    """A body that is kept as it is anyway, compressed for whoever takes that."""
    compress = len(body) >= COMPRESS_FROM and takes_gzip(request)
    if len(body) > PIECE_BYTES:
        return await _send(request, _slices(body), None if compress else len(body), headers)
    response = web.Response(body=body, headers=headers)
    if compress:
        response.enable_compression(web.ContentCoding.gzip)
    return response


async def send_made(request: web.Request, make: Callable[[], bytes], headers: Headers) -> web.StreamResponse:
    """A body that is made for this reader alone, in a thread."""

    def made() -> tuple[bytes, bool]:
        body = make()
        return (gzip.compress(body, 1), True) if len(body) > PIECE_BYTES else (body, False)

    body, packed = await asyncio.to_thread(made)
    return await (send_packed if packed else send)(request, body, headers)


async def send_packed(request: web.Request, packed: bytes, headers: Headers) -> web.StreamResponse:
    """A body that is kept in gzip, in one member and from less than 4 GiB: its last four bytes are its length."""
    if takes_gzip(request):
        return await _send(request, _slices(packed), len(packed), {**headers, "Content-Encoding": "gzip"})
    return await _send(request, _unpacked(packed), int.from_bytes(packed[-4:], "little"), headers)


def takes_gzip(request: web.Request) -> bool:
    """Whether the reader accepts gzip."""
    for offered in request.headers.get("Accept-Encoding", "").split(","):
        name, _, quality = offered.replace(" ", "").partition(";q=")
        if name.lower() == "gzip":
            return quality not in ("0", "0.0", "0.00", "0.000")
    return False


async def _send(
    request: web.Request, pieces: Iterator[bytes | memoryview], length: int | None, headers: Headers
) -> web.StreamResponse:
    """Without a length the pieces are compressed."""
    response = web.StreamResponse(headers=headers)
    response.content_length = length
    if length is None:
        response.enable_compression(web.ContentCoding.gzip)
    await response.prepare(request)
    if request.method != "HEAD":
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)  # a fast reader never makes write() wait, and a tick may be due
    return response


def _slices(body: bytes) -> Iterator[memoryview]:
    view = memoryview(body)
    return (view[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES))


def _unpacked(packed: bytes) -> Iterator[bytes]:
    with gzip.open(io.BytesIO(packed)) as text:
        yield from iter(lambda: text.read(PIECE_BYTES), b"")
