"""A release is signed and verified with ssh-keygen; changed, missing and unlisted files and other signatures are refused."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

RELEASE = Path(__file__).resolve().parents[2] / "deploy/release"
IDENTITY = "release@dioptase.example"


def release(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RELEASE, *map(str, words)], capture_output=True, text=True, check=False)


def make_key(path: Path) -> Path:
    """Create a throw-away key without a passphrase."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return path


@pytest.fixture
def signed(tmp_path: Path) -> tuple[Path, Path]:
    """A signed folder with two files, and the file of allowed signers."""
    folder, signers, key = tmp_path / "release", tmp_path / "signers", make_key(tmp_path / "key")
    folder.mkdir()
    sums = []
    for name in ("dioptase-1.tar", "dioptase-1.whl"):
        (folder / name).write_text(name)
        sums.append(f"{hashlib.sha256(name.encode()).hexdigest()}  {name}\n")
    (folder / "SHA256SUMS").write_text("".join(sums))
    signers.write_text(f'{IDENTITY} namespaces="dioptase-release" {key.with_suffix(".pub").read_text()}')
    done = release("sign", folder, key)
    assert done.returncode == 0, done.stderr
    return folder, signers


def test_a_signed_release_is_verified(signed: tuple[Path, Path]) -> None:
    folder, signers = signed
    done = release("verify", folder, signers, IDENTITY)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"{folder} is signed by {IDENTITY}")


@pytest.mark.parametrize(
    "change", ["content", "sums", "missing", "further", "prefix", "hidden", "dots", "lines", "unsigned"]
)
def test_what_differs_from_what_was_signed_is_refused(signed: tuple[Path, Path], change: str) -> None:
    folder, signers = signed
    match change:
        case "content":
            (folder / "dioptase-1.tar").write_text("other")
        case "sums":
            (folder / "dioptase-1.tar").write_text("other")
            text = (folder / "SHA256SUMS").read_text()
            before, after = (hashlib.sha256(each).hexdigest() for each in (b"dioptase-1.tar", b"other"))
            (folder / "SHA256SUMS").write_text(text.replace(before, after))
        case "missing":
            (folder / "dioptase-1.whl").unlink()
        case "further":
            (folder / "more.whl").touch()
        case "prefix":
            (folder / "dioptase-1").touch()
        case "hidden":
            (folder / ".more").touch()
        case "dots":
            (folder / "..more").touch()
        case "lines":
            (folder / "dioptase-1.whl\nmore").touch()
        case "unsigned":
            (folder / "SHA256SUMS.sig").unlink()
    assert release("verify", folder, signers, IDENTITY).returncode != 0


def test_another_key_another_identity_and_another_purpose_are_refused(
    signed: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, signers = signed
    assert release("verify", folder, signers, "other@dioptase.example").returncode != 0
    others = tmp_path / "others"
    public = make_key(tmp_path / "other").with_suffix(".pub").read_text()
    others.write_text(f'{IDENTITY} namespaces="dioptase-release" {public}')
    assert release("verify", folder, others, IDENTITY).returncode != 0
    # A signature that the same key made for something else, such as a commit.
    subprocess.run(
        ["ssh-keygen", "-q", "-Y", "sign", "-f", tmp_path / "key", "-n", "git", folder / "SHA256SUMS"],
        check=True,
        input=b"y",
    )
    assert release("verify", folder, signers, IDENTITY).returncode != 0


def test_a_folder_without_checksums_is_not_signed_and_one_with_files_is_not_built(tmp_path: Path) -> None:
    folder = tmp_path / "release"
    folder.mkdir()
    (folder / "left").touch()
    refused = release("sign", folder, make_key(tmp_path / "key"))
    assert (refused.returncode, "has no SHA256SUMS" in refused.stderr) == (1, True)
    refused = release("build", folder)
    assert (refused.returncode, "is not empty" in refused.stderr) == (1, True)
    assert release("publish", folder).returncode == 2
