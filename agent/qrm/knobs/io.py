"""Disk controls from the settings: `io.weight` and `io.max` by QoS level, and settings of whole disks. Pure.
Settings of whole disks are write-back throttling (`wbt_lat_usec`) and the io.cost model.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.config.qrm import DiskIoConfig
from agent.qrm.knobs.notation import canonical_io_max
from api.advice import KnobRequest
from api.knobs import Knob, Reason
from api.snapshot import Disk, Snapshot


class SysfsSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A line that a file below /sys is to show."""

    path: str
    """Below the root of sysfs: `block/sda/queue/wbt_lat_usec`."""
    line: str
    """Text to write."""
    device: str = ""
    """Device number, `8:16`, if the file has one line per device; else empty."""
    reason: Reason


def io_requests(snapshot: Snapshot, config: DiskIoConfig) -> tuple[KnobRequest, ...]:
    """Return `io.weight` and `io.max` of every container whose QoS level has them."""
    requests = []
    for pod in snapshot.pods:
        values: dict[Knob, str] = {}
        if pod.qos in config.weights:
            values[Knob.IO_WEIGHT] = str(config.weights[pod.qos])
        if pod.qos in config.max:
            values[Knob.IO_MAX] = config.max[pod.qos]
        text = f"Configured for {pod.qos.value}."
        reason = Reason(rule="io_level", text=text)
        for container in pod.containers:
            requests += [
                KnobRequest(cgroup=container.cgroup, knob=knob, value=value, reason=reason)
                for knob, value in values.items()
            ]
    return tuple(requests)


def io_config_errors(config: DiskIoConfig) -> tuple[str, ...]:
    """Return one sentence for each invalid value of the configuration."""
    errors = []
    for level, text in config.max.items():
        try:
            canonical_io_max(text)
        except ValueError as error:
            errors.append(f"max.{level.value}: {error}")
    return tuple(errors)


def disk_settings(disks: Mapping[str, Disk], config: DiskIoConfig, cgroup_root: str | None) -> tuple[SysfsSetting, ...]:
    """Return write-back throttling by kind of disk, and the cost model of configured disks. `cgroup_root` is the
    version 2 root below sysfs (`fs/cgroup`); None if it has no io controller."""
    settings = []
    for name, disk in sorted(disks.items()):
        wbt_us = config.wbt_us.get(disk.kind, -1) if disk.kind else -1  # type: ignore[call-overload]
        # A disk without wbt_lat_usec has no write-back throttling.
        if wbt_us >= 0 and disk.wbt_lat_us is not None:
            text = f"Write-back to {name} is throttled while reads take longer than {wbt_us} us, as configured for {disk.kind}."
            reason = Reason(rule="wbt", text=text, inputs={"kind": disk.kind})
            path = f"block/{name}/queue/wbt_lat_usec"
            settings.append(SysfsSetting(path=path, line=str(wbt_us), reason=reason))
        for file, lines in (("io.cost.qos", config.cost_qos), ("io.cost.model", config.cost_model)):
            if cgroup_root is not None and name in lines:
                reason = Reason(rule="iocost", text=f"{file} of {name}, as configured.")
                line = f"{disk.number} {lines[name]}"
                settings.append(
                    SysfsSetting(path=f"{cgroup_root}/{file}", line=line, device=disk.number, reason=reason)
                )
    return tuple(settings)
