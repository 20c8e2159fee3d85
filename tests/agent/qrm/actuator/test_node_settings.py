"""Disks, network cards and caches: requests by QoS level, settings of whole disks and their originals, resctrl schemata."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.qrm import DiskIoConfig, KnobsConfig, NetworkQosConfig, ResctrlConfig, ResctrlLevel
from agent.qrm.actuator.resctrl_groups import ResctrlWriter
from agent.qrm.actuator.sysfs_writer import FILE_NAME, SysfsWriter
from agent.qrm.decisions.network import (
    NetworkAllocation,
    allocate_bandwidth,
    net_class_requests,
    select_card,
    usable_cards,
)
from agent.qrm.knobs.io import SysfsSetting, disk_settings, io_config_errors, io_requests
from agent.qrm.knobs.resctrl import (
    CacheCapacity,
    build_resctrl_groups,
    format_schemata,
    l3_mask,
    mba_value,
    parse_schemata,
)
from api.decision import OutcomeStatus
from api.interfaces import Unavailable
from api.knobs import Reason
from api.pod import Pod
from api.qos import NIC_SELECTION_KEY, QoSLevel
from api.snapshot import Interface, NodeSample
from tests.agent.qrm.actuator.fakes import FakeResctrl, disk, kill_at_every_step
from tests.builders.pods import reclaimed, shared
from tests.builders.snapshots import snapshot

REASON = Reason(rule="r", text="t")
WEB, BATCH = shared("web"), reclaimed("batch")


# --- disks and network cards


def test_levels_have_weights_limits_and_classes() -> None:
    observed = snapshot(0, [WEB, BATCH])
    config = DiskIoConfig(
        weights={QoSLevel.SHARED: 500, QoSLevel.RECLAIMED: 10}, max={QoSLevel.RECLAIMED: "8:0 wbps=9"}
    )
    assert [(request.cgroup, request.knob.value, request.value) for request in io_requests(observed, config)] == [
        ("/web", "io.weight", "500"),
        ("/batch", "io.weight", "10"),
        ("/batch", "io.max", "8:0 wbps=9"),
    ]
    classes = net_class_requests(observed, NetworkQosConfig(class_ids={QoSLevel.RECLAIMED: 65_537}))
    assert [(request.cgroup, request.value) for request in classes] == [("/batch", "65537")]
    assert io_config_errors(config) == ()
    assert io_config_errors(DiskIoConfig(max={QoSLevel.SHARED: "sda wbps=1"})) == (
        "max.shared_cores: 'sda' is not the number of a device such as 8:16",
    )


def test_disks_are_set_by_their_kind() -> None:
    config = DiskIoConfig(
        wbt_us={"HDD": 75_000, "SSD": 2000, "NVME": -1},
        cost_qos={"sdb": "enable=1 rpct=95.00"},
        cost_model={"sdz": "ctrl=auto"},
    )
    disks = {
        "sda": disk("8:0", "HDD"), "sdb": disk("8:16", "SSD"), "nvme0n1": disk("259:0", "NVME"),
        "sdc": disk("8:32", "SSD", None), "sda1": disk("8:1", ""), "vda": disk("254:0", "VIRTIO"),
    }  # fmt: skip
    result = [(each.path, each.line, each.device) for each in disk_settings(disks, config, "fs/cgroup")]
    assert result == [
        ("block/sda/queue/wbt_lat_usec", "75000", ""),
        ("block/sdb/queue/wbt_lat_usec", "2000", ""),
        ("fs/cgroup/io.cost.qos", "8:16 enable=1 rpct=95.00", "8:16"),
    ]
    assert len(disk_settings(disks, config, None)) == 2


def interface(speed: int | None) -> Interface:
    return Interface(received={}, sent={}, speed_mbit=speed)


def net_pod(name: str, mbit: int | None, card: str = "") -> Pod:
    """Return a pod whose second container requests that bandwidth; `card` is its nic_selection_result."""
    each = shared(name)
    other = msgspec.structs.replace(each.containers[0], name="other", cgroup=f"/{name}2", net_bandwidth_mbit=mbit)
    annotations = {NIC_SELECTION_KEY: card} if card else {}
    return msgspec.structs.replace(each, containers=(*each.containers, other), annotations=annotations)


CARDS = {"eth0": interface(1000), "eth1": interface(25_000), "lo": interface(1000), "tun0": interface(None)}


def allocate(
    pods: Sequence[Pod], previous: Mapping[str, str] | None = None, cards: Mapping[str, Interface] | None = None
) -> NetworkAllocation:
    result = msgspec.structs.replace(snapshot(0, pods), node=NodeSample(interfaces=CARDS if cards is None else cards))
    return allocate_bandwidth(result, NetworkQosConfig(reserved_mbit=50), previous or {})


def test_a_card_allocates_less_than_its_speed() -> None:
    result = {**CARDS, "eth2": msgspec.structs.replace(interface(1000), bonded=True)}
    eth0, eth1 = usable_cards(result, NetworkQosConfig(reserved_mbit=50))
    assert (eth0.egress_capacity, eth0.ingress_capacity) == (890, 850)
    eth1 = msgspec.structs.replace(eth1, allocated_mbit=22_400)
    assert (eth1.egress_capacity, eth1.capacity, eth1.free) == (23_450, 22_450, 50)
    assert select_card((eth0, eth1), 850)[0] == eth0
    none, verdict = select_card((eth0, eth1), 851)
    assert none is None
    assert verdict.text == "No network card has 851 Mbit/s left in both directions: eth0 850 of 850, eth1 50 of 22450."


def test_pods_get_cards_until_no_card_can_hold_the_request() -> None:
    pods = [net_pod("a", 22_000), net_pod("b", 800), net_pod("c", 451), net_pod("d", 450), net_pod("idle", None)]
    result = allocate(pods)
    assert [(card.name, card.allocated_mbit, dict(card.pods)) for card in result.cards] == [
        ("eth0", 800, {"default/b": 800}),
        ("eth1", 22_450, {"default/a": 22_000, "default/d": 450}),
    ]
    assert {key: (each.rule, each.threshold, each.text) for key, each in result.rejected.items()} == {
        "default/c": (
            "no_bandwidth",
            451,
            "No network card has 451 Mbit/s left in both directions: eth0 50 of 850, eth1 450 of 22450.",
        )
    }
    assert result.card_by_pod == {"default/a": "eth1", "default/b": "eth0", "default/d": "eth1"}


def test_a_new_pod_displaces_no_other_and_a_named_card_is_the_only_candidate() -> None:
    before = allocate([net_pod("a", 800), net_pod("b", 22_000)])
    assert (before.card_by_pod, list(before.rejected)) == ({"default/a": "eth1"}, ["default/b"])
    previous = {"default/a": "eth0", "default/b": "eth1"}
    after = allocate([net_pod("new", 800), net_pod("a", 800), net_pod("b", 22_000)], previous)
    assert (after.card_by_pod, list(after.rejected)) == (previous, ["default/new"])
    named = allocate(
        [net_pod("a", 900, "eth0"), net_pod("b", 100, "eth7"), net_pod("c", 850, "eth0")], {"default/a": "eth1"}
    )
    assert named.card_by_pod == {"default/c": "eth0"}
    assert {key: each.text for key, each in named.rejected.items()} == {
        "default/a": "No network card has 900 Mbit/s left in both directions: eth0 850 of 850.",
        "default/b": "nic_selection_result names eth7, which is no card of known speed here; choose from eth0, eth1.",
    }


def test_unreadable_cards_withdraw_and_allocate_nothing() -> None:
    unseen = allocate([net_pod("a", 800), net_pod("new", 1)], {"default/a": "eth0", "default/gone": "eth1"}, {})
    assert (unseen.cards, unseen.card_by_pod) == ((), {"default/a": "eth0"})
    assert {key: each.rule for key, each in unseen.rejected.items()} == {"default/new": "network_speed_unknown"}
    slow = allocate([net_pod("a", 800)], {"default/a": "eth0"}, {"eth0": interface(None)})
    assert slow.rejected["default/a"].text == "The pod requests 800 Mbit/s, and the speed of no network card is known."


@given(st.lists(st.tuples(st.integers(0, 30_000), st.sampled_from(["", "eth0", "eth1", "eth7"])), max_size=12))
def test_no_card_is_overallocated_and_a_second_cycle_changes_nothing(requests: list[tuple[int, str]]) -> None:
    pods = [net_pod(f"p{number}", mbit, card) for number, (mbit, card) in enumerate(requests)]
    result = allocate(pods)
    for card in result.cards:
        assert card.allocated_mbit == sum(card.pods.values()) <= card.capacity
    with_request = {each.key for each, (mbit, _) in zip(pods, requests, strict=True) if mbit}
    assert result.card_by_pod.keys() | result.rejected.keys() == with_request
    assert not result.card_by_pod.keys() & result.rejected.keys()
    assert allocate(pods, result.card_by_pod).card_by_pod.items() >= result.card_by_pod.items()


# --- resctrl


@pytest.mark.parametrize(
    ("full_mask", "start", "end", "expected"),
    [
        (0x7FF, 0, 30, 0xF),
        (0xFFFFF, 0, 30, 0x3F),
        (0x3FF, 0, 30, 0x7),
        (0x7FF, 0, 100, 0x7FF),
        (0xFFF, 25, 75, 0x1F8),
        (0xF, 0, 1, 0x1),
    ],
)
def test_l3_masks_are_those_of_koordinator(full_mask: int, start: float, end: float, expected: int) -> None:
    assert l3_mask(full_mask, ResctrlLevel(cat_start_percent=start, cat_end_percent=end)) == expected


@pytest.mark.parametrize(("full_mask", "start", "end"), [(0xF0, 0, 100), (0, 0, 100), (0xF, 50, 50), (0xF, 80, 100)])
def test_a_mask_without_a_cache_way_is_refused(full_mask: int, start: float, end: float) -> None:
    with pytest.raises(ValueError, match=r"mask|no (cache )?way"):
        l3_mask(full_mask, ResctrlLevel(cat_start_percent=start, cat_end_percent=end))


def test_bandwidth_is_in_the_unit_of_the_machine() -> None:
    assert [mba_value(percent, absolute=False) for percent in (100, 91, 90, 12.5, 1)] == [100, 100, 90, 20, 10]
    assert [mba_value(percent, absolute=True) for percent in (100, 50, 12.5, 0.1)] == [2048, 80, 20, 1]


INTEL = "    L3:0=7ff;1=7ff\n    MB:0=100;1=100\n"


def test_every_level_has_a_line_for_each_resource() -> None:
    caches = parse_schemata(INTEL)
    assert caches == CacheCapacity(l3={0: 0x7FF, 1: 0x7FF}, mb={0: 100, 1: 100})
    groups = {group.name: group.schemata for group in build_resctrl_groups(caches, ResctrlConfig().levels)}
    assert groups == {
        "dioptase-dedicated_cores": "L3:0=7ff;1=7ff\nMB:0=100;1=100\n",
        "dioptase-shared_cores": "L3:0=7ff;1=7ff\nMB:0=100;1=100\n",
        "dioptase-reclaimed_cores": "L3:0=f;1=f\nMB:0=100;1=100\n",
    }
    amd = parse_schemata("L3:0=ffff\nMB:0=2048\nSMBA:0=2048\n")
    assert format_schemata(amd, ResctrlLevel(cat_end_percent=50, mba_percent=25)) == "L3:0=ff\nMB:0=40\n"
    assert format_schemata(CacheCapacity(mb={0: 100}), ResctrlLevel(mba_percent=35)) == "MB:0=40\n"


def resctrl_root(root: Path, *names: str) -> FakeResctrl:
    for name in names:
        (root / name).mkdir()
        (root / name / "schemata").write_text(INTEL)
        (root / name / "tasks").write_text("")
    (root / "schemata").write_text(INTEL)
    return FakeResctrl(root)


def test_groups_get_schemata_and_threads_and_are_removed(tmp_path: Path) -> None:
    groups = resctrl_root(tmp_path, "dioptase-reclaimed_cores", "dioptase-old", "external")
    desired = build_resctrl_groups(groups.caches(), {QoSLevel.RECLAIMED: ResctrlLevel(cat_end_percent=30)})
    (dry,) = groups.apply(desired, {"dioptase-reclaimed_cores": [77]}, dry=True)
    group = tmp_path / "dioptase-reclaimed_cores"
    assert (dry.status, (group / "tasks").read_text()) == (OutcomeStatus.DRY_RUN, "")
    assert (tmp_path / "dioptase-old").exists()
    applied, removed = groups.apply(desired, {"dioptase-reclaimed_cores": [77]})
    assert (applied.status, applied.before, applied.after) == (
        OutcomeStatus.APPLIED, "L3:0=7ff;1=7ff MB:0=100;1=100", "L3:0=f;1=f MB:0=100;1=100",
    )  # fmt: skip
    assert applied.decision.cgroup == str(group)
    assert applied.decision.reason.text.startswith("reclaimed_cores has the L3 caches from 0 to 30 %")
    assert (removed.status, removed.decision.cgroup) == (OutcomeStatus.APPLIED, str(tmp_path / "dioptase-old"))
    assert (group / "schemata").read_text().startswith("L3:0=f;1=f\n")
    assert (group / "tasks").read_text() == "77\n"
    inode = (group / "schemata").stat().st_mtime_ns
    assert [each.status for each in groups.apply(desired, {"dioptase-reclaimed_cores": [77]})] == [
        OutcomeStatus.UNCHANGED
    ]
    assert (group / "schemata").stat().st_mtime_ns == inode, "a correct schemata file is not written again"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dioptase-reclaimed_cores", "external", "schemata"]
    assert [each.decision.cgroup for each in groups.restore()] == [str(group)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["external", "schemata"]


def test_without_resctrl_there_is_a_reason(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        ResctrlWriter(tmp_path / "none").caches()
    assert "mount -t resctrl" in caught.value.remedy
    assert ResctrlWriter(tmp_path / "none").restore() == ()
    (refused,) = ResctrlWriter(tmp_path).apply(
        build_resctrl_groups(parse_schemata(INTEL), {QoSLevel.SHARED: ResctrlLevel()}), {}
    )
    assert (refused.status, "info/last_cmd_status" in refused.error) == (OutcomeStatus.REFUSED, True)


# --- whole disks

WBT = "block/sda/queue/wbt_lat_usec"
QOS = "fs/cgroup/io.cost.qos"


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    root = tmp_path / "sys"
    for path, text in ((WBT, "75000\n"), (QOS, "8:0 enable=0 ctrl=auto\n8:16 enable=1 ctrl=user rpct=50.00\n")):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (tmp_path / "state").mkdir()
    return root


def setting(path: str, line: str, device: str = "") -> SysfsSetting:
    return SysfsSetting(path=path, line=line, device=device, reason=REASON)


def node_files(sysfs: Path, boot: str = "boot") -> SysfsWriter:
    return SysfsWriter(sysfs, sysfs.parent / "state", boot)


def test_a_disk_s_setting_is_journalled_written_and_restored(sysfs: Path) -> None:
    journal = sysfs.parent / "state" / FILE_NAME
    files = node_files(sysfs)
    (outcome,) = files.apply([setting(WBT, "2000")], dry=True)
    assert (outcome.status, outcome.before, journal.exists()) == (OutcomeStatus.DRY_RUN, "75000", False)
    (outcome,) = files.apply([setting(WBT, "2000")])
    assert (outcome.status, outcome.before, outcome.after) == (OutcomeStatus.APPLIED, "75000", "2000")
    assert files.apply([setting(WBT, "2000")])[0].status is OutcomeStatus.UNCHANGED
    # Another process, after the first was killed.
    again = node_files(sysfs)
    assert again.restore(keep=[setting(WBT, "1")]) == ()
    assert [(o.status, o.after) for o in again.restore()] == [(OutcomeStatus.APPLIED, "75000")]
    assert (sysfs / WBT).read_text() == "75000\n"
    assert not journal.exists()


def test_one_device_s_line_is_changed_and_restored(sysfs: Path) -> None:
    files = node_files(sysfs)
    (outcome,) = files.apply([setting(QOS, "8:16 enable=1 rpct=95.00", "8:16")])
    assert outcome.before == "8:16 enable=1 ctrl=user rpct=50.00"
    assert files.entries()[0].text == outcome.before
    files.restore()
    assert (sysfs / QOS).read_text() == "8:16 enable=1 ctrl=user rpct=50.00\n", (
        "an ordinary file keeps only the last line"
    )


def test_an_externally_modified_value_stays(sysfs: Path) -> None:
    files = node_files(sysfs)
    files.apply([setting(WBT, "2000")])
    (sysfs / WBT).write_text("5000\n")
    assert [(o.status, o.after) for o in files.restore()] == [(OutcomeStatus.UNCHANGED, "5000")]
    files.apply([setting(WBT, "2000")])
    (sysfs / WBT).write_text("6000\n")
    files.apply([setting(WBT, "2000")])
    assert [(o.status, o.after) for o in files.restore()] == [(OutcomeStatus.APPLIED, "6000")]


def test_another_boot_a_lost_disk_and_a_damaged_journal(sysfs: Path) -> None:
    node_files(sysfs).apply([setting(WBT, "2000")])
    assert node_files(sysfs, "another").entries() == ()
    files = node_files(sysfs)
    (sysfs / WBT).unlink()
    assert [o.status for o in files.restore()] == [OutcomeStatus.VANISHED]
    (refused,) = files.apply([setting(WBT, "2000")])
    assert (refused.status, "No such file" in refused.error) == (OutcomeStatus.REFUSED, True)
    (sysfs.parent / "state" / FILE_NAME).write_text("{")
    with pytest.raises(Unavailable, match="cannot be read"):
        node_files(sysfs)


def test_a_kill_at_any_step_loses_no_original(sysfs: Path) -> None:
    """SIGKILL before each system call that leaves something behind, on both of two changes."""

    def work() -> None:
        files = node_files(sysfs)
        files.apply([setting(WBT, "2000")])
        files.apply([setting(WBT, "3000")])

    def check(step: str) -> None:
        node_files(sysfs).restore()
        assert (sysfs / WBT).read_text() == "75000\n", step

    calls = [(os, "write"), (os, "fsync")]
    assert kill_at_every_step(calls, lambda: (sysfs / WBT).write_text("75000\n"), work, check) > 10


def test_settings_are_read_with_their_bounds() -> None:
    config = msgspec.convert(
        {
            "io": {"weights": {"shared_cores": 500}, "wbtUs": {"SSD": 2000}},
            "memoryQos": {"shared_cores": {"minPercent": 10}},
        },
        KnobsConfig,
    )
    assert config.io.weights[QoSLevel.SHARED] == 500
    for bad in ({"io": {"weights": {"shared_cores": 0}}}, {"io": {"wbtUs": {"TAPE": 1}}}, {"burst": {"policy": "on"}}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(bad, KnobsConfig)
