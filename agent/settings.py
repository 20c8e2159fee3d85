"""The settings file: YAML with the field names of agent/config/ in camel case, refused by field where it cannot hold.

`advisor: {policy: canonical, latency: {targetWaitMs: 5}}`
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from agent.config import Config
from agent.sense.documents import LARGEST_BYTES, DocumentError, check
from agent.smallfile import read_small

ALWAYS = "runqlat"
"""`dioptase probe` lists it among the others, and the agent cannot do without."""


class ConfigError(ValueError):
    """A setting that cannot hold; the message names file, field and remedy."""


def load(path: Path | None, probes: Collection[str]) -> Config:
    """Settings from a file, or the defaults without one. `probes` has the names of those that there are."""
    return load_document(path, probes)[1]


def load_document(path: Path | None, probes: Collection[str]) -> tuple[Mapping[str, Any], Config]:
    """The same, with what the file itself says."""
    if path is None:
        return {}, Config()
    try:
        text = read_small(path, LARGEST_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; name an existing file with --config") from error
    document = _decoded(text, str(path))
    config = built(document, str(path))
    unknown = [name for name in config.probes or () if name not in probes]
    if ALWAYS in unknown:
        raise ConfigError(f"{path}: probes: `{ALWAYS}` is no choice: waits are always measured; leave it out")
    if unknown:
        raise ConfigError(f"{path}: probes: there is no probe `{unknown[0]}`; choose from {', '.join(probes)}")
    return document or {}, config


def parse(text: bytes, name: str) -> Config:
    """Settings from YAML; an empty file is the defaults. Raises ConfigError that names file, field and remedy."""
    return built(_decoded(text, name), name)


def _decoded(text: bytes, name: str) -> Any:
    try:
        decoded = text.decode()
        check(decoded)
        return msgspec.yaml.decode(decoded)
    except DocumentError as error:
        raise ConfigError(f"{name}: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 text at byte {error.start}; is this the right file?") from None
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        # PyYAML builds dates and numbers, and lets their own errors out.
        raise ConfigError(f"{name}: a value cannot be read: {' '.join(str(error).split())}") from None


def built(document: Any, name: str) -> Config:
    """Settings from a document, such as the file's. Raises ConfigError that names the document, field and remedy."""
    try:
        config = msgspec.convert({} if document is None else document, Config)
    except msgspec.ValidationError as error:
        from agent.complaints import complaint  # noqa: PLC0415 - an agent that starts needs no words for it

        found = complaint(error, document, Config)
        raise ConfigError(f"{name}: {found}; docs/settings.md lists every setting and its bounds") from error
    if contradiction := _contradiction(config):
        raise ConfigError(f"{name}: {contradiction}")
    return config


def _contradiction(config: Config) -> str:
    """What no single field's bounds can say; empty where all is well."""
    interval, watch = config.interval_s, config.watch_interval_s
    if watch > interval:
        return f"watchIntervalS: {watch:g} is more than intervalS, {interval:g}: nothing would be watched; lower it"
    for section, advisor in (("advisor", config.advisor), ("shadow", config.shadow)):
        if advisor is not None and (stale := advisor.latency.stale_s) < interval:
            return (
                f"{section}.latency.staleS: {stale:g} is less than intervalS, {interval:g}: "
                "waits would always be too old; raise it"
            )
    if config.sockets.take and config.advisor.policy == "none":
        named = " and ".join(config.sockets.take)
        return f"sockets.take: {named} would never take effect, because advisor.policy is none; choose another one"
    decided = {"latency": ("cpuset", "cfsQuota"), "canonical": ("cpuset",), "none": ()}[config.advisor.policy]
    if config.knobs.suppress.policy in decided:
        return (
            f"knobs.suppress.policy: {config.knobs.suppress.policy} would never take effect, because advisor.policy "
            f"{config.advisor.policy} decides that of reclaimed pods; set advisor.policy to none"
        )
    if config.power.enable:
        from agent.advisor.whole_node import annotations_problem  # noqa: PLC0415 - few nodes answer power alerts

        if problem := annotations_problem(config.node.annotations, config.power.annotation_prefix):
            return f"node.annotations: {problem}; correct it, or set power.enable: false"
    if config.knobs.io.max:
        from agent.qrm.io import problems  # noqa: PLC0415 - few nodes limit disks

        return next((f"knobs.io.{problem}" for problem in problems(config.knobs.io)), "")
    return ""
