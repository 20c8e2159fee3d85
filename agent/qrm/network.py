"""QRM's network side: classes of packets by level, and which bandwidth of which card pods are promised. Pure.

A promise is an account and holds nobody to it: pods run already, and their traffic takes the way that their addresses have.
It says how much of each card is spoken for, and whose request no card can hold.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.config.qrm_knobs import NetworkConfig
from api.advice import NO_BANDWIDTH, NO_CARD, SPEED_UNKNOWN, CardBandwidth, Wish
from api.facts import Interface
from api.knobs import Knob, Verdict
from api.pods import Pod
from api.qos import NIC_SELECTION_KEY
from api.samples import Snapshot


class Bandwidth(msgspec.Struct, frozen=True, kw_only=True):
    """Every card whose speed is known, with what is promised on it; whose request none can hold; who has which card."""

    cards: tuple[CardBandwidth, ...] = ()
    rejected: Mapping[str, Verdict] = {}
    chosen: Mapping[str, str] = {}


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


def promise(snapshot: Snapshot, config: NetworkConfig, known: Mapping[str, str]) -> Bandwidth:
    """The account of one round. `known` is who had which card in the round before: whoever has one keeps it as long as it
    holds the request, and a card that nic_selection_result names is the only one for that pod."""
    asks = {pod.key: (pod, mbit) for pod in snapshot.pods if (mbit := requested_mbit(pod))}
    interfaces = snapshot.node.interfaces
    found = {card.name: card for card in cards(interfaces, config)}
    if not found:
        # Not seeing the cards takes nothing from anybody who has one.
        kept = {key: known[key] for key in asks if key in known} if not interfaces else {}
        return Bandwidth(rejected={key: _unknown(asks[key][1]) for key in asks.keys() - kept.keys()}, chosen=kept)
    rejected: dict[str, Verdict] = {}
    chosen: dict[str, str] = {}
    first = sorted(asks, key=lambda key: NIC_SELECTION_KEY not in asks[key][0].annotations and key not in known)
    for key in first:
        pod, mbit = asks[key]
        named = pod.annotations.get(NIC_SELECTION_KEY)
        card, verdict = _choose(found, mbit, named, known.get(key))
        if card is None:
            rejected[key] = verdict
            continue
        chosen[key] = card.name
        found[card.name] = msgspec.structs.replace(card, promised=card.promised + mbit, pods={**card.pods, key: mbit})
    return Bandwidth(cards=tuple(found.values()), rejected=rejected, chosen=chosen)


def requested_mbit(pod: Pod) -> int:
    """What all of its containers ask for together: they share the pod's interface."""
    return sum(container.net_bandwidth_mbit or 0 for container in pod.containers)


def cards(interfaces: Mapping[str, Interface], config: NetworkConfig) -> tuple[CardBandwidth, ...]:
    """Every card whose speed is known, with nothing promised. A card of unknown speed can promise nothing, and of bonded
    ones the bond does."""
    return tuple(
        CardBandwidth(
            name=name,
            speed=interface.speed_mbit,
            egress_capacity=_capacity(interface.speed_mbit, config.egress_rate, config),
            ingress_capacity=_capacity(interface.speed_mbit, config.ingress_rate, config),
        )
        for name, interface in sorted(interfaces.items())
        if interface.speed_mbit is not None and interface.speed_mbit > 0 and name != "lo" and not interface.bonded
    )


def _capacity(speed_mbit: int, rate: float, config: NetworkConfig) -> int:
    # Rounded first: 0.94 of a round speed is a round number, whatever binary fractions make of it.
    return max(int(round(speed_mbit * rate, 6)) - config.reserved_mbit, 0)


def _choose(
    found: Mapping[str, CardBandwidth], mbit: int, named: str | None, had: str | None
) -> tuple[CardBandwidth | None, Verdict]:
    if named is not None and named not in found:
        text = f"nic_selection_result names {named:.40}, which is no card of known speed here; there is {', '.join(found)}."
        return None, Verdict(rule=NO_CARD, text=text, threshold=mbit)
    if named is None and had is not None and had in found and found[had].free >= mbit:
        named = had
    return choose_card((found[named],) if named is not None else tuple(found.values()), mbit)


def choose_card(found: tuple[CardBandwidth, ...], request_mbit: int) -> tuple[CardBandwidth | None, Verdict]:
    """The card that has most left for a request; None where no card has enough, with the reason."""
    best = max(
        (card for card in found if card.free >= request_mbit), key=lambda card: (card.free, card.name), default=None
    )
    left = {card.name: card.free for card in found}
    if best is None:
        shown = ", ".join(f"{card.name} {card.free} of {card.capacity}" for card in found)
        text = f"No card has {request_mbit} Mbit/s left both ways: {shown}."
        return None, Verdict(rule=NO_BANDWIDTH, text=text, threshold=request_mbit, inputs=left)
    text = f"{best.name} has {best.free} Mbit/s left both ways, {request_mbit} are asked for."
    return best, Verdict(rule="bandwidth", text=text, threshold=request_mbit, inputs=left)


def _unknown(mbit: int) -> Verdict:
    text = f"{mbit} Mbit/s are asked for, and the speed of no network card is known here."
    return Verdict(rule=SPEED_UNKNOWN, text=text, threshold=mbit)
