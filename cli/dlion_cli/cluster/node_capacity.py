"""Estimates whether a site's nodes have the capacity for a job's workers.

Counts requests as the scheduler does, but ignores other pods. Places workers first-fit, so that
another order may place more; a `reason` means that no order places even one.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from dlion_api.spec.sites import Group
from dlion_cli.cluster.documents import mapping_of, mappings_in
from dlion_operator.kubernetes.quantities import parse_quantity

Amounts = Mapping[str, Decimal]
"""Cores, bytes or devices by resource name."""


@dataclass(frozen=True)
class GroupCapacity:
    """The estimate for one group."""

    group: str
    requested: int
    placed: int
    """Workers that fit beside those of groups placed earlier."""
    reason: str = ""
    """Why no node fits even one worker; empty if one does."""


def group_capacities(
    groups: Sequence[Group],
    sidecar: Mapping[str, Any],
    nodes: Sequence[Mapping[str, Any]],
    *,
    tolerant: Collection[str] = (),
) -> list[GroupCapacity]:
    """The capacity for each group; groups with the largest memory, then CPU requests are placed
    first.

    `sidecar`: resources of the container beside each trainer. `tolerant`: groups that may also use
    tainted nodes, because their pod template has tolerations, which are not evaluated.
    """
    free = [
        (node, dict(_amounts(mapping_of(node.get("status")).get("allocatable")))) for node in nodes
    ]
    places = []
    for group in groups:
        usable = [left for node, left in free if _is_schedulable(node, group, tolerant)]
        request = _worker_request(group, sidecar)
        places.append((group, request, usable, _reason(usable, request)))
    by_group = {}
    places.sort(
        key=lambda place: [place[1].get(name, Decimal(0)) for name in ("memory", "cpu")],
        reverse=True,
    )
    for group, request, usable, reason in places:
        placed = sum(_place(usable, request) for _ in range(group.workers))
        by_group[group.name] = GroupCapacity(group.name, group.workers, placed, reason)
    return [by_group[group.name] for group in groups]


def _worker_request(group: Group, sidecar: Mapping[str, Any]) -> Amounts:
    """Requests of one pod; a container's limit is its default request, as in Kubernetes."""
    total = dict(_amounts({**group.resources.limits, **group.resources.requests}))
    beside = {**mapping_of(sidecar.get("limits")), **mapping_of(sidecar.get("requests"))}
    for name, amount in _amounts(beside).items():
        total[name] = total.get(name, Decimal(0)) + amount
    return total


def _amounts(document: object) -> Amounts:
    """The valid quantities of the document."""
    amounts = {}
    for name, value in mapping_of(document).items():
        try:
            amounts[str(name)] = parse_quantity(str(value))
        except ValueError:
            continue
    return amounts


def _is_schedulable(node: Mapping[str, Any], group: Group, tolerant: Collection[str]) -> bool:
    spec, status = mapping_of(node.get("spec")), mapping_of(node.get("status"))
    labels = mapping_of(mapping_of(node.get("metadata")).get("labels"))
    ready = any(
        each.get("type") == "Ready" and each.get("status") == "True"
        for each in mappings_in(status.get("conditions"))
    )
    taints = {str(each.get("effect")) for each in mappings_in(spec.get("taints"))}
    keeps_off = not taints.isdisjoint(("NoSchedule", "NoExecute"))
    chosen = group.node_selector.items() <= labels.items()
    tolerated = group.name in tolerant or not keeps_off
    return ready and chosen and not spec.get("unschedulable") and tolerated


def _reason(usable: Sequence[dict[str, Decimal]], request: Amounts) -> str:
    """Why no free node fits one worker."""
    if not usable:
        return "no node is ready, free of taints and has the labels of nodeSelector"
    for name, amount in sorted(request.items()):
        most = max(left.get(name, Decimal(0)) for left in usable)
        if amount > most:
            return (
                f"a worker requests {name} {_format_amount(amount, ROUND_CEILING)}, "
                f"no node has more than {_format_amount(most, ROUND_FLOOR)}"
            )
    if any(_fits(left, request) for left in usable):
        return ""
    wanted = (f"{n} {_format_amount(a, ROUND_CEILING)}" for n, a in sorted(request.items()))
    return f"a worker requests {', '.join(wanted)}, no node has all of it"


def _place(usable: Sequence[dict[str, Decimal]], request: Amounts) -> bool:
    """Place one worker on the first node that fits it; whether there is one."""
    for left in usable:
        if _fits(left, request):
            for name, amount in request.items():
                left[name] = left.get(name, Decimal(0)) - amount
            return True
    return False


def _fits(left: Mapping[str, Decimal], request: Amounts) -> bool:
    return all(left.get(name, Decimal(0)) >= amount for name, amount in request.items())


def _format_amount(amount: Decimal, rounding: str) -> str:
    """Whole Mi of bytes, rounded so that a request never looks equal to less; cores as decimals."""
    if amount >= 1024**2:
        return f"{(amount / 1024**2).to_integral_value(rounding)}Mi"
    return f"{amount.normalize():f}"
