"""Paths as the sources of kubelet, runc, containerd and CRI-O make them, in both spellings."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.sensors.cgroup.pod_cgroup_paths import (
    CgroupDriver,
    PodCgroupIdentity,
    container_cgroup_path,
    expand_slice,
    find_container_cgroup,
    kubepods_path,
    parse_cgroups_path,
    pod_cgroup_path,
)

UID = "0a1b2c3d-1111-4222-8333-444455556666"
UNDER = "0a1b2c3d_1111_4222_8333_444455556666"
HASH = "d7c2f1a05ab8c7e2e5e0c8f1a2b3c4d5"
ID = "4f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945"
BURST = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDER}.slice"


@pytest.mark.parametrize(
    ("home", "driver", "path"),
    [
        (PodCgroupIdentity(UID, "Guaranteed"), CgroupDriver.SYSTEMD, f"/kubepods.slice/kubepods-pod{UNDER}.slice"),
        (PodCgroupIdentity(UID, "Burstable"), CgroupDriver.SYSTEMD, BURST),
        (
            PodCgroupIdentity(HASH, "BestEffort"),
            CgroupDriver.SYSTEMD,
            f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{HASH}.slice",
        ),
        (
            PodCgroupIdentity(UID, "Burstable", "/n-2"),
            CgroupDriver.SYSTEMD,
            f"/n_2.slice/n_2-kubepods.slice/n_2-kubepods-burstable.slice/n_2-kubepods-burstable-pod{UNDER}.slice",
        ),
        (PodCgroupIdentity(UID, "Guaranteed"), CgroupDriver.CGROUPFS, f"/kubepods/pod{UID}"),
        (PodCgroupIdentity(UID, "Burstable"), CgroupDriver.CGROUPFS, f"/kubepods/burstable/pod{UID}"),
        (PodCgroupIdentity(UID, "BestEffort", "/a/b-c/"), CgroupDriver.CGROUPFS, f"/a/b-c/kubepods/besteffort/pod{UID}"),
    ],
)  # fmt: skip
def test_pods(home: PodCgroupIdentity, driver: CgroupDriver, path: str) -> None:
    assert pod_cgroup_path(home, driver) == path


@pytest.mark.parametrize(
    ("runtime", "driver", "name"),
    [
        ("containerd", CgroupDriver.SYSTEMD, f"{BURST}/cri-containerd-{ID}.scope"),
        ("cri-o", CgroupDriver.SYSTEMD, f"{BURST}/crio-{ID}.scope"),
        ("docker", CgroupDriver.SYSTEMD, f"{BURST}/docker-{ID}.scope"),
        ("containerd", CgroupDriver.CGROUPFS, f"/kubepods/burstable/pod{UID}/{ID}"),
        ("cri-o", CgroupDriver.CGROUPFS, f"/kubepods/burstable/pod{UID}/crio-{ID}"),
        ("docker", CgroupDriver.CGROUPFS, f"/kubepods/burstable/pod{UID}/{ID}"),
    ],
)
def test_containers(runtime: str, driver: CgroupDriver, name: str) -> None:
    assert container_cgroup_path(PodCgroupIdentity(UID, "Burstable"), runtime, ID, driver) == name


@pytest.mark.parametrize("uid", ["", "..", "a/b", "../../etc", "a b", "x" * 254, "a\n", "é"])
def test_an_invalid_uid_has_no_path(uid: str) -> None:
    with pytest.raises(ValueError, match="not a pod uid"):
        pod_cgroup_path(PodCgroupIdentity(uid, "Guaranteed"), CgroupDriver.CGROUPFS)
    with pytest.raises(ValueError, match="not a container id"):
        container_cgroup_path(PodCgroupIdentity(UID, "Guaranteed"), "containerd", uid, CgroupDriver.CGROUPFS)


def test_an_unknown_qos_class_is_rejected() -> None:
    with pytest.raises(ValueError, match="'Best' is not a QoS class"):
        pod_cgroup_path(PodCgroupIdentity(UID, "Best"), CgroupDriver.CGROUPFS)


@pytest.mark.parametrize(
    ("reported", "path"),
    [
        (f"kubepods-burstable-pod{UNDER}.slice:cri-containerd:{ID}", f"{BURST}/cri-containerd-{ID}.scope"),
        (f"kubepods-pod{UNDER}.slice:crio:{ID}", f"/kubepods.slice/kubepods-pod{UNDER}.slice/crio-{ID}.scope"),
        (f":runc:{ID}", f"/system.slice/runc-{ID}.scope"),
        (f"-.slice:crio:{ID}", f"/crio-{ID}.scope"),
        ("system.slice::own.slice", "/system.slice/own.slice"),
        (f"/kubepods/burstable/pod{UID}/{ID}", f"/kubepods/burstable/pod{UID}/{ID}"),
        (f"/k8s.io/{ID}", f"/k8s.io/{ID}"),
    ],
)
def test_cgroups_paths_of_runtimes(reported: str, path: str) -> None:
    assert parse_cgroups_path(reported) == path


@pytest.mark.parametrize(
    "reported",
    [
        "", "/", "kubepods/x", "/a/../b", "/a//b", "/a/", "/a\x00b", "a--b.slice:crio:x", "a/b.slice:crio:x",
        "a.slice:crio:../x", "a.slice:cr/io:x", "a:b:c", "a.slice:crio:", "/" + "x" * 5000,
    ],
)  # fmt: skip
def test_an_invalid_cgroups_path_is_rejected(reported: str) -> None:
    with pytest.raises(
        ValueError, match=r"not a cgroup path|not an absolute cgroup path|not a slice name|are not a scope name"
    ):
        parse_cgroups_path(reported)


def test_a_slice_name_that_is_too_long_has_no_path() -> None:
    """The path grows with the square of the name's length: a name of 2,000 dashes has a path of 2 MB."""
    assert len(parse_cgroups_path(f"{'a-' * 124}a.slice:a:b")) == 16_510
    with pytest.raises(ValueError, match="is not a slice name"):
        parse_cgroups_path(f"{'a-' * 2000}a.slice:a:b")


