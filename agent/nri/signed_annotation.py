"""Signed container annotation with the original and the given value of each adjusted knob.
Pod owners can write annotations, so that a value counts only with an HMAC-SHA-256 by the key in the state
directory.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec

from api.knobs import Knob
from common.files import read_small_file
from common.state_file import replace_file

log = logging.getLogger(__name__)
ORIGINALS_ANNOTATION = "dioptase.io/as-asked"
"""Container annotation with the original and the given value of each adjusted knob."""
KEY_FILE = "notes.key"
KEY_BYTES = 32
MAX_ANNOTATION_CHARS = 4096
KnobPairs = Mapping[Knob, tuple[str, str]]
"""Original and given value of each knob."""


class _SignedPairs(msgspec.Struct, frozen=True):
    seal: str
    knobs: msgspec.Raw


_PAIRS_DECODER = msgspec.json.Decoder(dict[Knob, tuple[str, str]])


class SignedAnnotations:
    """Writes and verifies the annotation with the key of this node."""

    def __init__(self, key: bytes, unsaved: Path | None = None) -> None:
        """`unsaved` is the file of a key that is not on disk yet."""
        self._key, self._unsaved = key, unsaved

    def save_key(self) -> None:
        """Write a new key to disk. Call it before the first annotation is written, in a thread that may wait for a disk."""
        path, self._unsaved = self._unsaved, None
        if path is None:
            return
        try:
            replace_file(path, self._key)
        except OSError as error:
            text = "%s cannot be written: %s; after a crash the next agent cannot verify annotations of this one"
            log.warning(text, path, error.strerror)

    def write(self, container_id: str, pairs: KnobPairs) -> str:
        """Return the annotation text for a container."""
        knobs = msgspec.json.encode(pairs)
        return msgspec.json.encode(_SignedPairs(self._seal(container_id, knobs), msgspec.Raw(knobs))).decode()

    def read(self, container_id: str, text: str) -> KnobPairs:
        """Return the values of an annotation. Raises ValueError unless an agent with this key wrote it for this container."""
        if len(text) > MAX_ANNOTATION_CHARS:
            raise ValueError(f"it has more than {MAX_ANNOTATION_CHARS} characters")
        try:
            signed = msgspec.json.decode(text, type=_SignedPairs)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not hmac.compare_digest(self._seal(container_id, bytes(signed.knobs)).encode(), signed.seal.encode()):
            raise ValueError("its signature is not that of this node's agent")
        return _PAIRS_DECODER.decode(signed.knobs)

    def _seal(self, container_id: str, knobs: bytes) -> str:
        return hmac.new(self._key, msgspec.json.encode(container_id) + knobs, hashlib.sha256).hexdigest()


def open_signed_annotations(state_dir: Path) -> SignedAnnotations:
    """Read the key from the locked state directory, or make a new one, which `save_key` writes."""
    path = state_dir / KEY_FILE
    try:
        key = read_small_file(path, KEY_BYTES)
    except FileNotFoundError:
        key = b""
    except OSError as error:
        log.warning("%s cannot be read and is created again: %s", path, error.strerror)
        key = b""
    if len(key) != KEY_BYTES:
        return SignedAnnotations(secrets.token_bytes(KEY_BYTES), unsaved=path)
    return SignedAnnotations(key)
