"""Whose token it is, and what that account may do: the two questions that a server behind the cluster's accounts has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from api.ports import Unavailable
from kube.client import Client
from kube.errors import ApiError, Unreachable
from kube.objects import Bare, Resource


class _User(msgspec.Struct, frozen=True):
    username: str = ""
    uid: str = ""
    groups: tuple[str, ...] | None = None
    extra: Mapping[str, tuple[str, ...]] | None = None


class _Known(msgspec.Struct, frozen=True):
    authenticated: bool = False
    user: _User = _User()


class _Allowed(msgspec.Struct, frozen=True):
    allowed: bool = False


class TokenReview(Bare, frozen=True, kw_only=True):
    status: _Known = _Known()


class AccessReview(Bare, frozen=True, kw_only=True):
    status: _Allowed = _Allowed()


TOKENS = Resource("authentication.k8s.io", "v1", "tokenreviews", "TokenReview", TokenReview)
ACCESS = Resource("authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", AccessReview)


async def review(client: Client, token: str, path: str) -> bool | None:
    """Whether the account of this token may get that path of no resource; None: it is nobody's.

    Raises Unavailable where the API server does not say, or not to us.
    """
    try:
        known = (await client.create(TOKENS, _body(TOKENS, {"token": token}))).status
        if not known.authenticated:
            return None
        user = known.user
        spec: dict[str, Any] = {"user": user.username, "nonResourceAttributes": {"path": path, "verb": "get"}}
        spec |= {"uid": user.uid} if user.uid else {}
        spec |= {"groups": user.groups} if user.groups else {}
        spec |= {"extra": user.extra} if user.extra else {}
        return (await client.create(ACCESS, _body(ACCESS, spec))).status.allowed
    except ApiError as error:
        remedy = "bind this program's account to the ClusterRole system:auth-delegator"
        raise Unavailable(f"the API server refused a review: {error}", remedy) from error
    except Unreachable as error:
        raise Unavailable(f"the API server is not there: {error}", "look at the API server") from error


def _body(resource: Resource[Any], spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": resource.api_version, "kind": resource.kind, "spec": spec}
