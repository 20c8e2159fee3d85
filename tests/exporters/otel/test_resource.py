"""Resource attributes from given file trees and environments."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest

from api.interfaces import Unavailable
from exporters.otel.environment import detect_resource

CONTAINER = "c0ffee" + "0" * 58


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_", "-")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_host_is_known_by_its_files(tmp_path: Path) -> None:
    tree(
        tmp_path,
        etc__machine_id="0123456789abcdef\n",
        etc__os_release='NAME="Debian GNU/Linux"\nVERSION_ID="12"\nID=debian\n',
    )
    actual = detect_resource({}, "1.2.3", tmp_path)
    assert actual["host.id"] == "0123456789abcdef"
    assert (actual["os.type"], actual["os.name"], actual["os.version"]) == ("linux", "Debian GNU/Linux", "12")
    assert (actual["service.name"], actual["service.version"]) == ("dioptase", "1.2.3")
    assert actual["host.name"] == os.uname().nodename
    assert "container.id" not in actual
    assert not any(name.startswith("k8s.") for name in actual)


def test_nothing_is_made_up_where_nothing_can_be_read(tmp_path: Path) -> None:
    actual = detect_resource({}, "1", tmp_path)
    assert set(actual) == {
        "host.name", "host.arch", "os.type", "os.description", "service.name", "service.version", "service.instance.id",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("proc__self__cgroup", f"0::/kubepods.slice/cri-containerd-{CONTAINER}.scope\n"),
        ("proc__self__cgroup", f"4:memory:/docker/{CONTAINER}\n"),
        ("proc__self__mountinfo", f"1 2 8:1 /var/lib/containers/{CONTAINER}/hostname /etc/hostname rw - ext4 x rw\n"),
    ],
)
def test_the_container_is_known_by_its_cgroup_or_a_file_mounted_for_it(tmp_path: Path, file: str, text: str) -> None:
    assert detect_resource({}, "1", tree(tmp_path, **{file: text}))["container.id"] == CONTAINER


def test_an_id_of_another_length_or_of_a_mount_that_is_not_ours_is_no_container(tmp_path: Path) -> None:
    tree(
        tmp_path,
        proc__self__cgroup=f"0::/x-{CONTAINER}0.scope\n",
        proc__self__mountinfo=f"1 2 8:1 /l/{CONTAINER} /mnt rw\n",
    )
    assert "container.id" not in detect_resource({}, "1", tmp_path)


def test_an_instance_keeps_its_id_and_shares_it_with_no_other_node(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    item, two = (tree(tmp_path / name, etc__machine_id=f"{name}\n") for name in ("one", "two"))
    actual = detect_resource({}, "1", item)["service.instance.id"]
    namespace = uuid.UUID("4d63009a-8d0f-11ee-aad7-4c796ed8e320")
    assert actual == str(uuid.uuid5(namespace, f"one/{os.uname().nodename}"))
    assert detect_resource({}, "2", item)["service.instance.id"] == actual
    clone = detect_resource({"OTEL_RESOURCE_ATTRIBUTES": "host.name=clone"}, "1", item)["service.instance.id"]
    assert len({actual, clone, detect_resource({}, "1", two)["service.instance.id"]}) == 3


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"POD_UID": "9b2f"}, "9b2f"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "k8s.pod.uid=77aa"}, "77aa"),
        ({"POD_UID": "9b2f", "OTEL_RESOURCE_ATTRIBUTES": "service.instance.id=mine"}, "mine"),
    ],
)
def test_an_instance_is_known_by_its_pod_unless_it_is_named(
    tmp_path: Path, environ: dict[str, str], expected: str
) -> None:
    assert detect_resource(environ, "1", tmp_path)["service.instance.id"] == expected


def test_the_pod_comes_by_the_downward_api(tmp_path: Path) -> None:
    environ = {"NODE_NAME": "n1", "POD_NAME": "agent-x", "POD_NAMESPACE": "dioptase", "K8S_POD_UID": "u"}
    actual = detect_resource(environ, "1", tmp_path)
    assert {name: value for name, value in actual.items() if name.startswith("k8s.")} == {
        "k8s.node.name": "n1", "k8s.pod.name": "agent-x", "k8s.namespace.name": "dioptase", "k8s.pod.uid": "u",
    }  # fmt: skip


def test_what_the_environment_says_goes_before_what_is_found(tmp_path: Path) -> None:
    named = {
        "OTEL_RESOURCE_ATTRIBUTES": "host.name=other, team=a%2Cb%20c,service.name=ignored",
        "OTEL_SERVICE_NAME": "edge",
    }
    actual = detect_resource(named, "1", tmp_path)
    assert (actual["host.name"], actual["team"], actual["service.name"]) == ("other", "a,b c", "edge")
    assert detect_resource({"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine"}, "1", tmp_path)["service.name"] == "mine"


@pytest.mark.parametrize("text", ["rubbish", "a=b,rubbish", "=x"])
def test_attributes_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(Unavailable, match="OTEL_RESOURCE_ATTRIBUTES") as refused:
        detect_resource({"OTEL_RESOURCE_ATTRIBUTES": text}, "1", tmp_path)
    assert "NAME" in refused.value.reason


def test_garbage_in_files_is_carried_as_text(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/machine-id").write_bytes(b"\xff\xfe\n")
    (tmp_path / "etc/os-release").write_bytes(b'NAME="\xff\nVERSION_ID\n\0')
    actual = detect_resource({}, "1", tmp_path)
    assert actual["host.id"] == "\\xff\\xfe"
    for value in actual.values():
        value.encode()
