"""Pods from a YAML file that a person or a program writes: strict, and read again when it changes.

At the start a file that cannot hold is refused with its name, the field and the remedy. Later on the last good pods
stay in force and the error is reported with every snapshot until the file is good again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from decimal import ROUND_CEILING, Decimal
from pathlib import Path
from typing import Any

import msgspec

from agent.sense.documents import LARGEST_BYTES, DocumentError, check
from agent.smallfile import read_small
from api.pods import Container, Pod, parse_quantity
from api.ports import Unavailable
from api.qos import qos_level

SETTLED_NS = 100_000_000
"""A file that was written so short a time before it was read is read again: its time stamp may not tell of a next write."""
LONGEST_NAME = 253
LONGEST_PATH = 4095
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?", re.ASCII)
_WHERE = re.compile(r" - at `(?:key in )?\$\.?(?P<field>[^`]*)`$")
_MISSING = re.compile(r"Object missing required field `(?P<field>\w+)`")


class PodsError(ValueError):
    """The file cannot hold; the message names file, field and remedy."""


class _Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cpu: str | int | float | None = None
    memory: str | int | float | None = None


class _Requirements(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    requests: _Resources = _Resources()
    limits: _Resources = _Resources()


class _Container(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cgroup: str
    name: str | None = None
    resources: _Requirements = _Requirements()


class _Pod(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    containers: list[_Container]
    namespace: str = "default"
    annotations: dict[str, Any] = {}


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pods: list[_Pod]


class StaticPods:
    """A PodSource (api.ports) over one file. Raises PodsError when made from a file that cannot hold."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._signature: tuple[int, ...] = ()
        self._error = ""
        self._pods = self._load()

    def read(self) -> tuple[Pod, ...]:
        """The file's pods. Raises Unavailable while the file cannot be read or cannot hold."""
        if self._changed():
            try:
                self._pods, self._error = self._load(), ""
            except PodsError as error:
                self._error = str(error)
        if self._error:
            raise Unavailable(self._error, "mend the file; until then the pods that it listed before stay in force")
        return self._pods

    def _changed(self) -> bool:
        return not self._signature or self._stat() != self._signature

    def _stat(self) -> tuple[int, ...]:
        try:
            found = self._path.stat()
        except OSError:
            return ()
        if time.time_ns() - found.st_mtime_ns < SETTLED_NS:
            return ()
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def _load(self) -> tuple[Pod, ...]:
        # The signature is taken before the text: what is written in between is seen as a change.
        self._signature = self._stat()
        try:
            content = read_small(self._path, LARGEST_BYTES)
        except OSError as error:
            raise PodsError(
                f"{self._path}: cannot be read: {error.strerror}; name an existing file with --pods"
            ) from None
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise PodsError(f"{self._path}: not UTF-8 text at byte {error.start}; is this the right file?") from None
        return parse_pods(text, str(self._path))


class NoPods:
    """A PodSource of a node on which nobody says what is a pod: everything is watched, nothing is managed."""

    def read(self) -> tuple[Pod, ...]:
        return ()


def parse_pods(text: str, source: str) -> tuple[Pod, ...]:
    """Pods from YAML; `source` names the text in errors. Raises PodsError."""
    try:
        check(text)
        document = msgspec.yaml.decode(text)
    except DocumentError as error:
        raise PodsError(f"{source}: {error}") from None
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        # PyYAML builds dates and numbers, and lets their own errors out.
        raise PodsError(f"{source}: a value cannot be read: {' '.join(str(error).split())}") from None
    if document is None:
        raise PodsError(f"{source}: empty; write `pods: []` where there are none")
    try:
        file = msgspec.convert(document, _File)
    except msgspec.ValidationError as error:
        raise PodsError(f"{source}: {_explained(error)}") from None
    try:
        pods = tuple(_pod(pod, f"pods[{index}]") for index, pod in enumerate(file.pods))
        _check_unique(pods)
    except _FieldError as error:
        raise PodsError(f"{source}: {error}") from None
    return pods


