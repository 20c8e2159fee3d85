"""Writes the power limits of processor packages (RAPL, `class/powercap` below /sys) and restores them after an alert.
The originals are journalled with those of disks. A cap only lowers limits, and to a quarter of the original at least: a
mistyped budget must not stop the node.
"""

from __future__ import annotations

from collections.abc import Iterator

from agent.qrm.actuator.boot_journal import NOT_ON_DISK_YET
from agent.qrm.actuator.sysfs_writer import SysfsWriter
from agent.qrm.knobs.io import SysfsSetting
from agent.sensors.node.rapl import ENABLE_REMEDY, package_limit_files
from api.advice import NodeAdvice, PowerCap
from api.decision import Outcome
from api.interfaces import Unavailable
from api.knobs import Knob, Reason

_UW_PER_W = 1_000_000
MIN_LIMIT_RATIO = 0.25
"""Minimum of a limit, as a share of the original."""
Problem = tuple[str, str]
"""Reason and remedy."""


class PowerLimits:
    """Limits of all processor packages of the node."""

    def __init__(self, files: SysfsWriter) -> None:
        self._files = files

    def apply(self, advice: NodeAdvice, *, dry: bool) -> tuple[tuple[Outcome, ...], list[Problem]]:
        """Write the cap in force, or restore all limits when there is no alert; return what could not be done."""
        if advice.power_cap is not None:
            return self._cap(advice.power_cap, dry=dry)
        if not advice.releases_power_cap or dry:
            return (), []
        try:
            return self._files.restore(knobs=(Knob.POWER_LIMIT,)), []
        except Unavailable as error:
            return (), [(error.reason, error.remedy)]

    def _cap(self, cap: PowerCap, *, dry: bool) -> tuple[tuple[Outcome, ...], list[Problem]]:
        settings = tuple(self._settings(cap)) if cap.package_watts else ()
        if not settings:
            reason = f"power cannot be capped to {cap.target_watts} W: no package has a limit in force in /sys/class/powercap"
            remedy = f"use a machine with RAPL power limits, {ENABLE_REMEDY}"
            return (), [(reason, f"{remedy}, or set power-internal-op: 2 in alerts")]
        outcomes = self._files.apply(settings, dry=dry)
        problems = [
            (f"the power limit of a processor package cannot be set: {outcome.error}", "evict pods instead")
            for outcome in outcomes
            if outcome.error and outcome.error != NOT_ON_DISK_YET
        ]
        return outcomes, problems

    def _settings(self, cap: PowerCap) -> Iterator[SysfsSetting]:
        for path in package_limit_files(self._files.sys):
            original = self._files.original(path)
            # 0 and unreadable text are no limits.
            original_uw = int(original) if original.isdigit() else 0
            limit_uw = max(cap.package_watts * _UW_PER_W, round(original_uw * MIN_LIMIT_RATIO))
            # A limit that the owner set lower stays.
            limit_uw = min(limit_uw, original_uw or limit_uw)
            text = f"{cap.reason.text} Limit of this processor package: {limit_uw / _UW_PER_W:g} W."
            reason = Reason(rule=cap.reason.rule, text=text, threshold=cap.reason.threshold, inputs=cap.reason.inputs)
            yield SysfsSetting(path=path, line=str(limit_uw), reason=reason)
