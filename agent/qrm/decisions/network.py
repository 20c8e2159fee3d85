"""Decides network classes by QoS level, and accounts the bandwidth that pods request on each network card. Pure.
The account limits no traffic: it shows how much of each card is allocated, and which requests no card can hold.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.config.qrm import NetworkQosConfig
from api.advice import NETWORK_SPEED_UNKNOWN, NO_BANDWIDTH, NO_NETWORK_CARD, KnobRequest, NicBandwidth
from api.knobs import Knob, Reason
from api.measurements import Interface
from api.pod import Pod
from api.qos import NIC_SELECTION_KEY
from api.snapshot import Snapshot


class NetworkAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """Every card whose speed is known, with what is promised on it; whose request none can hold; who has which card."""

    cards: tuple[NicBandwidth, ...] = ()
    rejected: Mapping[str, Reason] = {}
    chosen: Mapping[str, str] = {}


def net_class_requests(snapshot: Snapshot, config: NetworkQosConfig) -> tuple[KnobRequest, ...]:
    """net_cls.classid of every container whose level has one."""
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


def allocate_bandwidth(snapshot: Snapshot, config: NetworkQosConfig, known: Mapping[str, str]) -> NetworkAllocation:
    """The account of one round. `known` is who had which card in the round before: whoever has one keeps it as long as it
    holds the request, and a card that nic_selection_result names is the only one for that pod."""
    asks = {pod.key: (pod, mbit) for pod in snapshot.pods if (mbit := requested_mbit(pod))}
    interfaces = snapshot.node.interfaces
    found = {card.name: card for card in usable_cards(interfaces, config)}
    if not found:
        # Not seeing the cards takes nothing from anybody who has one.
        kept = {key: known[key] for key in asks if key in known} if not interfaces else {}
        return NetworkAllocation(
            rejected={key: _speed_unknown_reason(asks[key][1]) for key in asks.keys() - kept.keys()}, chosen=kept
        )
    rejected: dict[str, Reason] = {}
    chosen: dict[str, str] = {}
    first = sorted(asks, key=lambda key: NIC_SELECTION_KEY not in asks[key][0].annotations and key not in known)
    for key in first:
        pod, mbit = asks[key]
        named = pod.annotations.get(NIC_SELECTION_KEY)
        card, verdict = _select_card_for_pod(found, mbit, named, known.get(key))
        if card is None:
            rejected[key] = verdict
            continue
        chosen[key] = card.name
        found[card.name] = msgspec.structs.replace(
            card, allocated_mbit=card.allocated_mbit + mbit, pods={**card.pods, key: mbit}
        )
    return NetworkAllocation(cards=tuple(found.values()), rejected=rejected, chosen=chosen)


def requested_mbit(pod: Pod) -> int:
    """What all of its containers ask for together: they share the pod's interface."""
    return sum(container.net_bandwidth_mbit or 0 for container in pod.containers)


def usable_cards(interfaces: Mapping[str, Interface], config: NetworkQosConfig) -> tuple[NicBandwidth, ...]:
    """Every card whose speed is known, with nothing promised. A card of unknown speed can promise nothing, and of bonded
    ones the bond does."""
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
    found: Mapping[str, NicBandwidth], mbit: int, named: str | None, process_scores: str | None
) -> tuple[NicBandwidth | None, Reason]:
    if named is not None and named not in found:
        text = f"nic_selection_result names {named:.40}, which is no card of known speed here; there is {', '.join(found)}."
        return None, Reason(rule=NO_NETWORK_CARD, text=text, threshold=mbit)
    if named is None and process_scores is not None and process_scores in found and found[process_scores].free >= mbit:
        named = process_scores
    return select_card((found[named],) if named is not None else tuple(found.values()), mbit)


def select_card(found: tuple[NicBandwidth, ...], request_mbit: int) -> tuple[NicBandwidth | None, Reason]:
    """The card that has most left for a request; None where no card has enough, with the reason."""
    best = max(
        (card for card in found if card.free >= request_mbit), key=lambda card: (card.free, card.name), default=None
    )
    left = {card.name: card.free for card in found}
    if best is None:
        shown = ", ".join(f"{card.name} {card.free} of {card.capacity}" for card in found)
        text = f"No card has {request_mbit} Mbit/s left both ways: {shown}."
        return None, Reason(rule=NO_BANDWIDTH, text=text, threshold=request_mbit, inputs=left)
    text = f"{best.name} has {best.free} Mbit/s left both ways, {request_mbit} are asked for."
    return best, Reason(rule="bandwidth", text=text, threshold=request_mbit, inputs=left)


def _speed_unknown_reason(mbit: int) -> Reason:
    text = f"{mbit} Mbit/s are asked for, and the speed of no network card is known here."
    return Reason(rule=NETWORK_SPEED_UNKNOWN, text=text, threshold=mbit)
