"""How long a task waited for each CPU, on average, over the last five seconds.

The kernel counts waits by CPU only where it was built with CONFIG_SCHEDSTATS. Elsewhere our run-queue probe counts them at the
same place, as long as it tells who had the CPU (probes/blame.py). Where it does not, it knows the waits of each cgroup, and its
cpuset says for which CPUs they were: a wait counts for each of those alike. On a node whose pods run in pools of CPUs of their
own, that tells the pools apart, which is what the client wants to know.
"""

from __future__ import annotations

from api.cpus import parse_cpu_list
from api.rates import delta
from api.samples import Snapshot
from exporters.malachite.past import History
from exporters.malachite.wire import NS_PER_MS, real


class Waits:
    """Mean waits in milliseconds; zero where nobody waited, None where that is not known."""

    def __init__(self, now: Snapshot, history: History) -> None:
        self._by_cpu = _counted(now, history) or _probed(now, history) or _by_cpuset(now, history)

    def of(self, cpu: int) -> float | None:
        found = self._by_cpu.get(cpu)
        return None if found is None else _mean_ms(*found)

    def of_all(self) -> float | None:
        if not self._by_cpu:
            return None
        return _mean_ms(
            sum(waited for waited, _ in self._by_cpu.values()), sum(waits for _, waits in self._by_cpu.values())
        )


def _counted(now: Snapshot, history: History) -> dict[int, tuple[float, float]]:
    """Time and number of waits by CPU, of /proc/schedstat."""
    past, node = history.past, now.node
    found: dict[int, tuple[float, float]] = {}
    for cpu in node.timeslices if past is not None else ():
        assert past is not None
        waited = delta(past.run_delay_ns.get(cpu), node.run_delay_ns.get(cpu))
        waits = delta(past.timeslices.get(cpu), node.timeslices[cpu])
        if waited is not None and waits is not None:
            found[cpu] = (waited, waits)
    return found


def _probed(now: Snapshot, history: History) -> dict[int, tuple[float, float]]:
    """The same as our probe counted."""
    past = {} if history.past is None else history.past.cpu_waits
    found: dict[int, tuple[float, float]] = {}
    for cpu, wait in now.node.cpu_waits.items():
        before = past.get(cpu)
        if before is None:
            continue
        waited, waits = delta(before.sum_ns, wait.sum_ns), delta(before.count, wait.count)
        if waited is not None and waits is not None:
            found[cpu] = (waited, waits)
    return found


def _by_cpuset(now: Snapshot, history: History) -> dict[int, tuple[float, float]]:
    """The same from the waits of cgroups, spread evenly over the CPUs that each may use."""
    online = frozenset(now.topology.ids)
    found: dict[int, tuple[float, float]] = {}
    lists: dict[str | None, tuple[int, ...]] = {}
    for sample in now.cgroups.values():
        known = history.cgroup(sample)
        if sample.wait is None or known is None or known[1].wait is None:
            continue
        waited, waits = delta(known[1].wait[0], sample.wait.sum_ns), delta(known[1].wait[1], sample.wait.count)
        if waited is None or waits is None:
            continue
        text = sample.limits.cpus
        if text not in lists:
            lists[text] = _cpus(text, online)
        cpus = lists[text]
        for cpu in cpus:
            before = found.get(cpu, (0.0, 0.0))
            found[cpu] = (before[0] + waited / len(cpus), before[1] + waits / len(cpus))
    return found


def _cpus(text: str | None, online: frozenset[int]) -> tuple[int, ...]:
    try:
        allowed = online.intersection(parse_cpu_list(text or ""))
    except ValueError:
        allowed = frozenset()
    return tuple(sorted(allowed or online))


def _mean_ms(waited_ns: float, waits: float) -> float | None:
    return real(waited_ns / waits / NS_PER_MS) if waits else 0.0
