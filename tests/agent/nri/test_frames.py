"""Bytes of an NRI connection: as containerd writes them, in pieces of any size, and garbage."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.nri.frames import (
    MAX_MESSAGE_BYTES,
    MAX_PIECE_BYTES,
    PLUGIN_CONVERSATION,
    RUNTIME_CONVERSATION,
    FrameReader,
    MessageKind,
    NriMessage,
    NriProtocolError,
    encode_frame,
)

MESSAGES = st.builds(
    NriMessage,
    conversation=st.sampled_from((PLUGIN_CONVERSATION, RUNTIME_CONVERSATION)),
    call=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(MessageKind),
    data=st.binary(max_size=3 * MAX_PIECE_BYTES),
)


def test_hand_written_bytes() -> None:
    """Conversation 2, twelve bytes; then two bytes of message, call 1, a request, no flags."""
    written = bytes.fromhex("00000002 0000000c 00000002 00000001 01 00 6869")
    assert encode_frame(NriMessage(RUNTIME_CONVERSATION, 1, MessageKind.REQUEST, b"hi")) == written
    assert list(FrameReader().feed(written)) == [NriMessage(RUNTIME_CONVERSATION, 1, MessageKind.REQUEST, b"hi")]


@given(st.lists(MESSAGES, max_size=4), st.integers(1, 5000))
def test_messages_are_decoded_from_pieces_of_any_size(messages: list[NriMessage], step: int) -> None:
    data, reader = b"".join(map(encode_frame, messages)), FrameReader()
    decoded = [message for start in range(0, len(data), step) for message in reader.feed(data[start : start + step])]
    assert decoded == messages


def test_pieces_fit_the_read_buffer_of_the_runtime() -> None:
    written = encode_frame(NriMessage(PLUGIN_CONVERSATION, 1, MessageKind.RESPONSE, bytes(10_000)))
    lengths, at = [], 0
    while at < len(written):
        lengths.append(int.from_bytes(written[at + 4 : at + 8]))
        at += 8 + lengths[-1]
    assert lengths == [4096, 4096, 1818], "10 bytes of header and 10,000 of message"


def test_pieces_of_two_conversations_do_not_mix() -> None:
    first_frame, other_frame = (
        encode_frame(NriMessage(PLUGIN_CONVERSATION, 1, MessageKind.REQUEST, b"a" * 5000)),
        encode_frame(NriMessage(RUNTIME_CONVERSATION, 3, MessageKind.RESPONSE, b"b")),
    )
    first = 8 + 4096
    messages = list(FrameReader().feed(first_frame[:first] + other_frame + first_frame[first:]))
    assert [(message.conversation, len(message.data)) for message in messages] == [
        (RUNTIME_CONVERSATION, 1),
        (PLUGIN_CONVERSATION, 5000),
    ]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a fragment of 790644820 bytes"),
        (bytes.fromhex("00000001 0000000a 00400001 00000001 01 00"), "a message of 4194305 bytes"),
        (bytes.fromhex("00000001 0000000a 00000000 00000001 09 00"), "a message of unknown type 9"),
        (
            b"".join(bytes([0, 0, 0, number, 0, 0, 0, 0]) for number in range(9)),
            "conversation 8 in addition to 8 others",
        ),
    ],
)
def test_invalid_bytes_raise_an_error(data: bytes, text: str) -> None:
    with pytest.raises(NriProtocolError, match=text):
        list(FrameReader().feed(data))


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_raise_the_protocol_error(data: bytes) -> None:
    with suppress(NriProtocolError):
        assert all(len(message.data) <= MAX_MESSAGE_BYTES for message in FrameReader().feed(data))


def test_a_message_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(ValueError, match="4194305 bytes"):
        encode_frame(NriMessage(PLUGIN_CONVERSATION, 1, MessageKind.RESPONSE, bytes(MAX_MESSAGE_BYTES + 1)))
