"""Waits for a pressure trigger of the kernel."""

from __future__ import annotations

import select

from agent.sensors.triggers.psi_triggers import PsiTrigger


def fires(trigger: PsiTrigger, within_s: float) -> bool:
    """Return whether the trigger fires: an event is POLLPRI (psi_trigger_poll in kernel/sched/psi.c)."""
    poll = select.poll()
    poll.register(trigger.fileno(), select.POLLPRI)
    return any(events & select.POLLPRI and not events & select.POLLERR for _, events in poll.poll(within_s * 1000))
