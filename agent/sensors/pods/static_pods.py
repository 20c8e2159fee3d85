"""Reads pods from a YAML file and rereads it when it changes. At start an invalid file is rejected with file, field and
remedy; later the last valid pods stay in force and the error is reported with every snapshot."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agent.config.qos import ALL_RIGHTS
from agent.sensors.pods.pod_spec import (
    LOOPBACK,
    PodFieldPaths,
    PodParsingContext,
    RawPod,
    is_manifest,
    pod_from_spec,
    read_manifest,
)
from agent.sensors.pods.resource_quantities import PodFieldError
from api.interfaces import Unavailable
from api.pod import Pod
from api.text import quote
from common.files import read_small_file
from common.yaml_guard import MAX_DOCUMENT_BYTES, YamlDocumentError, check_yaml

MTIME_SETTLE_NS = 100_000_000
"""A file that was written within this time before a read is read again: its timestamp may not change at the next write.
"""
_DEFAULT_CONTEXT = PodParsingContext()
_FIELD_IN_ERROR = re.compile(r" - at `(?:key in )?\$\.?(?P<field>[^`]*)`$")
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<field>\w+)`")


class PodsError(ValueError):
    """An invalid pods file; the message names file, field and remedy."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pods: list[RawPod]


class StaticPods:
    """A PodSource (api.interfaces) over one file. The constructor raises PodsError for an invalid file."""

    def __init__(self, path: Path, context: PodParsingContext = _DEFAULT_CONTEXT) -> None:
        self._path, self._context = path, context
        self._signature: tuple[int, ...] = ()
        self._error = ""
        self._pods = self._load()

    def read(self) -> tuple[Pod, ...]:
        """Return the file's pods. Raises Unavailable while the file is unreadable or invalid."""
        if self._changed():
            try:
                self._pods, self._error = self._load(), ""
            except PodsError as error:
                self._error = str(error)
        if self._error:
            raise Unavailable(self._error, "correct the file; until then its last valid pods stay in force")
        return self._pods

    def _changed(self) -> bool:
        return not self._signature or self._stat() != self._signature

    def _stat(self) -> tuple[int, ...]:
        try:
            status = self._path.stat()
        except OSError:
            return ()
        if time.time_ns() - status.st_mtime_ns < MTIME_SETTLE_NS:
            return ()
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def _load(self) -> tuple[Pod, ...]:
        # Take the signature before the text, so that a write in between counts as a change.
        self._signature = self._stat()
        try:
            content = read_small_file(self._path, MAX_DOCUMENT_BYTES)
        except OSError as error:
            raise PodsError(
                f"{self._path}: cannot be read: {error.strerror}; name an existing file with --pods"
            ) from None
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise PodsError(f"{self._path}: not UTF-8 text at byte {error.start}; is this the right file?") from None
        return parse_pods(text, str(self._path), self._context)


class NoPods:
    """A PodSource without pods: everything is measured, nothing is managed."""

    def read(self) -> tuple[Pod, ...]:
        return ()


def parse_pods(text: str, source: str, context: PodParsingContext = _DEFAULT_CONTEXT) -> tuple[Pod, ...]:
    """Return pods from YAML or JSON, in this program's form or as Kubernetes objects; `source` names the text in
    errors.

    Raises PodsError. Errors that leave a usable pod are in its `problems`.
    """
    try:
        check_yaml(text)
        document = msgspec.yaml.decode(text)
    except YamlDocumentError as error:
        raise PodsError(f"{source}: {error}") from None
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        # PyYAML builds dates and numbers, and does not wrap their errors (yaml/constructor.py).
        raise PodsError(f"{source}: a value cannot be read: {' '.join(str(error).split())}") from None
    if document is None:
        raise PodsError(f"{source}: the file is empty; write `pods: []` for no pods")
    try:
        return _parse_manifest(document, context) if is_manifest(document) else _parse_pods_file(document, context)
    except msgspec.ValidationError as error:
        raise PodsError(f"{source}: {_validation_text(error)}") from None
    except PodFieldError as error:
        raise PodsError(f"{source}: {error}") from None


def _parse_pods_file(document: object, context: PodParsingContext) -> tuple[Pod, ...]:
    raws = msgspec.convert(document, _File).pods
    paths = [PodFieldPaths(f"pods[{index}]", f"pods[{index}]") for index in range(len(raws))]
    # This form has no address: its pods share the node's network.
    pods = _pods(raws, paths, context)
    return tuple(msgspec.structs.replace(pod, address=LOOPBACK) for pod in pods)


def _pods(raws: Sequence[RawPod], paths: Sequence[PodFieldPaths], context: PodParsingContext) -> tuple[Pod, ...]:
    # The operator writes the file, not a tenant, so its pods have every right.
    context = msgspec.structs.replace(context, rights=ALL_RIGHTS)
    pods = []
    for raw, place in zip(raws, paths, strict=True):
        try:
            pods.append(pod_from_spec(raw, place, context))
        except PodFieldError as error:
            raise error.of(raw.name) from None
    _check_unique(pods, paths, raws)
    return tuple(pods)


def _parse_manifest(document: Mapping[str, Any], context: PodParsingContext) -> tuple[Pod, ...]:
    manifests = read_manifest(document)
    pods = _pods([each.raw for each in manifests], [each.place for each in manifests], context)
    return tuple(
        msgspec.structs.replace(pod, uid=each.uid or pod.uid, address=each.address)
        for pod, each in zip(pods, manifests, strict=True)
    )


def _validation_text(error: msgspec.ValidationError) -> str:
    text = str(error)
    match = _FIELD_IN_ERROR.search(text)
    field = (match["field"] if match else "") or "top level"
    reason = text[: match.start()] if match else text
    if missing := _MISSING_FIELD.search(reason):
        field = f"{field}.{missing['field']}".removeprefix("top level.")
        return f"{field}: is missing; write it, docs/operations.md shows a whole file"
    if reason.startswith("Expected `str`") and not reason.endswith("`null`"):
        return f"{field}: is not text; write it in quotes"
    return f"{field}: {reason[:1].lower()}{reason[1:]}; docs/operations.md shows a whole file"


def _check_unique(pods: Sequence[Pod], places: Sequence[PodFieldPaths], raws: Sequence[RawPod]) -> None:
    keys: dict[str, str] = {}
    cgroups: dict[str, str] = {}
    for pod, place, raw in zip(pods, places, raws, strict=True):
        if other := keys.get(pod.key):
            raise PodFieldError(
                f"{place.metadata}.name", f"{pod.key} is already {other}; give it another name or namespace"
            )
        keys[pod.key] = place.metadata
        names: set[str] = set()
        count = len(raw.containers)
        for position, container in enumerate(pod.containers):
            listed = f"containers[{position}]" if position < count else f"initContainers[{position - count}]"
            field = f"{place.spec}.{listed}"
            if container.name in names:
                raise PodFieldError(
                    f"{field}.name", f"{quote(container.name)} is also the name of another container; use a unique name"
                )
            names.add(container.name)
            if other := cgroups.get(container.cgroup):
                raise PodFieldError(
                    f"{field}.cgroup", f"{container.cgroup} is already the cgroup of {other}; list it once"
                )
            cgroups[container.cgroup] = field
    for path, field in cgroups.items():
        for ancestor in _ancestors(path):
            if other := cgroups.get(ancestor):
                raise PodFieldError(f"{field}.cgroup", f"{path} is inside the cgroup of {other}; list one of the two")


def _ancestors(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path
