"""What this node obeyed last, on disk: an agent that starts while the API server is gone goes on as it was told.

One JSON object with a version and a checksum, replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from agent.durable import replace_file, set_aside
from agent.dynamic.overlay import Object
from agent.dynamic.translate import GRAMMARS
from agent.sealed import Damaged, sealed, unsealed
from agent.smallfile import read_small
from api.ports import Unavailable

VERSION = 1
"""Of the layout."""
FILE_NAME = "dynamic_config"
LARGEST_BYTES = 16 << 20


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The file."""

    version: int = VERSION
    node: str
    """Whose configuration it is: a state directory may have come from another."""
    objects: tuple[Object, ...]
    checksum: str = ""


class ObeyedFile:
    """The file in a state directory that this process has locked. `messages` says what was not taken over, and why."""

    def __init__(self, state_dir: Path, node: str) -> None:
        self.path, self._node = state_dir / FILE_NAME, node
        self.messages: tuple[str, ...] = ()

    def load(self) -> dict[str, Object]:
        """What was obeyed last, by resource; nothing where that cannot be used, see `messages`. Raises Unavailable where a
        damaged file cannot be set aside."""
        try:
            saved = unsealed(read_small(self.path, LARGEST_BYTES), Saved, VERSION)
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
            replace_file(self.path, sealed(Saved(node=self._node, objects=tuple(objects.values()))))
        except OSError as error:
            raise Unavailable(
                f"{self.path} cannot be written: {error.strerror}",
                f"make room in {self.path.parent}; a restart would begin with what was saved before",
            ) from None

    def _none(self, why: str) -> dict[str, Object]:
        self.messages = (f"The cluster's configuration starts afresh: {why}.",)
        return {}
