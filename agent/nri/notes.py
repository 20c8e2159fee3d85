"""What is written on a container that is made with values of the agent's: of each knob what its owner wanted and what it was
given, so that an agent after this one, that was killed, can put it back.

Runtimes copy annotations of a pod, which its owner writes, to its containers: CRI-O all of them, containerd those that it is
told to. What an agent believes it writes to cgroups, beyond what the kubelet grants, so that a note counts only with the
seal of this node's agent: HMAC-SHA-256 over the container's id, which nobody chooses, and the words themselves, by a key
that is in the state directory alone.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec

from agent.durable import replace_file
from agent.smallfile import read_small
from api.knobs import Knob

log = logging.getLogger(__name__)
AS_ASKED = "dioptase.io/as-asked"
"""Annotation of a container."""
FILE_NAME = "notes.key"
KEY_BYTES = 32
LARGEST = 4096
Pairs = Mapping[Knob, tuple[str, str]]
"""What the owner wanted of each knob, and what it was given."""


class _Note(msgspec.Struct, frozen=True):
    seal: str
    knobs: msgspec.Raw


_PAIRS = msgspec.json.Decoder(dict[Knob, tuple[str, str]])


class Notes:
    """Those of the agents that have this key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def write(self, container_id: str, pairs: Pairs) -> str:
        """The text for that container."""
        knobs = msgspec.json.encode(pairs)
        return msgspec.json.encode(_Note(self._seal(container_id, knobs), msgspec.Raw(knobs))).decode()

    def read(self, container_id: str, text: str) -> Pairs:
        """What such a text says. Raises ValueError for what no agent with this key wrote on that very container."""
        if len(text) > LARGEST:
            raise ValueError(f"it has more than {LARGEST} characters")
        try:
            note = msgspec.json.decode(text, type=_Note)
        except RecursionError:
            raise ValueError("its lists are too deep") from None
        if not hmac.compare_digest(self._seal(container_id, bytes(note.knobs)).encode(), note.seal.encode()):
            raise ValueError("it does not have the seal of this node's agent")
        return _PAIRS.decode(note.knobs)

    def _seal(self, container_id: str, knobs: bytes) -> str:
        return hmac.new(self._key, msgspec.json.encode(container_id) + knobs, hashlib.sha256).hexdigest()


def open_notes(state_dir: Path) -> Notes:
    """By the key in that directory, which only one process at a time works with; made where there is none."""
    path = state_dir / FILE_NAME
    try:
        key = read_small(path, KEY_BYTES)
    except FileNotFoundError:
        key = b""
    except OSError as error:
        log.warning("%s cannot be read, and is made anew: %s", path, error.strerror)
        key = b""
    if len(key) != KEY_BYTES:
        key = secrets.token_bytes(KEY_BYTES)
        try:
            replace_file(path, key)
        except OSError as error:
            text = (
                "%s cannot be written: %s; an agent that comes after this one, if it is killed, does not know its notes"
            )
            log.warning(text, path, error.strerror)
    return Notes(key)
