"""Every YAML block of the documents that has settings of the agent is valid, and no comment in it swallows a setting."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from agent.config.config import AgentConfig
from tests.builders.settings import parse_config

ROOT = Path(__file__).resolve().parent.parent
SETTING_NAMES = frozenset(re.findall(r"^\| `(?:\w+\.)*(\w+)`", (ROOT / "docs/settings.md").read_text(), re.MULTILINE))
TOP_LEVEL = {field.encode_name for field in msgspec.structs.fields(AgentConfig)}


def settings_blocks() -> Iterator[tuple[str, str]]:
    """Yield place and text of each YAML document with at least one top-level setting."""
    for page in sorted((*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"))):
        text = page.read_text()
        for block in re.finditer(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, block.start(1)) + 1
            for document in re.split(r"^---$", block[1], flags=re.MULTILINE):
                decoded = msgspec.yaml.decode(document)
                if isinstance(decoded, dict) and "apiVersion" not in decoded and TOP_LEVEL & decoded.keys():
                    yield f"{page.relative_to(ROOT)}:{line}", document


BLOCKS = list(settings_blocks())


def test_the_documents_have_settings() -> None:
    assert len(BLOCKS) >= 35
    assert {place.rpartition(":")[0] for place, _ in BLOCKS} >= {
        "docs/eviction.md",
        "docs/policies.md",
        "docs/settings.md",
    }


@pytest.mark.parametrize(("place", "text"), BLOCKS, ids=[place for place, _ in BLOCKS])
def test_a_block_of_settings_is_valid(place: str, text: str) -> None:
    assert parse_config(text.encode(), place) is not None


@pytest.mark.parametrize(("place", "text"), BLOCKS, ids=[place for place, _ in BLOCKS])
def test_no_setting_stands_in_a_comment(place: str, text: str) -> None:
    words = [
        word
        for comment in re.findall(r"(?:^|\s)#(.*)$", text, re.MULTILINE)
        for word in re.findall(r"(?:^ ?| {2,})(\w+): \S", comment)
    ]
    assert SETTING_NAMES.isdisjoint(words), f"{place}: a line break is missing before these settings"
