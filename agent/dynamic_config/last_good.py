"""Stores the objects applied last on disk, so that an agent that starts without the API server keeps its configuration.
The file is one JSON object with version and checksum, replaced as a whole."""

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
FILE_NAME = "dynamic_config"
MAX_FILE_BYTES = 16 << 20


class LastGoodDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file."""

    version: int = LAYOUT_VERSION
    node: str
    """Name of the node: a state directory may come from another one."""
    objects: tuple[ConfigObject, ...]
    checksum: str = ""


class LastGoodFile:
    """The file in a state directory that this process has locked. `messages` say what was discarded, and why."""

    def __init__(self, state_dir: Path, node: str) -> None:
        self.path, self._node = state_dir / FILE_NAME, node
        self.messages: tuple[str, ...] = ()

    def load(self) -> dict[str, ConfigObject]:
        """Return the objects applied last, by resource; none if they are unusable, see `messages`. Raises Unavailable
        if a damaged file cannot be moved aside."""
        try:
            document = decode_state(read_small_file(self.path, MAX_FILE_BYTES), LastGoodDocument, LAYOUT_VERSION)
        except FileNotFoundError:
            return {}
        except OSError as error:
            return self._discard(f"{self.path} cannot be read: {error.strerror}")
        except StateFileDamaged as error:
            aside = quarantine_file(self.path, str(error))
            return self._discard(f"{self.path} was damaged: {error}. It was moved to {aside}")
        if document.node != self._node:
            return self._discard(f"{self.path} is of node {document.node:.80}, not of {self._node}")
        return {saved.resource: saved for saved in document.objects if saved.resource in CONFIG_KINDS}

    def save(self, objects: Mapping[str, ConfigObject]) -> None:
        """Write these objects. Raises Unavailable."""
        try:
            replace_file(self.path, encode_state(LastGoodDocument(node=self._node, objects=tuple(objects.values()))))
        except OSError as error:
            raise Unavailable(
                f"{self.path} cannot be written: {error.strerror}",
                f"free space in {self.path.parent}; until then a restart starts with older configuration",
            ) from None

    def _discard(self, reason: str) -> dict[str, ConfigObject]:
        self.messages = (f"The saved configuration of the cluster was discarded: {reason}.",)
        return {}
