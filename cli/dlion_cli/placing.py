"""Whether a site's machines are large enough for a job's workers, by what nodes can give.

Called by `site_room`. Counts requests as the scheduler does, but not what other pods have: room
that is found may be taken. Each worker gets the first node that will do: where not all have room
another order might have placed more; where there is a reason no order places even one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from dlion_cli.cluster import quantity

if TYPE_CHECKING:
    from dlion_api.spec.sites import Group

Amounts = Mapping[str, Decimal]
"""Cores, bytes or devices by the resource's name."""


@dataclass(frozen=True)
class Room:
    """What is there for one group."""

    group: str
    wanted: int
    placed: int
    """Workers that found room beside those of earlier groups."""
    reason: str = ""
    """Why no node will do for even one worker; empty where one will."""


def rooms(
    groups: Sequence[Group],
    sidecar: Mapping[str, Any],
    nodes: Sequence[Mapping[str, Any]],
    *,
    bears_taints: bool,
) -> list[Room]:
    """The room for each group, those whose workers ask for most memory, then cores, placed first.

    `sidecar` is the resources of the container beside each trainer. With `bears_taints` nodes that
    are tainted will do too: the job's pod template has tolerations, which are not judged here.
    """
    free = [
        (node, dict(_amounts(_mapping(node.get("status")).get("allocatable")))) for node in nodes
    ]
    places = []
    for group in groups:
        usable = [left for node, left in free if _will_do(node, group, bears_taints)]
        asked = _asked(group, sidecar)
        places.append((group, asked, usable, _reason(usable, asked)))
    found = {}
    for group, asked, usable, reason in sorted(places, key=_size, reverse=True):
        placed = sum(_place(usable, asked) for _ in range(group.workers))
        found[group.name] = Room(group.name, group.workers, placed, reason)
    return [found[group.name] for group in groups]


def _size(place: tuple[Group, Amounts, object, object]) -> tuple[Decimal, Decimal]:
    """Bytes, then cores, of one worker."""
    return place[1].get("memory", Decimal(0)), place[1].get("cpu", Decimal(0))


def _asked(group: Group, sidecar: Mapping[str, Any]) -> Amounts:
    """Of one pod. Of a container without a request its limit counts, as Kubernetes has it."""
    total = dict(_amounts({**group.resources.limits, **group.resources.requests}))
    beside = {**_mapping(sidecar.get("limits")), **_mapping(sidecar.get("requests"))}
    for name, amount in _amounts(beside).items():
        total[name] = total.get(name, Decimal(0)) + amount
    return total


def _amounts(document: object) -> Amounts:
    """What can be read of it; the rest counts for nothing."""
    amounts = {}
    for name, value in _mapping(document).items():
        try:
            amounts[str(name)] = quantity(str(value))
        except ValueError:
            continue
    return amounts


def _will_do(node: Mapping[str, Any], group: Group, bears_taints: bool) -> bool:
    spec, status = _mapping(node.get("spec")), _mapping(node.get("status"))
    labels = _mapping(_mapping(node.get("metadata")).get("labels"))
    ready = any(
        _mapping(each).get("type") == "Ready" and _mapping(each).get("status") == "True"
        for each in status.get("conditions") or ()
    )
    keeps_off = any(
        _mapping(each).get("effect") in ("NoSchedule", "NoExecute")
        for each in spec.get("taints") or ()
    )
    chosen = group.node_selector.items() <= labels.items()
    return ready and chosen and not spec.get("unschedulable") and (bears_taints or not keeps_off)


def _reason(usable: Sequence[dict[str, Decimal]], asked: Amounts) -> str:
    """Why none of these has room for one worker, before any is taken."""
    if not usable:
        return "no node is ready, free of taints and has the labels of nodeSelector"
    for name, amount in sorted(asked.items()):
        most = max(left.get(name, Decimal(0)) for left in usable)
        if amount > most:
            return (
                f"a worker asks for {name} {_shown(amount)}, no node has more than {_shown(most)}"
            )
    return ""


def _place(usable: Sequence[dict[str, Decimal]], asked: Amounts) -> bool:
    """Takes the room of one worker where it is; whether it was."""
    for left in usable:
        if all(left.get(name, Decimal(0)) >= amount for name, amount in asked.items()):
            for name, amount in asked.items():
                left[name] = left.get(name, Decimal(0)) - amount
            return True
    return False


def _shown(amount: Decimal) -> str:
    """As a person would write it: bytes in Mi, cores in decimals."""
    if amount >= 1024**2:
        return f"{amount / 1024**2:.0f}Mi"
    return f"{amount.normalize():f}"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
