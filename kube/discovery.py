"""Whether the API server has a kind at all, in its own words: a 404 alone may be a proxy's."""

from __future__ import annotations

from typing import Any

import msgspec

from kube.client import Client
from kube.objects import Resource


class _Named(msgspec.Struct, frozen=True):
    name: str = ""


class _Resources(msgspec.Struct, frozen=True):
    kind: str
    resources: tuple[_Named, ...] = ()


class _Version(msgspec.Struct, frozen=True, rename="camel"):
    group_version: str = ""


class _Group(msgspec.Struct, frozen=True):
    versions: tuple[_Version, ...] = ()


class _Groups(msgspec.Struct, frozen=True):
    kind: str
    groups: tuple[_Group, ...] = ()


async def lacks(client: Client, resource: Resource[Any]) -> bool:
    """Whether it says that it has no such kind; False too where it says nothing, or nobody knows who answered. Raises
    Unreachable."""
    if not resource.group:
        return False  # those it has, whatever is said
    answer = await client.raw(f"/apis/{resource.api_version}", "apis")
    try:
        if answer.status == 200:
            there = msgspec.json.decode(answer.body, type=_Resources)
            return there.kind == "APIResourceList" and resource.plural not in {one.name for one in there.resources}
        if answer.status != 404:
            return False
        answer = await client.raw("/apis", "apis")
        if answer.status != 200:
            return False
        groups = msgspec.json.decode(answer.body, type=_Groups)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    known = {version.group_version for group in groups.groups for version in group.versions}
    return groups.kind == "APIGroupList" and resource.api_version not in known
