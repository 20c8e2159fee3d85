"""Encodes and decodes the frames of an NRI connection: NRI's multiplexing around ttrpc messages.
It is pure. The multiplexer's header is 8 bytes (conversation, length), that of ttrpc 10 bytes (length, call, kind,
flags), big-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

MAX_MESSAGE_BYTES = 4 << 20
"""Message limit of ttrpc."""
MAX_PIECE_BYTES = 4096
"""Size of the runtime's read buffer; it closes the connection on a larger frame."""
PLUGIN_CONVERSATION, RUNTIME_CONVERSATION = 1, 2
"""Multiplexed connections: on the first the runtime calls the plugin, on the second the plugin calls the runtime."""
_PIECE_HEADER = struct.Struct(">II")
_MESSAGE_HEADER = struct.Struct(">IIBB")
_MAX_RECEIVED_PIECE = MAX_MESSAGE_BYTES + _MESSAGE_HEADER.size
_MAX_CONVERSATIONS = 8


class MessageKind(IntEnum):
    """Kind of a ttrpc message. NRI does not use streams, which have a third kind."""

    REQUEST = 1
    RESPONSE = 2


class NriMessage(NamedTuple):
    """One complete message."""

    conversation: int
    call: int
    kind: MessageKind
    data: bytes


class NriProtocolError(ValueError):
    """The peer sent bytes that are not NRI, after which the stream cannot be decoded; the text says why."""


class FrameReader:
    """Decodes a byte stream; buffers at most one incomplete message per conversation."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._partial: dict[int, bytearray] = {}

    def feed(self, data: bytes) -> Iterator[NriMessage]:
        """Yield the messages that these bytes complete. Raises NriProtocolError."""
        self._rest += data
        while len(self._rest) >= _PIECE_HEADER.size:
            conversation, length = _PIECE_HEADER.unpack_from(self._rest)
            if length > _MAX_RECEIVED_PIECE:
                raise NriProtocolError(f"received a fragment of {length} bytes, more than {_MAX_RECEIVED_PIECE}")
            end = _PIECE_HEADER.size + length
            if len(self._rest) < end:
                return
            piece = bytes(self._rest[_PIECE_HEADER.size : end])
            del self._rest[:end]
            if conversation not in self._partial and len(self._partial) >= _MAX_CONVERSATIONS:
                raise NriProtocolError(f"conversation {conversation} in addition to {_MAX_CONVERSATIONS} others")
            buffer = self._partial.setdefault(conversation, bytearray())
            buffer += piece
            yield from _decode_messages(conversation, buffer)


def _decode_messages(conversation: int, buffer: bytearray) -> Iterator[NriMessage]:
    while len(buffer) >= _MESSAGE_HEADER.size:
        length, call, number, _flags = _MESSAGE_HEADER.unpack_from(buffer)
        if length > MAX_MESSAGE_BYTES:
            raise NriProtocolError(f"a message of {length} bytes, more than {MAX_MESSAGE_BYTES}")
        try:
            kind = MessageKind(number)
        except ValueError:
            raise NriProtocolError(f"received a message of unknown type {number}") from None
        end = _MESSAGE_HEADER.size + length
        if len(buffer) < end:
            return
        data = bytes(buffer[_MESSAGE_HEADER.size : end])
        del buffer[:end]
        yield NriMessage(conversation, call, kind, data)


def encode_frame(message: NriMessage) -> bytes:
    """Encode a message in pieces that fit the runtime's buffer. Raises ValueError for a message above MAX_MESSAGE_BYTES."""
    if len(message.data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(message.data)} bytes, more than {MAX_MESSAGE_BYTES}")
    frame = _MESSAGE_HEADER.pack(len(message.data), message.call, message.kind, 0) + message.data
    pieces = (frame[start : start + MAX_PIECE_BYTES] for start in range(0, len(frame), MAX_PIECE_BYTES))
    return b"".join(_PIECE_HEADER.pack(message.conversation, len(piece)) + piece for piece in pieces)
