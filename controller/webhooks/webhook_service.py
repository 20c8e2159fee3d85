"""Composition of the webhooks: informers of the objects that they read, their functions, certificate and server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from api.colocation_profile import COLOCATION_PROFILE_KIND, PROFILE_GROUP, PROFILE_VERSION, ColocationProfile
from common.http.listener import HttpListener
from controller.reconcile import MetricValues
from controller.webhooks.admission_review import ReviewRequest, ReviewResult
from controller.webhooks.certificate_sync import CertificateSync
from controller.webhooks.colocation_profiles import PodProfile, parse_koordinator_profile, parse_profile
from controller.webhooks.config_validation import ConfigChecker, validate_config
from controller.webhooks.node_status_mutation import mutate_node_status
from controller.webhooks.pod_mutation import mutate_pod
from controller.webhooks.pod_validation import validate_pod
from controller.webhooks.vpa_validation import validate_vpa
from controller.webhooks.webhook_server import (
    KEEPALIVE_S,
    MAX_CONNECTIONS,
    ReviewFunction,
    ReviewsNotReady,
    WebhookApplication,
)
from controller.webhooks.webhook_settings import WebhookSettings
from kube.client import KubeClient
from kube.informer import Informer, describe_unsynced
from kube.objects import PartialObjectMetadata, ResourceType, UnstructuredObject
from kube.watch import ObjectChange

log = logging.getLogger(__name__)

LINGER_S = 5.0
"""Time for which a replica still answers after SIGTERM, because kube-proxy and API servers still use its address."""
NAMESPACES = ResourceType("", "v1", "namespaces", "Namespace", PartialObjectMetadata)
COLOCATION_PROFILES = ResourceType(
    PROFILE_GROUP, PROFILE_VERSION, COLOCATION_PROFILE_KIND.plural, COLOCATION_PROFILE_KIND.kind, ColocationProfile
)
KOORDINATOR_PROFILES = ResourceType(
    "config.koordinator.sh", "v1alpha1", "clustercolocationprofiles", "ClusterColocationProfile", UnstructuredObject
)
VPAS = ResourceType(
    "autoscaling.katalyst.kubewharf.io",
    "v1alpha2",
    "katalystverticalpodautoscalers",
    "KatalystVerticalPodAutoscaler",
    UnstructuredObject,
    namespaced=True,
)
INVALID_PROFILES_METRIC = "dioptase_webhook_invalid_profiles"
EXPIRY_METRIC = "dioptase_webhook_certificate_expiry_timestamp_seconds"


class WebhookService:
    """The webhooks of one replica, which serves them whether it leads or not."""

    def __init__(
        self,
        client: KubeClient,
        settings: WebhookSettings,
        namespace: str,
        hosts: Sequence[str],
        metrics: MetricValues,
        check_config: ConfigChecker,
    ) -> None:
        """`namespace` is the controller's own; `check_config` are the agents' parsers of configuration."""
        self._settings, self._hosts, self._metrics = settings, hosts, metrics
        self._informers: list[Informer[Any]] = []
        webhooks: dict[str, ReviewFunction] = {
            "pod-validation": validate_pod,
            "node-overcommit": mutate_node_status,
            "config-validation": partial(validate_config, check=check_config),
        }
        if "pod-mutation" in settings.serve:
            webhooks["pod-mutation"] = self._pod_mutation(client)
        if "vpa-validation" in settings.serve:
            webhooks["vpa-validation"] = self._vpa_validation(client)
        webhooks = {name: webhooks[name] for name in settings.serve}
        self._application = WebhookApplication(webhooks, metrics)
        self._listener = HttpListener(
            self._application.build(), self._application.body_problem, MAX_CONNECTIONS, keepalive_timeout=KEEPALIVE_S
        )
        self._listens = False
        self._certificates = CertificateSync(client, settings, namespace, self._serve)

    def __iter__(self) -> Iterator[Informer[Any]]:
        yield from self._informers
        yield from self._certificates

    def unready(self) -> str:
        """Why this replica cannot answer reviews: the port is closed, or objects are not listed yet. Empty if it can."""
        if not self._listens:
            return "webhooks: no certificate is served yet"
        return describe_unsynced(self._informers)

    async def run(self) -> None:
        """Serve until cancelled, and for LINGER_S longer."""
        try:
            async with asyncio.TaskGroup() as group:
                for informer in self:
                    group.create_task(informer.run())
                group.create_task(self._certificates.run())
        finally:
            self._application.is_draining = True
            if self._listens:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(LINGER_S)
            await self._listener.close()

    async def _serve(self, tls: ssl.SSLContext) -> None:
        if self._listens:
            await self._listener.renew(tls)
        else:
            bound = await self._listener.open(self._hosts, self._settings.port, "webhooks.port with", tls)
            self._listens = True
            log.info("webhooks at %s", ", ".join(f"{host}:{port}" for host, port in bound))
        if (ends_s := self._certificates.expires_at_s) is not None:
            self._metrics.set(EXPIRY_METRIC, [((), ends_s)])

    def _watch(self, informer: Informer[Any]) -> Informer[Any]:
        self._informers.append(informer)
        return informer

    def _pod_mutation(self, client: KubeClient) -> ReviewFunction:
        namespaces = self._watch(Informer(client, NAMESPACES))
        profiles = PodProfiles(
            (self._watch(Informer(client, COLOCATION_PROFILES)), parse_profile),
            (self._watch(Informer(client, KOORDINATOR_PROFILES)), parse_koordinator_profile),
            metrics=self._metrics,
        )

        def review(request: ReviewRequest) -> ReviewResult:
            self._require_lists()
            namespace = namespaces.store.get(request.namespace)
            return mutate_pod(request, profiles.profiles, namespace.metadata.labels if namespace else {})

        return review

    def _vpa_validation(self, client: KubeClient) -> ReviewFunction:
        vpas = self._watch(Informer(client, VPAS))

        def review(request: ReviewRequest) -> ReviewResult:
            self._require_lists()
            return validate_vpa(request, vpas.store.values())

        return review

    def _require_lists(self) -> None:
        if missing := describe_unsynced(self._informers):
            raise ReviewsNotReady(missing)


class PodProfiles:
    """Valid profiles of all kinds, each parsed when it changes."""

    def __init__(self, *kinds: tuple[Informer[Any], Callable[[Any], PodProfile]], metrics: MetricValues) -> None:
        self._metrics = metrics
        self._by_object: dict[tuple[str, str], PodProfile] = {}
        self._problems: dict[tuple[str, str], str] = {}
        self._current: tuple[PodProfile, ...] | None = ()
        for informer, parse in kinds:
            informer.listen(partial(self._apply, informer.resource.kind, parse))

    @property
    def profiles(self) -> tuple[PodProfile, ...]:
        """Return all valid profiles."""
        if self._current is None:
            self._current = tuple(self._by_object.values())
        return self._current

    def _apply(self, kind: str, parse: Callable[[Any], PodProfile], change: ObjectChange[Any]) -> None:
        """Parse the new version of a profile. An invalid one has no effect, and each problem is logged once."""
        key = (kind, change.key)
        self._by_object.pop(key, None)
        former, problem = self._problems.pop(key, ""), ""
        if change.new is not None:
            try:
                self._by_object[key] = parse(change.new)
            except ValueError as error:
                problem = self._problems[key] = str(error)
        if problem and problem != former:
            log.warning("%s %s has no effect: %s", *key, problem)
        self._current = None
        self._metrics.set(INVALID_PROFILES_METRIC, [(each, 1.0) for each in self._problems])
