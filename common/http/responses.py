"""Sends response bodies in chunks, compressed if the client accepts gzip.
Large bodies are stored compressed and shared by all readers, so that slow readers do not multiply memory.
"""

from __future__ import annotations

import asyncio
import gzip
import io
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aiohttp import web

CONTENT_TYPES = {
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
"""A fixed table, because the system's differs between distributions and `nosniff` makes a wrong type fatal."""
CHUNK_BYTES = 64 << 10
"""Decompressing one chunk takes a quarter of a millisecond and does not delay the event loop."""
MIN_COMPRESSED_BYTES = 1024
"""Below this size gzip saves less than its headers cost."""
Headers = Mapping[str, str]
T = TypeVar("T")
RENDER_THREADS = 2
"""Bodies are computed on the CPU with one interpreter lock, so more threads would only keep more of them in memory."""
_renderers = ThreadPoolExecutor(RENDER_THREADS, "render")
"""Not the default executor, where a name server or disk that hangs can occupy every thread. Starts no thread until used."""


async def render_in_thread(render: Callable[[], T]) -> T:
    """Compute a body in a thread of its own executor, so that the event loop goes on meanwhile."""
    return await asyncio.get_running_loop().run_in_executor(_renderers, render)


async def send_body(request: web.Request, body: bytes, headers: Headers) -> web.StreamResponse:
    """Send a body that exists in memory uncompressed; compress it if the client accepts that."""
    compress = len(body) >= MIN_COMPRESSED_BYTES and accepts_gzip(request)
    if len(body) > CHUNK_BYTES:
        return await _send_chunks(request, _chunks(body), None if compress else len(body), headers)
    response = web.Response(body=body, headers=headers)
    if compress:
        response.enable_compression(web.ContentCoding.gzip)
    return response


async def send_computed(request: web.Request, make: Callable[[], bytes], headers: Headers) -> web.StreamResponse:
    """Compute the body for this request in a thread, and send it."""

    def compute() -> tuple[bytes, bool]:
        body = make()
        return (gzip.compress(body, 1), True) if len(body) > CHUNK_BYTES else (body, False)

    body, packed = await render_in_thread(compute)
    return await (send_gzipped if packed else send_body)(request, body, headers)


async def send_gzipped(request: web.Request, packed: bytes, headers: Headers) -> web.StreamResponse:
    """Send a gzip-compressed body: one member, less than 4 GiB, so that its last four bytes are the length."""
    if accepts_gzip(request):
        return await _send_chunks(request, _chunks(packed), len(packed), {**headers, "Content-Encoding": "gzip"})
    return await _send_chunks(request, _gunzipped_chunks(packed), int.from_bytes(packed[-4:], "little"), headers)


def accepts_gzip(request: web.Request) -> bool:
    for offered in request.headers.get("Accept-Encoding", "").split(","):
        name, _, quality = offered.replace(" ", "").partition(";q=")
        if name.lower() == "gzip":
            return quality not in ("0", "0.0", "0.00", "0.000")
    return False


async def _send_chunks(
    request: web.Request, pieces: Iterator[bytes | memoryview], length: int | None, headers: Headers
) -> web.StreamResponse:
    """Send the chunks; compress them if no length is given."""
    response = web.StreamResponse(headers=headers)
    response.content_length = length
    if length is None:
        response.enable_compression(web.ContentCoding.gzip)
    await response.prepare(request)
    if request.method != "HEAD":
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)  # write() does not yield for a fast reader, and a cycle may be due
    return response


def _chunks(body: bytes) -> Iterator[memoryview]:
    view = memoryview(body)
    return (view[start : start + CHUNK_BYTES] for start in range(0, len(body), CHUNK_BYTES))


def _gunzipped_chunks(packed: bytes) -> Iterator[bytes]:
    with gzip.open(io.BytesIO(packed)) as text:
        yield from iter(lambda: text.read(CHUNK_BYTES), b"")
