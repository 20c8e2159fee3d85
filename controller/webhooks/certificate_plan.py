"""Decides when authority and certificate of the webhooks are renewed. Pure.

A renewal loses no request, because clients trust the new authority before a certificate is signed by it, and the old one until
it expires. The steps are states of the Secret, so that any replica can continue after another one.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec

DAY_S = 86_400
AUTHORITY_DAYS, CERTIFICATE_DAYS = 730, 90
RENEWED_SHARE = 1 / 3
"""Share of its lifetime before its end in which a certificate is renewed: a month for the server, eight for the authority."""
SETTLE_S = 30.0
"""Age at which a new authority signs, and a new certificate is served: API servers receive a new caBundle within a second by
their watch, and their clocks may be behind."""


class ValidityPeriod(msgspec.Struct, frozen=True):
    """Validity of a certificate in seconds since the epoch."""

    begins_s: float
    ends_s: float

    def needs_renewal(self, now_s: float) -> bool:
        return self.ends_s - now_s < (self.ends_s - self.begins_s) * RENEWED_SHARE


class CertificateFacts(msgspec.Struct, frozen=True):
    """Properties of the certificates in the Secret."""

    authorities: tuple[ValidityPeriod, ...]
    """The newest one first."""
    serving: ValidityPeriod | None
    """None if clients would refuse the certificate."""
    signed_by_newest: bool
    can_sign: bool = True
    """Whether the Secret has the newest authority's private key."""
    problem: str = ""


class CertificateStep(Enum):
    """Next change of the Secret."""

    NONE = auto()
    REPLACE_ALL = auto()
    """Create authority and certificate, because clients would accept none of those in the Secret."""
    ADD_AUTHORITY = auto()
    """Add a new authority in front of the bundle; the certificate stays."""
    RENEW_CERTIFICATE = auto()
    """Sign a new certificate by the newest authority."""


def next_step(facts: CertificateFacts, now_s: float, *, published: bool) -> CertificateStep:
    """Decide the next step. `published` is whether all webhook configurations have the bundle of the Secret."""
    if facts.serving is None or facts.serving.ends_s <= now_s or not facts.authorities:
        return CertificateStep.REPLACE_ALL
    newest = facts.authorities[0]
    if newest.ends_s <= now_s:
        return CertificateStep.REPLACE_ALL
    if newest.needs_renewal(now_s) or not facts.can_sign:
        return CertificateStep.ADD_AUTHORITY
    if not facts.signed_by_newest:
        settled = published and now_s - newest.begins_s >= SETTLE_S
        return CertificateStep.RENEW_CERTIFICATE if settled else CertificateStep.NONE
    return CertificateStep.RENEW_CERTIFICATE if facts.serving.needs_renewal(now_s) else CertificateStep.NONE


def is_served(facts: CertificateFacts, now_s: float, *, serves: bool) -> bool:
    """Return whether to serve this certificate from now on; a replica that serves none yet does not wait."""
    if facts.serving is None or facts.serving.ends_s <= now_s:
        return False
    return not serves or now_s - facts.serving.begins_s >= SETTLE_S
