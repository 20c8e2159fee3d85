"""QRM's network side: classes of packets by level, and how much of each card can be promised. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.config.qrm_knobs import NetworkConfig
from api.advice import Wish
from api.facts import Interface
from api.knobs import Knob, Verdict
from api.samples import Snapshot


class CardBandwidth(msgspec.Struct, frozen=True, kw_only=True):
    """One card, in Mbit/s."""

    name: str
    speed: int
    egress_capacity: int
    """What can be promised outwards: Katalyst's part of the speed, less what is reserved."""
    ingress_capacity: int
    promised: int
    """To the pods that were given this card."""

    @property
    def egress_free(self) -> int:
        """What may still be promised outwards."""
        return max(self.egress_capacity - self.promised, 0)

    @property
    def ingress_free(self) -> int:
        """And inwards: a promise holds both ways."""
        return max(self.ingress_capacity - self.promised, 0)


def class_wishes(snapshot: Snapshot, config: NetworkConfig) -> tuple[Wish, ...]:
    """net_cls.classid of every container whose level has one."""
    return tuple(
        Wish(
            cgroup=container.cgroup,
            knob=Knob.NET_CLASS,
            value=str(config.class_ids[pod.qos]),
            verdict=Verdict(
                rule="net_class", text=f"Packets of {pod.qos.value} are of class {config.class_ids[pod.qos]}."
            ),
        )
        for pod in snapshot.pods
        if pod.qos in config.class_ids
        for container in pod.containers
    )


def cards(
    interfaces: Mapping[str, Interface], promised: Mapping[str, int], config: NetworkConfig
) -> tuple[CardBandwidth, ...]:
    """Every card whose speed is known, with what was promised on it. A card of unknown speed can promise nothing."""
    return tuple(
        CardBandwidth(
            name=name,
            speed=interface.speed_mbit,
            egress_capacity=_capacity(interface.speed_mbit, config.egress_rate, config),
            ingress_capacity=_capacity(interface.speed_mbit, config.ingress_rate, config),
            promised=promised.get(name, 0),
        )
        for name, interface in sorted(interfaces.items())
        if interface.speed_mbit is not None and interface.speed_mbit > 0 and name != "lo"
    )


def _capacity(speed_mbit: int, rate: float, config: NetworkConfig) -> int:
    # Rounded first: 0.94 of a round speed is a round number, whatever binary fractions make of it.
    return max(int(round(speed_mbit * rate, 6)) - config.reserved_mbit, 0)


def choose_card(found: tuple[CardBandwidth, ...], request_mbit: int) -> tuple[CardBandwidth | None, Verdict]:
    """The card that has most left for a request; None where no card has enough, with the reason."""
    fitting = [card for card in found if min(card.egress_free, card.ingress_free) >= request_mbit]
    best = max(fitting, key=lambda card: (min(card.egress_free, card.ingress_free), card.name), default=None)
    left = {card.name: min(card.egress_free, card.ingress_free) for card in found}
    if best is None:
        shown = ", ".join(f"{name} {free}" for name, free in left.items()) or "none of known speed"
        text = f"No card has {request_mbit} Mbit/s left both ways: {shown}."
        return None, Verdict(rule="no_bandwidth", text=text, threshold=request_mbit, inputs=left)
    text = f"{best.name} has {left[best.name]} Mbit/s left both ways, {request_mbit} are asked for."
    return best, Verdict(rule="bandwidth", text=text, threshold=request_mbit, inputs=left)
