"""Decides network classes by QoS level, and accounts the bandwidth that pods request on each network card. Pure.
The account limits no traffic: it shows how much of each card is allocated, and which requests no card can hold.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.config.qrm import NetworkQosConfig
from api.advice import NETWORK_SPEED_UNKNOWN, NO_BANDWIDTH, NO_NETWORK_CARD, KnobRequest, NicBandwidth
from api.knobs import Knob, Reason
from api.pod import Pod
from api.qos import NIC_SELECTION_KEY
from api.snapshot import Interface, Snapshot


class NetworkAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """Every card of known speed with its allocated bandwidth, rejected requests by pod, and the card of each pod."""

    cards: tuple[NicBandwidth, ...] = ()
    rejected: Mapping[str, Reason] = {}
    card_by_pod: Mapping[str, str] = {}


def net_class_requests(snapshot: Snapshot, config: NetworkQosConfig) -> tuple[KnobRequest, ...]:
    """Return `net_cls.classid` of every container whose QoS level has a class."""
    return tuple(
        KnobRequest(
            cgroup=container.cgroup,
            knob=Knob.NET_CLASS,
            value=str(config.class_ids[pod.qos]),
            reason=Reason(
                rule="net_class", text=f"Packets of {pod.qos.value} are of class {config.class_ids[pod.qos]}."
            ),
        )
        for pod in snapshot.pods
        if pod.qos in config.class_ids
        for container in pod.containers
    )


def allocate_bandwidth(snapshot: Snapshot, config: NetworkQosConfig, previous: Mapping[str, str]) -> NetworkAllocation:
    """Allocate the requested bandwidth to cards; `previous` is the card by pod of the cycle before. A pod keeps its
    card as long as the card holds the request. A card named by nic_selection_result is the only candidate for its
    pod."""
    requests = {pod.key: (pod, mbit) for pod in snapshot.pods if (mbit := requested_mbit(pod))}
    interfaces = snapshot.node.interfaces
    cards = {card.name: card for card in usable_cards(interfaces, config)}
    if not cards:
        # Interfaces that could not be read are no reason to withdraw a card.
        retained = {key: previous[key] for key in requests if key in previous} if not interfaces else {}
        rejected = {key: _speed_unknown_reason(requests[key][1]) for key in requests.keys() - retained.keys()}
        return NetworkAllocation(rejected=rejected, card_by_pod=retained)
    rejected, card_by_pod = {}, dict[str, str]()
    for key in sorted(
        requests, key=lambda key: NIC_SELECTION_KEY not in requests[key][0].annotations and key not in previous
    ):
        pod, mbit = requests[key]
        card, reason = _select_card_for_pod(cards, mbit, pod.annotations.get(NIC_SELECTION_KEY), previous.get(key))
        if card is None:
            rejected[key] = reason
            continue
        card_by_pod[key] = card.name
        cards[card.name] = msgspec.structs.replace(
            card, allocated_mbit=card.allocated_mbit + mbit, pods={**card.pods, key: mbit}
        )
    return NetworkAllocation(cards=tuple(cards.values()), rejected=rejected, card_by_pod=card_by_pod)


def requested_mbit(pod: Pod) -> int:
    """Return the bandwidth of all containers of the pod, which share its interface."""
    return sum(container.net_bandwidth_mbit or 0 for container in pod.containers)


def usable_cards(interfaces: Mapping[str, Interface], config: NetworkQosConfig) -> tuple[NicBandwidth, ...]:
    """Return every card of known speed, with nothing allocated. Of bonded interfaces only the bond counts."""
    return tuple(
        NicBandwidth(
            name=name,
            speed=interface.speed_mbit,
            egress_capacity=_capacity(interface.speed_mbit, config.egress_rate, config),
            ingress_capacity=_capacity(interface.speed_mbit, config.ingress_rate, config),
        )
        for name, interface in sorted(interfaces.items())
        if interface.speed_mbit is not None and interface.speed_mbit > 0 and name != "lo" and not interface.bonded
    )


def _capacity(speed_mbit: int, rate: float, config: NetworkQosConfig) -> int:
    # Rounded first: 0.94 of a round speed is a round number, whatever binary fractions make of it.
    return max(int(round(speed_mbit * rate, 6)) - config.reserved_mbit, 0)


def _select_card_for_pod(
    cards: Mapping[str, NicBandwidth], mbit: int, named: str | None, previous: str | None
) -> tuple[NicBandwidth | None, Reason]:
    if named is not None and named not in cards:
        text = f"nic_selection_result names {named:.40}, which is no card of known speed here; choose from {', '.join(cards)}."
        return None, Reason(rule=NO_NETWORK_CARD, text=text, threshold=mbit)
    if named is None and previous is not None and previous in cards and cards[previous].free >= mbit:
        named = previous
    return select_card((cards[named],) if named is not None else tuple(cards.values()), mbit)


def select_card(cards: tuple[NicBandwidth, ...], request_mbit: int) -> tuple[NicBandwidth | None, Reason]:
    """Return the card with the most free bandwidth; None if no card can hold the request; each with the reason."""
    free = {card.name: card.free for card in cards}
    best = max(cards, key=lambda card: (card.free, card.name), default=None)
    if best is None or best.free < request_mbit:
        listed = ", ".join(f"{card.name} {card.free} of {card.capacity}" for card in cards)
        text = f"No network card has {request_mbit} Mbit/s left in both directions: {listed}."
        return None, Reason(rule=NO_BANDWIDTH, text=text, threshold=request_mbit, inputs=free)
    text = f"{best.name} has {best.free} Mbit/s left in both directions; the pod requests {request_mbit}."
    return best, Reason(rule="bandwidth", text=text, threshold=request_mbit, inputs=free)


def _speed_unknown_reason(mbit: int) -> Reason:
    text = f"The pod requests {mbit} Mbit/s, and the speed of no network card is known."
    return Reason(rule=NETWORK_SPEED_UNKNOWN, text=text, threshold=mbit)
