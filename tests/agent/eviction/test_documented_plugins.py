"""The table of docs/eviction.md lists every plugin and marks those of `*`."""

from __future__ import annotations

import re
from pathlib import Path

from agent.config.eviction import DEFAULT_PLUGINS, PLUGIN_NAMES

TEXT = (Path(__file__).resolve().parents[3] / "docs/eviction.md").read_text()


def test_every_plugin_has_a_row_that_marks_those_of_star() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| (on)? ?\|$", TEXT, re.MULTILINE)
    assert dict(rows) == {name: "on" if name in DEFAULT_PLUGINS else "" for name in PLUGIN_NAMES}
