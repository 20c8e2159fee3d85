"""What the settings ask of knobs beside CPU pools: burst, Koordinator's suppress and memory QoS, disks, network. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from agent.config.qrm_knobs import KnobsConfig
from agent.qrm.burst import BurstMemory, koordinator_burst, static_burst
from agent.qrm.io import io_wishes
from agent.qrm.memory import memory_qos
from agent.qrm.network import Bandwidth, class_wishes, promise
from agent.qrm.strategies import SuppressMemory, suppress
from api.advice import Wish
from api.rates import rates
from api.samples import Snapshot


class AskedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of earlier rounds."""

    burst: BurstMemory = BurstMemory()
    suppress: SuppressMemory = SuppressMemory()
    cards: Mapping[str, str] = {}
    """Network cards by the pod that they are promised to."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Wishes, the cgroups whose quota may go above what the owner set, and the account of network cards."""

    wishes: tuple[Wish, ...] = ()
    loosen: frozenset[str] = frozenset()
    bandwidth: Bandwidth = Bandwidth()


def ask(
    snapshot: Snapshot,
    previous: Snapshot | None,
    config: KnobsConfig,
    memory: AskedMemory,
    excluded: Collection[int] = (),
) -> tuple[Asked, AskedMemory]:
    """One round; with settings that ask for nothing, nothing but the account of network cards. `excluded` are CPUs that
    reclaimed pods must not be sent to."""
    bandwidth = promise(snapshot, config.network, memory.cards)
    wishes = (
        *memory_qos(snapshot, config.memory_qos),
        *io_wishes(snapshot, config.io),
        *class_wishes(snapshot, config.network),
    )
    loosen = frozenset[str]()
    if config.burst.policy == "katalyst":
        wishes += static_burst(snapshot, config.burst)
    if config.burst.policy != "koordinator" and config.suppress.policy == "off":
        return Asked(wishes=wishes, bandwidth=bandwidth), AskedMemory(cards=bandwidth.chosen)
    change = rates(previous, snapshot) if previous is not None else None
    suppressed, suppress_memory = suppress(snapshot, change, config.suppress, memory.suppress, excluded)
    burst_memory = BurstMemory()
    if config.burst.policy == "koordinator":
        burst, burst_memory = koordinator_burst(snapshot, change, config.burst.koordinator, memory.burst)
        suppressed, loosen = (*suppressed, *burst.wishes), burst.loosen
    asked = Asked(wishes=(*suppressed, *wishes), loosen=loosen, bandwidth=bandwidth)
    return asked, AskedMemory(burst=burst_memory, suppress=suppress_memory, cards=bandwidth.chosen)