@given(st.text(max_size=60))
def test_no_reported_path_leads_out_of_the_tree(reported: str) -> None:
    try:
        path = parse_cgroups_path(reported)
    except ValueError:
        return
    assert path.startswith("/")
    assert not {"", ".", ".."} & set(path.split("/")[1:])


@given(st.lists(st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True), min_size=1, max_size=5))
def test_a_slice_is_below_all_that_its_name_begins_with(names: list[str]) -> None:
    path = expand_slice("-".join(names) + ".slice")
    parts = path.split("/")[1:]
    assert len(parts) == len(names)
    assert all(later.startswith(f"{item.removesuffix('.slice')}-") for item, later in pairwise(parts))


def test_the_driver_is_detected_by_existing_cgroups(tmp_path: Path) -> None:
    home = PodCgroupIdentity(UID, "Burstable")

    def exists(path: str) -> bool:
        return (tmp_path / path[1:]).is_dir()

    assert (kubepods_path("/", CgroupDriver.SYSTEMD), kubepods_path("/", CgroupDriver.CGROUPFS)) == (
        "/kubepods.slice",
        "/kubepods",
    )
    assert find_container_cgroup(home, f"containerd://{ID}", "", exists) == ""
    scope = container_cgroup_path(home, "cri-o", ID, CgroupDriver.SYSTEMD)
    (tmp_path / scope[1:]).mkdir(parents=True)
    assert find_container_cgroup(home, f"cri-o://{ID}", "", exists) == scope
    assert find_container_cgroup(home, ID, "", exists) == scope, "without its runtime's name every spelling is tried"
    assert find_container_cgroup(home, f"containerd://{ID}", "", exists) == "", "it is another runtime's"
    plain = f"/kubepods/burstable/pod{UID}/{ID}"
    (tmp_path / plain[1:]).mkdir(parents=True)
    assert find_container_cgroup(home, f"containerd://{ID}", "", exists) == plain, (
        "both drivers' groups are there; one has it"
    )
    (tmp_path / "elsewhere").mkdir()
    assert find_container_cgroup(home, f"containerd://{ID}", "/elsewhere", exists) == "/elsewhere", (
        "the runtime's word comes first"
    )
    assert find_container_cgroup(home, f"containerd://{ID}", "/nowhere", exists) == plain
    assert find_container_cgroup(home, "containerd://../x", "", exists) == ""
    assert find_container_cgroup(home, "lxc://x", "", exists) == ""
