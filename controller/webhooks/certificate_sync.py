"""Keeps the Secret with the certificate, the certificate that this replica serves, and `caBundle` of the webhook configurations
consistent. Every replica does so, because every replica serves. Each write names the version that it replaces: after a conflict
the newer object arrives by the watch.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import msgspec

from api.interfaces import Unavailable
from common.throttled_log import ThrottledLog
from controller.webhooks.certificate_plan import (
    AUTHORITY_DAYS,
    CERTIFICATE_DAYS,
    CertificateFacts,
    CertificateStep,
    is_served,
    next_step,
)
from controller.webhooks.openssl import create_authority, create_certificate
from controller.webhooks.serving_material import (
    ServingMaterial,
    decode_material,
    encode_material,
    examine_material,
    serving_context,
)
from controller.webhooks.webhook_settings import WebhookSettings
from kube.client import KubeClient, ListScope
from kube.errors import ApiError, ApiUnreachable
from kube.informer import Informer
from kube.objects import PartialObjectMetadata, ResourceType

log = logging.getLogger(__name__)

SYNC_INTERVAL_S = 10.0
"""Time between two checks of the validity periods; changes of the objects are handled at once."""


class CertificateSecret(PartialObjectMetadata, frozen=True, kw_only=True):
    """Secret with the certificate."""

    data: Mapping[str, str] | None = None


class WebhookConfiguration(PartialObjectMetadata, frozen=True, kw_only=True):
    """MutatingWebhookConfiguration or ValidatingWebhookConfiguration. Its webhooks are written back with all their fields."""

    webhooks: tuple[Mapping[str, Any], ...] | None = None


ADMISSION_GROUP = "admissionregistration.k8s.io"
SECRETS = ResourceType("", "v1", "secrets", "Secret", CertificateSecret, namespaced=True)
WEBHOOK_CONFIGURATIONS = tuple(
    ResourceType(ADMISSION_GROUP, "v1", f"{kind.lower()}s", kind, WebhookConfiguration)
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
)
ServeFunction = Callable[[ssl.SSLContext], Awaitable[None]]


class CertificateSync:
    """Informers of the objects, and the loop that keeps them in step. `serve` starts the server or changes its certificate."""

    def __init__(self, client: KubeClient, settings: WebhookSettings, namespace: str, serve: ServeFunction) -> None:
        self._client, self._settings, self._serve = client, settings, serve
        self._key, self._name = f"{namespace}/{settings.secret}", f"{settings.service}.{namespace}.svc"
        self._secrets = Informer(
            client, SECRETS, ListScope(namespace=namespace, fields=f"metadata.name={settings.secret}")
        )
        by_name = ListScope(fields=f"metadata.name={settings.configuration}")
        self._configurations = [Informer(client, resource, by_name) for resource in WEBHOOK_CONFIGURATIONS]
        self._changed = asyncio.Event()
        for informer in self:
            informer.listen(lambda _change: self._changed.set())
        self._material, self._facts = ServingMaterial(), CertificateFacts((), None, signed_by_newest=False)
        self._served = ServingMaterial()
        self._throttled_log = ThrottledLog(log)

    def __iter__(self) -> Iterator[Informer[Any]]:
        yield self._secrets
        yield from self._configurations

    @property
    def expires_at_s(self) -> float | None:
        """Return the time at which the certificate in the Secret expires, in seconds since the epoch; None without a valid
        certificate."""
        return None if self._facts.serving is None else self._facts.serving.ends_s

    async def run(self) -> None:
        """Run until cancelled. A request that fails is repeated after SYNC_INTERVAL_S."""
        for informer in self:
            await informer.synced.wait()
        while True:
            self._changed.clear()
            try:
                await self._sync(time.time())
                self._throttled_log.clear()
            except (ApiError, ApiUnreachable) as error:
                if not (isinstance(error, ApiError) and error.conflict):
                    self._throttled_log.warn(f"certificate of the webhooks: {error}")
            except Unavailable as error:
                self._throttled_log.warn(f"certificate of the webhooks: {error}: {error.remedy}")
            try:
                async with asyncio.timeout(SYNC_INTERVAL_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _sync(self, now_s: float) -> None:
        secret = self._secrets.store.get(self._key)
        if secret is None:
            raise Unavailable(f"Secret {self._key} does not exist", "create it, empty, by `helm upgrade` of the chart")
        material = decode_material(secret.data or {})
        if material != self._material:
            self._material, self._facts = material, examine_material(material, self._name)
        if self._settings.cert_manager:
            if self._facts.serving is None:
                raise Unavailable(f"Secret {self._key}: {self._facts.problem}", f"issue a certificate for {self._name}")
        elif (step := next_step(self._facts, now_s, published=self._published())) is not CertificateStep.NONE:
            await self._take(step, secret, now_s)
            return
        # Clients have to trust the authority before its certificate is served.
        if not await self._publish(secret):
            return
        if self._material != self._served and is_served(self._facts, now_s, serves=self._serves_trusted()):
            await self._serve(serving_context(self._material))
            self._served = self._material

    def _serves_trusted(self) -> bool:
        """Return whether clients that trust the authorities of the Secret accept the certificate that is served now."""
        served = msgspec.structs.replace(self._material, certificate=self._served.certificate, key=self._served.key)
        return bool(self._served.certificate) and examine_material(served, self._name).serving is not None

    def _published(self) -> bool:
        return not any(self._outdated())

    def _outdated(self) -> Iterator[tuple[ResourceType[WebhookConfiguration], str, WebhookConfiguration]]:
        for informer in self._configurations:
            for key, configuration in informer.store.items():
                bundles = {
                    webhook.get("clientConfig", {}).get("caBundle", "") for webhook in configuration.webhooks or ()
                }
                if bundles - {self._material.ca_bundle}:
                    yield informer.resource, key, configuration

    async def _publish(self, secret: CertificateSecret) -> bool:
        """Write the bundle to the configurations with another bundle. Returns False if the Secret has changed meanwhile."""
        outdated = list(self._outdated())
        if outdated:
            # A replica whose watch is late must not write an earlier bundle.
            newest = (await self._client.list(SECRETS, self._secrets.scope)).objects.get(self._key)
            if newest is None or newest.metadata.resource_version != secret.metadata.resource_version:
                return False
        for resource, key, configuration in outdated:
            webhooks = [
                {**webhook, "clientConfig": {**webhook.get("clientConfig", {}), "caBundle": self._material.ca_bundle}}
                for webhook in configuration.webhooks or ()
            ]
            version = {"resourceVersion": configuration.metadata.resource_version}
            await self._client.merge_patch(resource, key, {"metadata": version, "webhooks": webhooks})
            log.info("%s %s: wrote caBundle", resource.kind, key)
        return True

    async def _take(self, step: CertificateStep, secret: CertificateSecret, now_s: float) -> None:
        material = await self._renewed(step, now_s)
        log.info(
            "certificate of the webhooks: %s (%s)",
            step.name.lower().replace("_", " "),
            self._facts.problem or "renewal",
        )
        version = {"resourceVersion": secret.metadata.resource_version}
        await self._client.merge_patch(SECRETS, self._key, {"metadata": version, "data": encode_material(material)})

    async def _renewed(self, step: CertificateStep, now_s: float) -> ServingMaterial:
        """Return the material after a step, without authorities that have expired."""
        old = self._material
        valid = tuple(
            block
            for block, period in zip(old.authorities, self._facts.authorities, strict=False)
            if period.ends_s > now_s
        )
        if step is CertificateStep.RENEW_CERTIFICATE:
            pair = await create_certificate(old.authority, [self._name], CERTIFICATE_DAYS)
            return ServingMaterial(valid, old.authority_key, pair.certificate, pair.key)
        # Each authority has a name of its own, by which clients find the issuer of a certificate in the bundle.
        authority = await create_authority(f"dioptase-webhooks-{uuid.uuid4().hex[:8]}", AUTHORITY_DAYS)
        bundle = (authority.certificate, *valid)
        if step is CertificateStep.ADD_AUTHORITY:
            return ServingMaterial(bundle, authority.key, old.certificate, old.key)
        pair = await create_certificate(authority, [self._name], CERTIFICATE_DAYS)
        return ServingMaterial(bundle, authority.key, pair.certificate, pair.key)
