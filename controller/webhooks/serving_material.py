"""The certificate of the webhooks as its Secret has it: decoding, verification, and the TLS context that serves it.
Verification is a TLS handshake in memory, so that what it accepts is what the API server's client accepts.
"""

from __future__ import annotations

import base64
import binascii
import re
import ssl
from collections.abc import Mapping
from typing import Any

import msgspec

from controller.webhooks.certificate_plan import CertificateFacts, ValidityPeriod
from controller.webhooks.openssl import KeyPair, descriptor_path, memory_files

AUTHORITIES, AUTHORITY_KEY, CERTIFICATE, PRIVATE_KEY = "ca.crt", "ca.key", "tls.crt", "tls.key"
"""Keys of the Secret, with cert-manager's names; cert-manager's Secrets have no `ca.key`."""
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)
_NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME: validity is compared with the time that the caller gives (x509_vfy.h)."""


class ServingMaterial(msgspec.Struct, frozen=True):
    """Certificate, its private key and the authorities that clients trust, as PEM text; empty if missing."""

    authorities: tuple[str, ...] = ()
    """The newest one first."""
    authority_key: str = ""
    """Private key of the newest authority."""
    certificate: str = ""
    key: str = ""

    @property
    def bundle(self) -> str:
        return "".join(self.authorities)

    @property
    def ca_bundle(self) -> str:
        """Return `caBundle` of a webhook configuration: the bundle in base64."""
        return _encode(self.bundle)

    @property
    def authority(self) -> KeyPair:
        """Return the newest authority, which signs."""
        return KeyPair(self.authorities[0], self.authority_key)


def decode_material(data: Mapping[str, str]) -> ServingMaterial:
    """Decode the data of a Secret. Values that are no base64 or no ASCII text count as missing."""
    texts = {name: _decode(data.get(name, "")) for name in (AUTHORITIES, AUTHORITY_KEY, CERTIFICATE, PRIVATE_KEY)}
    blocks = tuple(f"{block.strip()}\n" for block in _PEM.findall(texts[AUTHORITIES]))
    return ServingMaterial(blocks, texts[AUTHORITY_KEY], texts[CERTIFICATE], texts[PRIVATE_KEY])


def encode_material(material: ServingMaterial) -> dict[str, str]:
    """Return the data of a Secret."""
    return {
        AUTHORITIES: _encode(material.bundle),
        AUTHORITY_KEY: _encode(material.authority_key),
        CERTIFICATE: _encode(material.certificate),
        PRIVATE_KEY: _encode(material.key),
    }


def serving_context(material: ServingMaterial) -> ssl.SSLContext:
    """Return the TLS context of a server. Raises ssl.SSLError if certificate and key are invalid or do not match."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # OpenSSL reads certificates and keys from files only.
    with memory_files([material.certificate, material.key]) as (certificate, key):
        # Without the callback, OpenSSL asks for the password of an encrypted key on the terminal.
        context.load_cert_chain(descriptor_path(certificate), descriptor_path(key), password=lambda: "")
    return context


def examine_material(material: ServingMaterial, name: str) -> CertificateFacts:
    """Verify that a client with these trusted authorities accepts the certificate for this DNS name, at any time."""
    can_sign = _can_sign(material)
    authorities = tuple(period for block in material.authorities if (period := _authority_period(block)) is not None)
    facts = CertificateFacts(authorities, None, signed_by_newest=False, can_sign=can_sign)
    if not authorities or len(authorities) != len(material.authorities):
        return msgspec.structs.replace(facts, authorities=(), problem=f"{AUTHORITIES} has no valid authority")
    try:
        serving = _period(_peer_certificate(material, material.bundle, name))
    except (ssl.SSLError, ValueError) as error:
        return msgspec.structs.replace(facts, problem=f"{CERTIFICATE}: {error}")
    try:
        _peer_certificate(material, material.authorities[0], name)
    except (ssl.SSLError, ValueError):
        return msgspec.structs.replace(facts, serving=serving)
    return msgspec.structs.replace(facts, serving=serving, signed_by_newest=True)


def _can_sign(material: ServingMaterial) -> bool:
    """Return whether the Secret has the private key of the newest authority, rather than another key or other data."""
    if not (material.authorities and material.authority_key):
        return False
    try:
        serving_context(ServingMaterial(certificate=material.authorities[0], key=material.authority_key))
    except (ssl.SSLError, ValueError):
        return False
    return True


def _authority_period(block: str) -> ValidityPeriod | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=block)
        listed = context.get_ca_certs()
        return _period(listed[0]) if listed else None
    except (ssl.SSLError, ValueError):
        return None


def _peer_certificate(material: ServingMaterial, trusted: str, name: str) -> Mapping[str, Any]:
    """Return the certificate that a client receives in a handshake in memory. Raises ssl.SSLError and ValueError."""
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.load_verify_locations(cadata=trusted)
    client_context.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=name)
    server = serving_context(material).wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):  # TLS 1.3 needs two flights in each direction
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return client.getpeercert() or {}


def _period(certificate: Mapping[str, Any]) -> ValidityPeriod:
    return ValidityPeriod(
        ssl.cert_time_to_seconds(str(certificate["notBefore"])), ssl.cert_time_to_seconds(str(certificate["notAfter"]))
    )


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decode(text: str) -> str:
    try:
        return base64.b64decode(text, validate=True).decode("ascii")  # as PEM is
    except (binascii.Error, ValueError):
        return ""
