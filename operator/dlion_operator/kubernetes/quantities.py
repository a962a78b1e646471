"""Numbers of Kubernetes quantities such as `500m` and `1.5Gi`, and what pods request."""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from dlion_api.document.scalars import MAX_QUANTITY_LENGTH, QUANTITY

_OF_WHOLE_PODS: Final = re.compile("cpu|memory|hugepages-.*")
"""The resources that Kubernetes counts by pod where `spec.resources` names them."""
_MAX_QUANTITY: Final = Decimal(2**63 - 1)
"""Kubernetes caps larger quantities at this value."""


def parse_quantity(text: str) -> Decimal:
    """The number in the resource's base unit: cores, bytes, devices. Raises: ValueError.

    >>> parse_quantity("500m"), parse_quantity("1.5Gi"), parse_quantity("1e3")
    (Decimal('0.500'), Decimal('1610612736.0'), Decimal('1E+3'))
    """
    from kubernetes import utils

    parser: Any = utils  # its functions have no types
    # Kubernetes' pattern first: the parser also accepts NaN and the like.
    if len(text) > MAX_QUANTITY_LENGTH or not re.fullmatch(QUANTITY, text):
        raise ValueError(f"{text[:MAX_QUANTITY_LENGTH]!r} is not a quantity")
    try:
        number: Decimal = parser.parse_quantity(text)
    except ValueError:  # the pattern allows a fractional exponent
        raise ValueError(f"{text!r} is not a quantity") from None
    return max(-_MAX_QUANTITY, min(number, _MAX_QUANTITY))


def pod_requests(pod: Mapping[str, Any]) -> Mapping[str, Decimal]:
    """Return what a pod of this spec requests, in cores, bytes and devices, as the scheduler and
    Kueue count it.

    Its containers and sidecars run together, its other init containers one by one before them. What
    `spec.resources` requests for the whole pod comes first. Its limits are the API server's
    defaults: of huge pages always, else where no container requests any.

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
    counted = _larger(most, together)
    resources = pod.get("resources") or {}
    limits, requests = (_of_whole_pod(resources.get(each)) for each in ("limits", "requests"))
    defaults = {
        name: amount
        for name, amount in limits.items()
        if name.startswith("hugepages-") or name not in counted
    }
    return {**counted, **defaults, **requests}


def _of_whole_pod(given: Mapping[str, Any] | None) -> dict[str, Decimal]:
    return {
        name: parse_quantity(str(amount))
        for name, amount in (given or {}).items()
        if _OF_WHOLE_PODS.fullmatch(name)
    }


def _sum(amounts: Mapping[str, Decimal], container: Mapping[str, Any]) -> dict[str, Decimal]:
    """Add the requests of the container; its limit is its default request."""
    resources = container.get("resources") or {}
    given = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    added = {name: parse_quantity(str(amount)) for name, amount in given.items()}
    return {**amounts, **{name: amounts.get(name, 0) + added[name] for name in added}}


def _larger(one: Mapping[str, Decimal], other: Mapping[str, Decimal]) -> dict[str, Decimal]:
    none = Decimal(0)
    return {name: max(one.get(name, none), other.get(name, none)) for name in {**one, **other}}
