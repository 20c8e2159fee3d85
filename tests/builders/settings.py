"""Settings of the agent from the text or the file of a test, as `dioptase agent --config` reads them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from agent.config.config import AgentConfig
from agent.config.loader import build_config, decode_settings, load_documents
from agent.config.profiles import OBSERVE


def parse_config(text: bytes, name: str) -> AgentConfig:
    """Return settings from YAML; an empty file is the defaults. Raises ConfigError with file, field and remedy."""
    return build_config(decode_settings(text, name), name)


def load_config(path: Path | None, probes: Collection[str]) -> AgentConfig:
    """Return the settings of a file, or the defaults without one. `probes` are the names of all probes."""
    return load_documents(path, probes, OBSERVE)[1]
