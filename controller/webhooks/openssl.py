"""Creates private keys and certificates with the program `openssl`; docs/adr/0012-certificates-by-openssl.md has the reason.
Keys stay in memory: files are anonymous ones of the kernel (memfd_create(2)), which no other user can open.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence

import msgspec

from api.interfaces import Unavailable

PROGRAM = "openssl"
TIMEOUT_S = 30.0
"""An elliptic-curve key takes milliseconds; a node without CPU time may need seconds."""
_REMEDY = "install openssl 3, or let cert-manager create the Secret (webhooks.certManager)"
_NEW_KEY = ("req", "-x509", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
# The distribution's own configuration would add extensions.
_CONFIG = """\
[req]
distinguished_name = name
prompt = no
[name]
CN = {name}
[authority]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectAltName = {alternatives}
authorityKeyIdentifier = keyid
"""


class KeyPair(msgspec.Struct, frozen=True):
    """Certificate and private key as PEM text."""

    certificate: str
    key: str


async def create_authority(name: str, days: int) -> KeyPair:
    """Create a certificate authority with this common name. Raises Unavailable if openssl is missing or fails."""
    return await _create(_CONFIG.format(name=name, alternatives="DNS:unused"), "authority", days)


async def create_certificate(authority: KeyPair, names: Sequence[str], days: int) -> KeyPair:
    """Create a server certificate for these DNS names, signed by the authority. Raises Unavailable as `create_authority`."""
    # A common name has at most 64 characters (RFC 5280, ub-common-name); clients read only the alternative names.
    text = _CONFIG.format(name="dioptase-webhooks", alternatives=",".join(f"DNS:{name}" for name in names))
    return await _create(text, "server", days, authority)


async def _create(config: str, section: str, days: int, authority: KeyPair | None = None) -> KeyPair:
    files = [config, "", "", *((authority.certificate, authority.key) if authority else ())]
    with memory_files(files) as opened:
        config_fd, certificate_fd, key_fd, *signer = opened
        words = [*_NEW_KEY, "-config", descriptor_path(config_fd), "-extensions", section, "-days", str(days)]
        words += ["-out", descriptor_path(certificate_fd), "-keyout", descriptor_path(key_fd)]
        words += ["-CA", descriptor_path(signer[0]), "-CAkey", descriptor_path(signer[1])] if signer else []
        await _run(words, opened)
        return KeyPair(_read(certificate_fd), _read(key_fd))


@contextlib.contextmanager
def memory_files(texts: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Open one anonymous file in memory for each text, and close all of them at the end."""
    opened: list[int] = []
    try:
        for text in texts:
            opened.append(os.memfd_create("certificate"))
            os.write(opened[-1], text.encode())
        yield tuple(opened)
    finally:
        for descriptor in opened:
            os.close(descriptor)


async def _run(words: Sequence[str], descriptors: Sequence[int]) -> None:
    try:
        process = await asyncio.create_subprocess_exec(
            PROGRAM, *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT, pass_fds=descriptors,
        )  # fmt: skip
    except OSError as error:
        raise Unavailable(f"cannot start openssl: {error.strerror}", _REMEDY) from error
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        raise Unavailable(f"openssl took more than {TIMEOUT_S:g} s", "give the controller CPU time") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = output.decode(errors="replace").strip().splitlines()
        raise Unavailable(f"openssl failed: {lines[-1] if lines else process.returncode}", _REMEDY)


def descriptor_path(descriptor: int) -> str:
    """Return a path at which a child that inherits the descriptor, and this process, open its file from the beginning."""
    return f"/proc/self/fd/{descriptor}"


def _read(descriptor: int) -> str:
    with open(descriptor_path(descriptor)) as file:  # noqa: PTH123 - a new offset, which the descriptor does not have
        return file.read()
