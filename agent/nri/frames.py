"""Bytes of an NRI connection into messages, and back. Pure.

Two framings lie in one another. NRI carries several conversations on one socket: eight bytes of header (number of the
conversation, length; both big-endian, 32 bits) before each piece. In each of them ttrpc is spoken: ten bytes (length, number of
the call, kind, flags) before each message, which may come in several pieces.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

LARGEST_MESSAGE = 4 << 20
"""ttrpc's own limit."""
PIECE = 4096
"""The runtime reads into a buffer of this size, and breaks off where a piece has more."""
OURS, RUNTIMES = 1, 2
"""Conversations: in the first the runtime calls us, in the second we call it."""
_PIECE = struct.Struct(">II")
_MESSAGE = struct.Struct(">IIBB")
_LARGEST_PIECE = LARGEST_MESSAGE + _MESSAGE.size
_MOST_CONVERSATIONS = 8


class Kind(IntEnum):
    """Of a message. Streams, which have a third one, are not used by NRI."""

    REQUEST = 1
    RESPONSE = 2


class Message(NamedTuple):
    """One that came in whole."""

    conversation: int
    call: int
    kind: Kind
    data: bytes


class Garbage(ValueError):
    """What came is not NRI; the text says why. Nothing after it can be understood."""


class Reader:
    """Takes bytes as they come and keeps what is not a whole message yet: at most one per conversation."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._begun: dict[int, bytearray] = {}

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that these bytes complete. Raises Garbage."""
        self._rest += data
        while len(self._rest) >= _PIECE.size:
            conversation, length = _PIECE.unpack_from(self._rest)
            if length > _LARGEST_PIECE:
                raise Garbage(f"a piece of {length} bytes, more than {_LARGEST_PIECE}")
            end = _PIECE.size + length
            if len(self._rest) < end:
                return
            piece = bytes(self._rest[_PIECE.size : end])
            del self._rest[:end]
            if conversation not in self._begun and len(self._begun) >= _MOST_CONVERSATIONS:
                raise Garbage(f"conversation {conversation}, besides {_MOST_CONVERSATIONS} others")
            begun = self._begun.setdefault(conversation, bytearray())
            begun += piece
            yield from _messages(conversation, begun)


def _messages(conversation: int, begun: bytearray) -> Iterator[Message]:
    while len(begun) >= _MESSAGE.size:
        length, call, kind, _flags = _MESSAGE.unpack_from(begun)
        if length > LARGEST_MESSAGE:
            raise Garbage(f"a message of {length} bytes, more than {LARGEST_MESSAGE}")
        try:
            known = Kind(kind)
        except ValueError:
            raise Garbage(f"a message of kind {kind}") from None
        end = _MESSAGE.size + length
        if len(begun) < end:
            return
        data = bytes(begun[_MESSAGE.size : end])
        del begun[:end]
        yield Message(conversation, call, known, data)


def frame(message: Message) -> bytes:
    """The bytes of a message. Raises ValueError for one that is too large to be sent."""
    if len(message.data) > LARGEST_MESSAGE:
        raise ValueError(f"a message of {len(message.data)} bytes, more than {LARGEST_MESSAGE}")
    whole = _MESSAGE.pack(len(message.data), message.call, message.kind, 0) + message.data
    pieces = (whole[start : start + PIECE] for start in range(0, len(whole), PIECE))
    return b"".join(_PIECE.pack(message.conversation, len(piece)) + piece for piece in pieces)
