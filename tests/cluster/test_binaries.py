"""Programs of a cluster: which ones are compiled or used from the distribution, and errors for missing ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster import binaries
from tests.cluster.binaries import MODULES, Missing, key, module_folder, obtain, version_of

OTHER_STAGING = {
    "1.31": {
        "k8s.io/endpointslice": "31.13",
        "k8s.io/kube-controller-manager": "31.13",
        "k8s.io/kube-proxy": "31.11",
        "k8s.io/kube-scheduler": "31.13",
    },
}
"""Staging modules of another patch version, because Go's module proxy lacks that of Kubernetes."""


def test_the_pinned_versions_are_those_of_the_modules() -> None:
    for minor, version in binaries.VERSIONS.items():
        assert version.startswith(f"{minor}.")
        text = (module_folder("kubernetes", minor) / "go.mod").read_text()
        assert f"k8s.io/kubernetes v{version}" in text
        # The staging modules, which Kubernetes has in its own tree, are published with the version of the same tag.
        staging = re.findall(r"^\t(k8s\.io/[a-z-]+) => \1 v0\.(\d+\.\d+)$", text, re.M)
        assert len(staging) >= 28
        others = {name: number for name, number in staging if number != version.removeprefix("1.")}
        assert others == OTHER_STAGING.get(minor, {})
    assert f"containerd/v2 {binaries.CONTAINERD}" in (MODULES / "containerd/go.mod").read_text()
    for name, source in binaries.SOURCES.items():
        tools = (module_folder(name) / "go.mod").read_text()
        for program in (program for program, module in binaries.PROGRAMS.items() if module == name):
            assert f"{source.packages}/{program}\n" in tools
    assert f"helm.sh/helm/v3 {binaries.HELM}" in (MODULES / "helm/go.mod").read_text()
    assert f"github.com/coredns/coredns {binaries.COREDNS}" in (MODULES / "coredns/go.mod").read_text()


def test_another_checksum_is_another_folder_of_the_cache(tmp_path: Path) -> None:
    for name in binaries.SOURCES:
        folder = module_folder(name, modules=tmp_path)
        folder.mkdir()
        for file in ("go.mod", "go.sum"):
            (folder / file).write_text("a")
    first = key(tmp_path)
    (tmp_path / "containerd/go.sum").write_text("b")
    assert first != key(tmp_path)
    assert first.startswith(f"{binaries.KUBERNETES}-")


def test_what_kubebuilder_has_is_taken_from_there(tmp_path: Path) -> None:
    assets, cache = tmp_path / "assets", tmp_path / "cache"
    others = [tmp_path / "bin" / name for name in ("ip", "nsenter", "openssl", "etcd")]
    for path in (assets / "etcd", assets / "kube-apiserver", cache / key() / "bin/kubectl", *others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o755)
    result = obtain(
        ("kube-apiserver", "kubectl"), cache, {"KUBEBUILDER_ASSETS": str(assets), "PATH": str(tmp_path / "bin")}
    )
    assert result["etcd"] == assets / "etcd"
    assert result["kube-apiserver"] == assets / "kube-apiserver"
    assert result["openssl"] == tmp_path / "bin/openssl"
    assert result["kubectl"] == cache / key() / "bin/kubectl"


def test_a_program_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    """A compiler that writes half of it and fails leaves nothing; what was there stays."""
    compiler = tmp_path / "go"
    compiler.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho half > "$2"\necho "no space" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "kubectl").touch()
    with pytest.raises(Missing, match="kubelet cannot be compiled: no space"):
        binaries.compile_into(folder, "kubelet", str(compiler), "1 of 1")
    assert [path.name for path in folder.iterdir()] == ["kubectl"]
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho whole > "$2"\n')
    binaries.compile_into(folder, "kubelet", str(compiler), "1 of 1")
    assert (folder / "kubelet").read_text() == "whole\n"
    assert sorted(path.name for path in folder.iterdir()) == ["kubectl", "kubelet"]


@pytest.mark.parametrize(
    ("text", "version"),
    [("go1.24.11\n", (1, 24)), ("go1.9", (1, 9)), ("devel +abc", (0, 0)), ("", (0, 0)), ("go1.26rc1", (0, 0))],
)
def test_versions_of_go(text: str, version: tuple[int, int]) -> None:
    assert version_of(text) == version
