"""Certificates of the webhooks: when they are renewed, and what openssl creates, verified by handshakes."""

from __future__ import annotations

import asyncio
import base64
import random
import ssl
import time

import msgspec
import pytest

from controller.webhooks.certificate_plan import (
    DAY_S,
    CertificateFacts,
    CertificateStep,
    ValidityPeriod,
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

NOW_S = 1_000_000_000.0
NAME = "dioptase-webhooks.dioptase.svc"


def period(age_days: float, left_days: float) -> ValidityPeriod:
    return ValidityPeriod(NOW_S - age_days * DAY_S, NOW_S + left_days * DAY_S)


@pytest.mark.parametrize(
    ("authorities", "serving", "newest", "published", "step"),
    [
        ((), None, False, True, CertificateStep.REPLACE_ALL),
        ((period(0, 730),), None, False, True, CertificateStep.REPLACE_ALL),
        ((period(0, 730),), period(91, -1), True, True, CertificateStep.REPLACE_ALL),
        ((period(731, -1),), period(1, 1), True, True, CertificateStep.REPLACE_ALL),
        ((period(1, 729),), period(1, 89), True, True, CertificateStep.NONE),
        ((period(60, 670),), period(59, 31), True, True, CertificateStep.NONE),
        ((period(60, 670),), period(61, 29), True, True, CertificateStep.RENEW_CERTIFICATE),
        ((period(480, 250),), period(1, 89), True, True, CertificateStep.NONE),
        ((period(490, 240),), period(1, 89), True, True, CertificateStep.ADD_AUTHORITY),
        ((period(0, 730), period(490, 240)), period(61, 29), False, True, CertificateStep.NONE),
        ((period(1, 729), period(490, 240)), period(1, 89), False, False, CertificateStep.NONE),
        ((period(1, 729), period(490, 240)), period(1, 89), False, True, CertificateStep.RENEW_CERTIFICATE),
    ],
)  # fmt: skip
def test_steps_of_a_rotation(
    authorities: tuple[ValidityPeriod, ...],
    serving: ValidityPeriod | None,
    step: CertificateStep,
    *,
    newest: bool,
    published: bool,
) -> None:
    """The authority after 487 of 730 days, the certificate after 60 of 90, and never before clients trust its issuer."""
    facts = CertificateFacts(authorities, serving, signed_by_newest=newest)
    assert next_step(facts, NOW_S, published=published) is step


def test_without_the_key_of_the_authority_there_is_a_new_one() -> None:
    facts = CertificateFacts((period(1, 729),), period(1, 89), signed_by_newest=True, can_sign=False)
    assert next_step(facts, NOW_S, published=True) is CertificateStep.ADD_AUTHORITY


@pytest.mark.parametrize(
    ("age_s", "serves", "served"), [(0, False, True), (0, True, False), (29, True, False), (31, True, True)]
)
def test_a_new_certificate_waits_for_clocks_that_are_behind(age_s: float, *, serves: bool, served: bool) -> None:
    facts = CertificateFacts((), ValidityPeriod(NOW_S - age_s, NOW_S + DAY_S), signed_by_newest=True)
    assert is_served(facts, NOW_S, serves=serves) == served


async def test_a_rotation_by_openssl() -> None:
    first, second = await create_authority("first", 730), await create_authority("second", 730)
    pair = await create_certificate(first, [NAME], 90)
    material = ServingMaterial((first.certificate,), first.key, pair.certificate, pair.key)
    assert decode_material(encode_material(material)) == material
    facts = examine_material(material, NAME)
    assert (facts.problem, facts.signed_by_newest, facts.can_sign) == ("", True, True)
    assert facts.serving is not None
    assert facts.serving.ends_s - facts.serving.begins_s == 90 * DAY_S
    assert abs(facts.serving.begins_s - time.time()) < 60
    both = msgspec.structs.replace(
        material, authorities=(second.certificate, first.certificate), authority_key=second.key
    )
    assert (examine_material(both, NAME).problem, examine_material(both, NAME).signed_by_newest) == ("", False)
    renewed = await create_certificate(both.authority, [NAME], 90)
    after = msgspec.structs.replace(both, certificate=renewed.certificate, key=renewed.key)
    assert examine_material(after, NAME).signed_by_newest


async def test_material_that_clients_would_refuse_is_described() -> None:
    authority, other = await create_authority("one", 730), await create_authority("other", 730)
    pair = await create_certificate(authority, [NAME], 90)
    material = ServingMaterial((authority.certificate,), authority.key, pair.certificate, pair.key)
    cases = {
        "ca.crt has no valid authority": msgspec.structs.replace(material, authorities=()),
        "ca.crt has no valid": msgspec.structs.replace(material, authorities=(pair.certificate,)),
        "tls.crt: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed": msgspec.structs.replace(
            material, authorities=(other.certificate,)
        ),
        "tls.crt: [X509: KEY_VALUES_MISMATCH]": msgspec.structs.replace(material, key=other.key),
        "tls.crt: [SSL]": msgspec.structs.replace(material, certificate=""),
    }
    for problem, wrong in cases.items():
        facts = examine_material(wrong, NAME)
        assert facts.serving is None
        assert facts.problem.startswith(problem)
    assert "Hostname mismatch" in examine_material(material, "other.default.svc").problem
    assert decode_material({"ca.crt": "%", "tls.crt": "/w=="}) == ServingMaterial()


async def test_a_key_of_the_authority_that_is_another_one_or_garbage_cannot_sign() -> None:
    """OpenSSL would refuse each renewal, until the certificate has ended and clients trust nothing."""
    authority, other = await create_authority("one", 730), await create_authority("other", 730)
    pair = await create_certificate(authority, [NAME], 90)
    for key, can_sign in ((authority.key, True), (other.key, False), ("garbage", False), ("", False)):
        facts = examine_material(ServingMaterial((authority.certificate,), key, pair.certificate, pair.key), NAME)
        assert facts.serving is not None
        assert facts.can_sign is can_sign


async def test_an_encrypted_key_is_refused_and_asks_for_no_password() -> None:
    """OpenSSL would read the password from the terminal, and wait for it."""
    pair = await create_certificate(await create_authority("one", 730), [NAME], 90)
    words = ("openssl", "ec", "-aes256", "-passout", "pass:secret")
    process = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    encrypted, _ = await process.communicate(pair.key.encode())
    assert b"ENCRYPTED" in encrypted
    with pytest.raises(ssl.SSLError):
        serving_context(ServingMaterial(certificate=pair.certificate, key=encrypted.decode()))


async def test_any_content_of_the_secret_is_described_and_ends_nothing() -> None:
    """A letter outside of ASCII in ca.crt ended the controller, and each next one, because the Secret stays."""
    authority = await create_authority("one", 730)
    pair = await create_certificate(authority, [NAME], 90)
    valid = {
        "ca.crt": authority.certificate, "ca.key": authority.key, "tls.crt": pair.certificate, "tls.key": pair.key,
    }  # fmt: skip
    randomness = random.Random(1)
    changes = (
        "",
        "\0",
        "\u00e9",
        "\u2028",
        "-----BEGIN CERTIFICATE-----\n",
        "-----END CERTIFICATE-----\n",
        "\n" * 9,
        "=" * 70,
    )
    for number in range(400):
        data = dict(valid)
        for name in randomness.sample(list(valid), randomness.randint(1, 2)):
            at, text = randomness.randrange(len(valid[name])), valid[name]
            data[name] = text[:at] + changes[number % len(changes)] + text[at + randomness.randint(0, 40) :]
        material = decode_material({name: base64.b64encode(text.encode()).decode() for name, text in data.items()})
        facts = examine_material(material, NAME)
        assert facts.serving is not None or facts.problem
    for name, content in valid.items():
        texts = {**valid, name: content.replace("A", "\u00e9", 1)}
        material = decode_material({each: base64.b64encode(text.encode()).decode() for each, text in texts.items()})
        assert (examine_material(material, NAME).serving is None) is (name != "ca.key")
