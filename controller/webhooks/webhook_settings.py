"""Settings of the webhooks."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

WebhookName = Literal["pod-mutation", "pod-validation", "node-overcommit", "config-validation", "vpa-validation"]
ObjectName = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]


class WebhookSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Webhooks that every replica serves, and the objects that make the API server call them."""

    serve: tuple[WebhookName, ...] = ()
    """Webhooks to serve; without any the port stays closed."""
    port: Annotated[int, Meta(ge=1, le=65_535)] = 9443
    """Port, at the addresses of `--listen`."""
    service: ObjectName = "dioptase-webhooks"
    """Name of the Service, in the namespace of the controller, that API servers call."""
    secret: ObjectName = "dioptase-webhooks"  # noqa: S105 - the name of an object
    """Name of the Secret with the certificate, in the namespace of the controller."""
    configuration: ObjectName = "dioptase-webhooks"
    """Name of the MutatingWebhookConfiguration and of the ValidatingWebhookConfiguration."""
    cert_manager: bool = False
    """Another program, such as cert-manager, writes the Secret; the controller only reads it."""
