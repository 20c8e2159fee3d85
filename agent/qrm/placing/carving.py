"""From sizes of pools to their CPUs: disjoint but for what sizes say is shared, never empty, and with as few moves as can be.

Pools that are bound to a NUMA node choose first, then the others, on nodes that nobody is bound to while those have room;
reclaim has what is left. Whoever chooses takes CPUs that nobody used before those that reclaim has to give up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agent.qrm.placing.layout import Layout
from agent.qrm.placing.picking import NONE, pick, pick_in_turn
from agent.qrm.placing.sizing import Want
from agent.qrm.placing.state import DEDICATED, ISOLATION, RECLAIM
from api.advice import UNBOUND, PoolSize


@dataclass(frozen=True)
class Ground:
    """What pools are cut from."""

    layout: Layout
    free: frozenset[int]
    """CPUs that no dedicated container has."""
    usable: frozenset[int]
    """Those with theirs; never empty."""
    before: Mapping[str, frozenset[int]]
    """What each pool had."""
    bound: frozenset[int]
    """NUMA nodes that pools are bound to."""
    dedicated: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """CPUs of dedicated pods, by pod key, for sizes that let reclaim share them."""
    least: int = 1
    """CPUs that reclaim shares with others where it has none of its own."""
    owned: frozenset[int] = NONE
    """CPUs of NUMA nodes that one pod has for itself."""

    @property
    def everybody(self) -> frozenset[int]:
        """Where there is nothing to divide, all pods share."""
        return self.free or self.usable


def carve(wants: Sequence[Want], sizes: Sequence[PoolSize], ground: Ground) -> dict[str, frozenset[int]]:
    """CPUs of every pool, reclaim among them always."""
    pools: dict[str, frozenset[int]] = {}
    online = [want for want in wants if want.pool != RECLAIM]
    for node in sorted({want.numa for want in online if want.numa != UNBOUND}):
        here = ground.layout.on([node]) & ground.free
        used = NONE.union(*(ground.before.get(want.pool, NONE) for want in online if want.numa != node))
        _divide([want for want in online if want.numa == node], here, used, ground, pools)
    claimed = NONE.union(*pools.values())
    unbound = [want for want in online if want.numa == UNBOUND]
    left = ground.free - claimed
    first = left - ground.layout.on(ground.bound)
    enough = len(first) >= sum(want.cpus for want in unbound)
    _divide(unbound, first if enough else left, NONE if enough else left - first, ground, pools)
    reclaim = _reclaim(wants, sizes, {pool: cpus or ground.everybody for pool, cpus in pools.items()}, ground)
    overlaid = {name for size in sizes if size.pool == RECLAIM for name in size.overlap}
    # Who has to be on the CPUs of a pod that owns them all keeps off those that it lends, where pools are kept apart.
    apart = ground.everybody if ground.free else (ground.usable - reclaim or ground.usable)
    given = {pool: cpus or (ground.everybody if pool in overlaid else apart) for pool, cpus in pools.items()}
    return {**given, RECLAIM: reclaim}


def _divide(
    wants: Sequence[Want], here: frozenset[int], used: frozenset[int], ground: Ground, pools: dict[str, frozenset[int]]
) -> None:
    """Give each of these pools its CPUs out of `here`; `used` are those to be taken last."""
    kept: dict[str, frozenset[int]] = {}
    left = here
    for want in sorted(wants, key=lambda want: (want.pool, want.numa)):
        if want.shared:
            pools[want.pool] = pools.get(want.pool, NONE) | here
            continue
        kept[want.pool] = pick(ground.layout, want.cpus, ground.before.get(want.pool, NONE) & left)
        left -= kept[want.pool]
    for want in sorted(wants, key=lambda want: (want.pool, want.numa)):
        if not want.shared:
            mine = kept[want.pool]
            others = (used | ground.before.get(RECLAIM, NONE)) - mine
            chosen = pick(ground.layout, want.cpus, left | mine, mine, others)
            left -= chosen
            pools[want.pool] = pools.get(want.pool, NONE) | chosen


def _reclaim(
    wants: Sequence[Want], sizes: Sequence[PoolSize], pools: Mapping[str, frozenset[int]], ground: Ground
) -> frozenset[int]:
    layout, before = ground.layout, ground.before.get(RECLAIM, NONE)
    left = ground.free - NONE.union(*pools.values())
    chosen = NONE
    for want in sorted((want for want in wants if want.pool == RECLAIM), key=lambda want: -want.numa):
        here = left if want.numa == UNBOUND else left & layout.on([want.numa])
        far = layout.on(ground.bound) if want.numa == UNBOUND else NONE
        mine = pick(layout, want.cpus, here, before, far - before)
        owners = ground.owned & layout.on([want.numa])
        if len(mine) < want.cpus and want.numa != UNBOUND and owners:
            # The node belongs to one pod: what is lent there are its own CPUs.
            mine |= pick(layout, want.cpus - len(mine), owners, before)
        chosen |= mine
        left -= mine
    for size in sizes:
        if size.pool == RECLAIM:
            for name, count in sorted(size.overlap.items()):
                chosen |= pick(layout, count, _lender(name, size.numa, pools, ground) - chosen, before)
    if not chosen:
        # Reclaimed pods always have somewhere to run: beside online pods, where priority holds them back.
        apart = NONE.union(*(cpus for name, cpus in pools.items() if name.startswith(ISOLATION)))
        chosen = pick_in_turn(layout, ground.least, ground.free - apart or ground.everybody, before)
    return chosen


def _lender(name: str, numa: int, pools: Mapping[str, frozenset[int]], ground: Ground) -> frozenset[int]:
    """CPUs of the pool, or of the dedicated pod, of that name, with or without its node."""
    plain, _dash, node = name.removeprefix(f"{DEDICATED}-").rpartition("-NUMA")
    key = plain if node.isdigit() else name.removeprefix(f"{DEDICATED}-")
    cpus = pools.get(name) or ground.dedicated.get(key, NONE)
    nodes = [int(node)] if node.isdigit() and name not in pools else [numa] if numa != UNBOUND else None
    return cpus if nodes is None else cpus & ground.layout.on(nodes)
