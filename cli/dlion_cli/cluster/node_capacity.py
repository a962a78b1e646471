"""Estimates whether a site's nodes have the capacity for a job's workers.

Counts requests as the scheduler does, but ignores other pods. Places workers first-fit, so that
another order may place more; a `reason` means that no order places even one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, Final

from dlion_api.spec.sites import Group
from dlion_cli.cluster.documents import mapping_of, mappings_in
from dlion_operator.kubernetes.quantities import parse_quantity, pod_requests

Amounts = Mapping[str, Decimal]
"""Cores, bytes, devices or pods by resource name."""
_PODS: Final = "pods"


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
    pods: Sequence[tuple[Group, Mapping[str, Any]]], nodes: Sequence[Mapping[str, Any]]
) -> list[GroupCapacity]:
    """The capacity for each group; groups with the largest memory, then CPU requests are placed
    first.

    `pods`: each group with the spec of its pods. Tolerations are not evaluated: with any, they may
    use all tainted nodes.
    """
    free = [(node, _allocatable(node)) for node in nodes]
    places = []
    for group, pod in pods:
        usable = [left for node, left in free if _is_schedulable(node, pod) and left[_PODS] >= 1]
        request = _requests(pod)
        places.append((group, request, usable, _reason(usable, request)))
    by_group = {}
    places.sort(
        key=lambda place: [place[1].get(name, Decimal(0)) for name in ("memory", "cpu")],
        reverse=True,
    )
    for group, request, usable, reason in places:
        placed = sum(_place(usable, request) for _ in range(group.workers))
        by_group[group.name] = GroupCapacity(group.name, group.workers, placed, reason)
    return [by_group[group.name] for group, _ in pods]


def _allocatable(node: Mapping[str, Any]) -> dict[str, Decimal]:
    """What pods may use of the node; without a figure, any number of pods."""
    amounts = _amounts(mapping_of(node.get("status")).get("allocatable"))
    return {_PODS: Decimal("Infinity"), **amounts}


def _requests(pod: Mapping[str, Any]) -> Amounts:
    one = {_PODS: Decimal(1)}
    try:
        return {**pod_requests(pod), **one}
    except (AttributeError, TypeError, ValueError):  # the operator names it
        return one


def _amounts(document: object) -> Amounts:
    """The valid quantities of the document."""
    amounts = {}
    for name, value in mapping_of(document).items():
        try:
            amounts[str(name)] = parse_quantity(str(value))
        except ValueError:
            continue
    return amounts


def _is_schedulable(node: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    spec, status = mapping_of(node.get("spec")), mapping_of(node.get("status"))
    labels = mapping_of(mapping_of(node.get("metadata")).get("labels"))
    ready = any(
        each.get("type") == "Ready" and each.get("status") == "True"
        for each in mappings_in(status.get("conditions"))
    )
    taints = {str(each.get("effect")) for each in mappings_in(spec.get("taints"))}
    keeps_off = not taints.isdisjoint(("NoSchedule", "NoExecute"))
    chosen = mapping_of(pod.get("nodeSelector")).items() <= labels.items()
    tolerated = bool(pod.get("tolerations")) or not keeps_off
    return ready and chosen and not spec.get("unschedulable") and tolerated


def _reason(usable: Sequence[dict[str, Decimal]], request: Amounts) -> str:
    """Why no free node fits one worker."""
    if not usable:
        return (
            "no node is ready and free of taints, has the labels of nodeSelector and may run pods"
        )
    for name, amount in sorted(request.items()):
        most = max(left.get(name, Decimal(0)) for left in usable)
        if amount > most:
            return (
                f"a worker requests {name} {_format_amount(amount, ROUND_CEILING)}, "
                f"no node has more than {_format_amount(most, ROUND_FLOOR)}"
            )
    if any(_fits(left, request) for left in usable):
        return ""
    amounts = sorted((name, amount) for name, amount in request.items() if name != _PODS)
    wanted = (f"{name} {_format_amount(amount, ROUND_CEILING)}" for name, amount in amounts)
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
