"""What pods request of a node, as the scheduler and Kueue count it."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from dlion_operator.kubernetes.quantities import parse_quantity


def pod_requests(pod: Mapping[str, Any]) -> Mapping[str, Decimal]:
    """Return what a pod of this spec requests, in cores, bytes and devices.

    Its containers and sidecars run together, its other init containers one by one before them.

    >>> pod_requests({"containers": [{"resources": {"limits": {"cpu": "2"}}}]})
    {'cpu': Decimal('2')}

    Raises: ValueError, TypeError or AttributeError if the spec is malformed.
    """
    together: dict[str, Decimal] = {}
    most: dict[str, Decimal] = {}
    for container in pod.get("initContainers") or ():
        if container.get("restartPolicy") == "Always":
            together = _sum(together, container)
        else:
            most = _larger(most, _sum(together, container))
    for container in pod.get("containers") or ():
        together = _sum(together, container)
    return _larger(most, together)


def _sum(amounts: Mapping[str, Decimal], container: Mapping[str, Any]) -> dict[str, Decimal]:
    """Add the requests of the container; its limit is its default request."""
    resources = container.get("resources") or {}
    given = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    added = {name: parse_quantity(str(amount)) for name, amount in given.items()}
    return {**amounts, **{name: amounts.get(name, 0) + added[name] for name in added}}


def _larger(one: Mapping[str, Decimal], other: Mapping[str, Decimal]) -> dict[str, Decimal]:
    none = Decimal(0)
    return {name: max(one.get(name, none), other.get(name, none)) for name in {**one, **other}}
