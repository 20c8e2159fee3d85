"""Loads the settings file: YAML with camel-case names, rejected with file, field and remedy if it is invalid. Also
finds the container runtime's socket if the settings do not name it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec

from agent.config.config import AgentConfig
from agent.config.profiles import PROFILES, with_defaults
from common.files import read_small_file
from common.yaml_guard import MAX_DOCUMENT_BYTES, YamlDocumentError, check_yaml

ALWAYS_ON_PROBE = "runqlat"
"""The probe that the agent always runs, so that settings cannot choose it."""


NodeCheck = Callable[[AgentConfig], str]
"""Check of settings against this node (agent.config.node_check); its result is the first setting that the node cannot hold, or
an empty text."""


class ConfigError(ValueError):
    """An invalid setting; the message names file, field and remedy."""


SettingDocuments = Mapping[str, Mapping[str, Any]]
"""Decoded settings by source, such as `file`; each overrides those after it."""


def load_documents(path: Path | None, probes: Collection[str], profile: str) -> tuple[SettingDocuments, AgentConfig]:
    """Return the decoded file over the settings of a profile, and the settings of both merged.

    Without a file the profile's settings apply. `probes` are the names of all probes. Raises ConfigError.
    """
    name = f"profile {profile}"
    documents = {"file": {} if path is None else _read_yaml(path), name: PROFILES[profile].settings}
    config = build_config(merge_documents(documents), name if path is None else str(path))
    unknown = [name for name in config.probes or () if name not in probes]
    if ALWAYS_ON_PROBE in unknown:
        raise ConfigError(f"{path}: probes: `{ALWAYS_ON_PROBE}` always runs and cannot be chosen; remove it")
    if unknown:
        raise ConfigError(f"{path}: probes: there is no probe `{unknown[0]}`; choose from {', '.join(probes)}")
    return documents, config


def _read_yaml(path: Path) -> Any:
    try:
        text = read_small_file(path, MAX_DOCUMENT_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; name an existing file with --config") from error
    document = decode_settings(text, str(path))
    return {} if document is None else document


def merge_documents(documents: SettingDocuments) -> Any:
    """Return one document of all settings; a file that is no map is returned unchanged, for validation to reject."""
    return reduce(with_defaults, documents.values())


def decode_settings(text: bytes, name: str) -> Any:
    """Return the decoded YAML of a settings file. Raises ConfigError with file, line and remedy."""
    try:
        decoded = text.decode()
        check_yaml(decoded)
        return msgspec.yaml.decode(decoded)
    except YamlDocumentError as error:
        raise ConfigError(f"{name}: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 text at byte {error.start}; is this the right file?") from None
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        # PyYAML builds dates and numbers, and does not wrap their errors (yaml/constructor.py).
        raise ConfigError(f"{name}: a value cannot be read: {' '.join(str(error).split())}") from None


def build_config(document: Any, name: str) -> AgentConfig:
    """Return settings from a decoded document. Raises ConfigError with the document's name, field and remedy."""
    try:
        config = msgspec.convert({} if document is None else document, AgentConfig)
    except msgspec.ValidationError as error:
        from common.validation import describe_validation_error  # noqa: PLC0415 - needed for invalid files only

        problem = describe_validation_error(error, document, AgentConfig)
        raise ConfigError(f"{name}: {problem}; docs/settings.md lists every setting and its bounds") from error
    if contradiction := _find_contradiction(config):
        raise ConfigError(f"{name}: {contradiction}")
    return config


def _find_contradiction(config: AgentConfig) -> str:
    """Return the first contradiction between fields with its remedy, or an empty text."""
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
        names = " and ".join(config.sockets.take)
        return f"sockets.take: {names} would never take effect, because advisor.policy is none; choose another one"
    policies_with_own_limit = {"latency": ("cpuset", "cfsQuota"), "canonical": ("cpuset",), "none": ()}[
        config.advisor.policy
    ]
    if config.knobs.suppress.policy in policies_with_own_limit:
        return (
            f"knobs.suppress.policy: {config.knobs.suppress.policy} would never take effect, because advisor.policy "
            f"{config.advisor.policy} decides that of reclaimed pods; set advisor.policy to none"
        )
    if config.power.enable:
        from agent.advisor.power_capping import check_power_annotations  # noqa: PLC0415 - few nodes need it

        if problem := check_power_annotations(config.node.annotations, config.power.annotation_prefix):
            return f"node.annotations: {problem}; correct it, or set power.enable: false"
    if config.knobs.io.max:
        from agent.qrm.knobs.io import io_config_errors  # noqa: PLC0415 - few nodes need it

        return next((f"knobs.io.{problem}" for problem in io_config_errors(config.knobs.io)), "")
    return ""


RUNTIME_SOCKETS = ("/run/containerd/containerd.sock", "/run/crio/crio.sock", "/run/k3s/containerd/containerd.sock")
UNIX_SCHEME = "unix://"


def find_runtime_socket(configured: str | None) -> Path | None:
    """Return the configured socket or the first that exists; None if there is none or it is configured empty."""
    if configured is not None:
        return Path(configured.removeprefix(UNIX_SCHEME)) if configured else None
    return next((path for path in map(Path, RUNTIME_SOCKETS) if path.is_socket()), None)
