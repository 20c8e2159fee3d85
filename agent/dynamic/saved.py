"""What this node obeyed last, on disk: an agent that starts while the API server is gone goes on as it was told.

One JSON object with a version and a checksum, replaced as a whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from agent.durable import replace_file, set_aside
from agent.dynamic.overlay import Object
from agent.dynamic.translate import GRAMMARS
from agent.smallfile import read_small
from api.ports import Unavailable

VERSION = 1
"""Of the layout."""
FILE_NAME = "dynamic_config"
LARGEST_BYTES = 16 << 20


class Damaged(Exception):
    """The file is not what was written; the text says in which way."""


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The file."""

    version: int = VERSION
    node: str
    """Whose configuration it is: a state directory may have come from another."""
    objects: tuple[Object, ...]
    checksum: str = ""
    """SHA-256 over the file with nothing in this place."""


class _AnyVersion(msgspec.Struct, frozen=True):
    version: int


def encode_saved(saved: Saved) -> bytes:
    """The file, with its checksum."""
    body = msgspec.structs.replace(saved, checksum="")
    checksum = hashlib.sha256(msgspec.json.encode(body)).hexdigest()
    return msgspec.json.encode(msgspec.structs.replace(body, checksum=checksum)) + b"\n"


def decode_saved(data: bytes) -> Saved:
    """What was written. Raises Damaged unless every byte is as `encode_saved` wrote it."""
    try:
        version = msgspec.json.decode(data, type=_AnyVersion).version
        if version != VERSION:
            raise Damaged(f"it has layout version {version}, this program knows {VERSION}")
        saved = msgspec.json.decode(data, type=Saved)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"it cannot be read: {error}") from None
    if encode_saved(saved) != data:
        raise Damaged("its checksum does not match its content, or it has bytes that this program never writes")
    return saved


class ObeyedFile:
    """The file in a state directory that this process has locked. `messages` says what was not taken over, and why."""

    def __init__(self, state_dir: Path, node: str) -> None:
        self.path, self._node = state_dir / FILE_NAME, node
        self.messages: tuple[str, ...] = ()

    def load(self) -> dict[str, Object]:
        """What was obeyed last, by resource; nothing where that cannot be used, see `messages`. Raises Unavailable where a
        damaged file cannot be set aside."""
        try:
            saved = decode_saved(read_small(self.path, LARGEST_BYTES))
        except FileNotFoundError:
            return {}
        except OSError as error:
            return self._none(f"{self.path} cannot be read: {error.strerror}")
        except Damaged as error:
            aside = set_aside(self.path, str(error))
            return self._none(f"{self.path} was damaged: {error}. It is kept as {aside}")
        if saved.node != self._node:
            return self._none(f"{self.path} is of node {saved.node:.80}, not of {self._node}")
        return {one.resource: one for one in saved.objects if one.resource in GRAMMARS}

    def save(self, objects: Mapping[str, Object]) -> None:
        """Have this on disk. Raises Unavailable."""
        try:
            replace_file(self.path, encode_saved(Saved(node=self._node, objects=tuple(objects.values()))))
        except OSError as error:
            raise Unavailable(
                f"{self.path} cannot be written: {error.strerror}",
                f"make room in {self.path.parent}; a restart would begin with what was saved before",
            ) from None

    def _none(self, why: str) -> dict[str, Object]:
        self.messages = (f"The cluster's configuration starts afresh: {why}.",)
        return {}
