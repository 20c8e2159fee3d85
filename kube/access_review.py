"""Reviews bearer tokens by the API server: the account of a token, and whether it may get a path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from api.interfaces import Unavailable
from kube.client import KubeClient
from kube.errors import ApiError, ApiUnreachable
from kube.objects import PartialObjectMetadata, ResourceType


class _User(msgspec.Struct, frozen=True):
    username: str = ""
    uid: str = ""
    groups: tuple[str, ...] | None = None
    extra: Mapping[str, tuple[str, ...]] | None = None


class _TokenReviewStatus(msgspec.Struct, frozen=True):
    authenticated: bool = False
    user: _User = _User()


class _AccessReviewStatus(msgspec.Struct, frozen=True):
    allowed: bool = False


class TokenReview(PartialObjectMetadata, frozen=True, kw_only=True):
    status: _TokenReviewStatus = _TokenReviewStatus()


class AccessReview(PartialObjectMetadata, frozen=True, kw_only=True):
    status: _AccessReviewStatus = _AccessReviewStatus()


TOKEN_REVIEWS = ResourceType("authentication.k8s.io", "v1", "tokenreviews", "TokenReview", TokenReview)
SUBJECT_ACCESS_REVIEWS = ResourceType(
    "authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", AccessReview
)


async def review_token(client: KubeClient, token: str, path: str) -> bool | None:
    """Whether the account of this token may get that nonResourceURL; None for an unknown token.

    Raises Unavailable if the API server does not respond, or if this program may not create reviews.
    """
    try:
        review = (await client.create(TOKEN_REVIEWS, _review_body(TOKEN_REVIEWS, {"token": token}))).status
        if not review.authenticated:
            return None
        user = review.user
        spec: dict[str, Any] = {"user": user.username, "nonResourceAttributes": {"path": path, "verb": "get"}}
        spec |= {"uid": user.uid} if user.uid else {}
        spec |= {"groups": user.groups} if user.groups else {}
        spec |= {"extra": user.extra} if user.extra else {}
        return (await client.create(SUBJECT_ACCESS_REVIEWS, _review_body(SUBJECT_ACCESS_REVIEWS, spec))).status.allowed
    except ApiError as error:
        remedy = "bind this program's account to the ClusterRole system:auth-delegator"
        raise Unavailable(f"the API server refused a review: {error}", remedy) from error
    except ApiUnreachable as error:
        raise Unavailable(f"the API server is not reachable: {error}", "check the API server") from error


def _review_body(resource: ResourceType[Any], spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": resource.api_version, "kind": resource.kind, "spec": spec}
