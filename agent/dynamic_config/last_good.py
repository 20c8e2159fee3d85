"""Stores the objects applied last on disk, so that an agent that starts without the API server keeps its configuration.
The file is one JSON object with version and checksum, replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from agent.dynamic_config.merge import ConfigObject
from agent.dynamic_config.translate import CONFIG_KINDS
from api.interfaces import Unavailable
from common.files import read_small_file
from common.state_file import StateFileDamaged, decode_state, encode_state, quarantine_file, replace_file

LAYOUT_VERSION = 1
"""Of the layout."""
FILE_NAME = "dynamic_config"
MAX_FILE_BYTES = 16 << 20


class LastGoodDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The file."""

    version: int = LAYOUT_VERSION
    node: str
    """Whose configuration it is: a state directory may have come from another."""
    objects: tuple[ConfigObject, ...]
    checksum: str = ""


class LastGoodFile:
    """The file in a state directory that this process has locked. `messages` says what was not taken over, and why."""

    def __init__(self, state_dir: Path, node: str) -> None:
        self.path, self._node = state_dir / FILE_NAME, node
        self.messages: tuple[str, ...] = ()

    def load(self) -> dict[str, ConfigObject]:
        """What was obeyed last, by resource; nothing where that cannot be used, see `messages`. Raises Unavailable where a
        damaged file cannot be set aside."""
        try:
            saved = decode_state(read_small_file(self.path, MAX_FILE_BYTES), LastGoodDocument, LAYOUT_VERSION)
        except FileNotFoundError:
            return {}
        except OSError as error:
            return self._none(f"{self.path} cannot be read: {error.strerror}")
        except StateFileDamaged as error:
            aside = quarantine_file(self.path, str(error))
            return self._none(f"{self.path} was damaged: {error}. It is kept as {aside}")
        if saved.node != self._node:
            return self._none(f"{self.path} is of node {saved.node:.80}, not of {self._node}")
        return {one.resource: one for one in saved.objects if one.resource in CONFIG_KINDS}

    def save(self, objects: Mapping[str, ConfigObject]) -> None:
        """Have this on disk. Raises Unavailable."""
        try:
            replace_file(self.path, encode_state(LastGoodDocument(node=self._node, objects=tuple(objects.values()))))
        except OSError as error:
            raise Unavailable(
                f"{self.path} cannot be written: {error.strerror}",
                f"make room in {self.path.parent}; a restart would begin with what was saved before",
            ) from None

    def _none(self, why: str) -> dict[str, ConfigObject]:
        self.messages = (f"The cluster's configuration starts afresh: {why}.",)
        return {}
