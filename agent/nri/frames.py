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
"""ttrpc's own limit."""
MAX_PIECE_BYTES = 4096
"""The runtime reads into a buffer of this size, and breaks off where a piece has more."""
PLUGIN_CONVERSATION, RUNTIME_CONVERSATION = 1, 2
"""Conversations: in the first the runtime calls us, in the second we call it."""
_PIECE_HEADER = struct.Struct(">II")
_MESSAGE_HEADER = struct.Struct(">IIBB")
_MAX_RECEIVED_PIECE = MAX_MESSAGE_BYTES + _MESSAGE_HEADER.size
_MAX_CONVERSATIONS = 8


class MessageKind(IntEnum):
    """Of a message. Streams, which have a third one, are not used by NRI."""

    REQUEST = 1
    RESPONSE = 2


class NriMessage(NamedTuple):
    """One that came in whole."""

    conversation: int
    call: int
    kind: MessageKind
    data: bytes


class NriProtocolError(ValueError):
    """What came is not NRI; the text says why. Nothing after it can be understood."""


class FrameReader:
    """Takes bytes as they come and keeps what is not a whole message yet: at most one per conversation."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._begun: dict[int, bytearray] = {}

    def feed(self, data: bytes) -> Iterator[NriMessage]:
        """The messages that these bytes complete. Raises Garbage."""
        self._rest += data
        while len(self._rest) >= _PIECE_HEADER.size:
            conversation, length = _PIECE_HEADER.unpack_from(self._rest)
            if length > _MAX_RECEIVED_PIECE:
                raise NriProtocolError(f"a piece of {length} bytes, more than {_MAX_RECEIVED_PIECE}")
            end = _PIECE_HEADER.size + length
            if len(self._rest) < end:
                return
            piece = bytes(self._rest[_PIECE_HEADER.size : end])
            del self._rest[:end]
            if conversation not in self._begun and len(self._begun) >= _MAX_CONVERSATIONS:
                raise NriProtocolError(f"conversation {conversation}, besides {_MAX_CONVERSATIONS} others")
            begun = self._begun.setdefault(conversation, bytearray())
            begun += piece
            yield from _decode_messages(conversation, begun)


def _decode_messages(conversation: int, begun: bytearray) -> Iterator[NriMessage]:
    while len(begun) >= _MESSAGE_HEADER.size:
        length, call, kind, _flags = _MESSAGE_HEADER.unpack_from(begun)
        if length > MAX_MESSAGE_BYTES:
            raise NriProtocolError(f"a message of {length} bytes, more than {MAX_MESSAGE_BYTES}")
        try:
            known = MessageKind(kind)
        except ValueError:
            raise NriProtocolError(f"a message of kind {kind}") from None
        end = _MESSAGE_HEADER.size + length
        if len(begun) < end:
            return
        data = bytes(begun[_MESSAGE_HEADER.size : end])
        del begun[:end]
        yield NriMessage(conversation, call, known, data)


def encode_frame(message: NriMessage) -> bytes:
    """The bytes of a message. Raises ValueError for one that is too large to be sent."""
    if len(message.data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(message.data)} bytes, more than {MAX_MESSAGE_BYTES}")
    whole = _MESSAGE_HEADER.pack(len(message.data), message.call, message.kind, 0) + message.data
    pieces = (whole[start : start + MAX_PIECE_BYTES] for start in range(0, len(whole), MAX_PIECE_BYTES))
    return b"".join(_PIECE_HEADER.pack(message.conversation, len(piece)) + piece for piece in pieces)
