"""Reviews of the API server, and the objects that its patches make."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from typing import Any

from controller.webhooks.admission_review import PatchOperation, ReviewRequest, decode_review

REVIEW_UID = "705ab4f5-6393-11e8-b7cc-42010a800002"


def review_body(
    object_: object,
    *,
    operation: str = "CREATE",
    namespace: str = "batch",
    resource: tuple[str, str, str] = ("", "v1", "pods"),
    old: object = None,
    uid: str = REVIEW_UID,
) -> bytes:
    """Return the body of a review as the API server sends it."""
    group, version, plural = resource
    request = {
        "uid": uid, "operation": operation, "namespace": namespace, "object": object_, "oldObject": old,
        "kind": {"group": group, "version": version, "kind": "Any"},
        "resource": {"group": group, "version": version, "resource": plural},
        "userInfo": {"username": "system:serviceaccount:kube-system:replicaset-controller"}, "dryRun": False,
    }  # fmt: skip
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()


def a_review(object_: object, **options: Any) -> ReviewRequest:
    return decode_review(review_body(object_, **options))


def apply_patch(object_: Any, operations: Iterable[PatchOperation]) -> Any:
    """Return a copy of the object after a JSON patch of `add` and `remove`."""
    result = copy.deepcopy(object_)
    for operation in operations:
        *parents, last = operation.path.lstrip("/").split("/")
        target = result
        for name in parents:
            target = target[int(name)] if isinstance(target, list) else target[name]
        if operation.op == "add":
            target[last] = operation.value
        else:
            del target[last]
    return result
