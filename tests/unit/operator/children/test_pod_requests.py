"""Test the resource requests of a pod, as Kubernetes counts them.

Containers and sidecars are summed. An init container counts if it needs more, with the sidecars
before it. A limit is the default request. What the whole pod requests of CPU, memory and huge pages
comes first; its limits apply where no container requests any. Malformed specs are refused.
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


def test_the_resources_of_the_whole_pod_come_first() -> None:
    """As the API server fills them in, and the scheduler counts them, since Kubernetes 1.32."""
    each = {"requests": {"cpu": "1", "memory": "1Gi", "hugepages-2Mi": "2Mi", "example.com/gpu": 1}}
    pod = {
        "resources": {
            "requests": {"cpu": "3", "example.com/gpu": "5"},
            "limits": {"cpu": "4", "memory": "2Gi", "hugepages-2Mi": "4Mi"},
        },
        "containers": [{"resources": each}],
    }
    counted = {"cpu": 3, "memory": 2**30, "hugepages-2Mi": 2**22, "example.com/gpu": 1}
    assert pod_requests(pod) == counted
    pod["containers"] = [{}]
    assert pod_requests(pod) == {"cpu": 3, "memory": 2**31, "hugepages-2Mi": 2**22}


@pytest.mark.parametrize("containers", [7, ["x"], [{"resources": {"requests": {"cpu": "much"}}}]])
def test_a_malformed_pod_is_refused(containers: Any) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError)):
        pod_requests({"containers": containers})