class _FieldError(ValueError):
    """`field: reason; remedy`."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")


def _explained(error: msgspec.ValidationError) -> str:
    text = str(error)
    match = _WHERE.search(text)
    field = (match["field"] if match else "") or "top level"
    reason = text[: match.start()] if match else text
    if missing := _MISSING.search(reason):
        field = f"{field}.{missing['field']}".removeprefix("top level.")
        return f"{field}: is missing; write it, docs/operations.md shows a whole file"
    if reason.startswith("Expected `str`") and not reason.endswith("`null`"):
        return f"{field}: is not text; write it in quotes"
    return f"{field}: {reason[:1].lower()}{reason[1:]}; docs/operations.md shows a whole file"


def _pod(pod: _Pod, where: str) -> Pod:
    namespace, name = _name(pod.namespace, f"{where}.namespace"), _name(pod.name, f"{where}.name")
    annotations = _annotations(pod.annotations, f"{where}.annotations")
    try:
        qos = qos_level(annotations)
    except ValueError as error:
        raise _FieldError(f"{where}.annotations", str(error).removeprefix("annotation ")) from None
    if not pod.containers:
        raise _FieldError(f"{where}.containers", "is empty; list at least one with its cgroup")
    alone = len(pod.containers) == 1
    return Pod(
        uid=f"{namespace}/{name}",
        namespace=namespace,
        name=name,
        qos=qos,
        containers=tuple(
            _container(container, name if alone else None, f"{where}.containers[{index}]")
            for index, container in enumerate(pod.containers)
        ),
        annotations=annotations,
    )


def _container(container: _Container, default_name: str | None, where: str) -> Container:
    name = container.name if container.name is not None else default_name
    if name is None:
        raise _FieldError(f"{where}.name", "is missing; a pod of several containers names each")
    requests, limits = container.resources.requests, container.resources.limits
    path = f"{where}.resources"
    cpu_request = _quantity(requests.cpu, f"{path}.requests.cpu")
    cpu_limit = _quantity(limits.cpu, f"{path}.limits.cpu")
    memory_request = _quantity(requests.memory, f"{path}.requests.memory")
    memory_limit = _quantity(limits.memory, f"{path}.limits.memory")
    for resource, request, limit in (("cpu", cpu_request, cpu_limit), ("memory", memory_request, memory_limit)):
        if limit is not None and limit == 0:
            raise _FieldError(
                f"{path}.limits.{resource}", "is 0, which nothing can run with; leave it out for no limit"
            )
        if request is not None and limit is not None and request > limit:
            raise _FieldError(
                f"{path}.requests.{resource}", f"{request} is more than the limit {limit}; raise the limit"
            )
    return Container(
        name=_name(name, f"{where}.name"),
        cgroup=_cgroup(container.cgroup, f"{where}.cgroup"),
        cpu_request_cores=None if cpu_request is None else float(cpu_request),
        cpu_limit_cores=None if cpu_limit is None else float(cpu_limit),
        memory_request_bytes=_whole(memory_request),
        memory_limit_bytes=_whole(memory_limit),
    )


def _name(name: str, field: str) -> str:
    if len(name) > LONGEST_NAME or not _NAME.fullmatch(name):
        raise _FieldError(
            field, f"{name[:80]!r} is no name; use letters, digits, '-', '.' and '_', at most {LONGEST_NAME}"
        )
    return name


def _annotations(annotations: dict[str, Any], where: str) -> dict[str, str]:
    for key, value in annotations.items():
        if not isinstance(value, str):
            raise _FieldError(f"{where}[{key!r}]", f"{value!r:.80} is not text; write it in quotes")
    return annotations


def _cgroup(path: str, field: str) -> str:
    shown = repr(path[:80])
    if not path.startswith("/") or path == "/":
        raise _FieldError(field, f"{shown} must begin with / and name a cgroup below the root, like /web")
    if any(part in ("", ".", "..") for part in path.split("/")[1:]):
        raise _FieldError(
            field, f"{shown} has an empty part, '.' or '..', or ends in /; write it plainly, like /web/app"
        )
    if not path.isprintable() or len(path.encode(errors="replace")) > LONGEST_PATH:
        raise _FieldError(field, f"{shown} holds control characters or is too long; write a plain path, like /web")
    return path


def _quantity(value: str | float | None, field: str) -> Decimal | None:
    if value is None:
        return None
    text = f"{value:.9f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    try:
        return parse_quantity(text)
    except ValueError as error:
        raise _FieldError(field, str(error)) from None


def _whole(quantity: Decimal | None) -> int | None:
    return None if quantity is None else int(quantity.to_integral_value(ROUND_CEILING))


def _check_unique(pods: tuple[Pod, ...]) -> None:
    keys: dict[str, str] = {}
    cgroups: dict[str, str] = {}
    for index, pod in enumerate(pods):
        where = f"pods[{index}]"
        if other := keys.get(pod.key):
            raise _FieldError(f"{where}.name", f"{pod.key} is {other} already; give it another name or namespace")
        keys[pod.key] = where
        names: set[str] = set()
        for position, container in enumerate(pod.containers):
            field = f"{where}.containers[{position}]"
            if container.name in names:
                raise _FieldError(
                    f"{field}.name", f"{container.name!r} is the name of another container; name each once"
                )
            names.add(container.name)
            if other := cgroups.get(container.cgroup):
                raise _FieldError(f"{field}.cgroup", f"{container.cgroup} is that of {other} already; list it once")
            cgroups[container.cgroup] = field
    for path, field in cgroups.items():
        for ancestor in _ancestors(path):
            if other := cgroups.get(ancestor):
                raise _FieldError(f"{field}.cgroup", f"{path} is inside that of {other}; manage one of the two")


def _ancestors(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path
