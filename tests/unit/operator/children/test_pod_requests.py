"""Test the resource requests of a pod, as Kubernetes counts them.

Containers and sidecars are summed. An init container counts if it needs more, with the sidecars
before it. A limit is the default request. Malformed specs are refused.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from dlion_operator.kubernetes.quantities import pod_requests


def container(cpu: str, **more: Any) -> dict[str, Any]:
    return {"resources": {"requests": {"cpu": cpu}}, **more}


def test_sidecars_run_beside_containers_and_after_init_containers() -> None:
    early, late = (container(cpu, restartPolicy="Always") for cpu in ("500m", "3"))
    pod = {"initContainers": [early, container("2"), late], "containers": [container("1")]}
    assert pod_requests(pod) == {"cpu": Decimal("4.5")}
    pod["initContainers"][1] = container("4.5")
    assert pod_requests(pod) == {"cpu": Decimal("5.0")}


def test_a_limit_is_the_default_request() -> None:
    resources = {"limits": {"cpu": "2", "example.com/gpu": "1"}, "requests": {"cpu": "1"}}
    found = pod_requests({"containers": [{"resources": resources}, {}]})
    assert found == {"cpu": Decimal(1), "example.com/gpu": Decimal(1)}


@pytest.mark.parametrize("containers", [7, ["x"], [{"resources": {"requests": {"cpu": "much"}}}]])
def test_a_malformed_pod_is_refused(containers: Any) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError)):
        pod_requests({"containers": containers})
