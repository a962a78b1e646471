"""A site of the testbed for thousands of pods: API server, etcd, controllers and scheduler.

KWOK simulates the nodes. In the kubelets' place it reports that pods run; nothing runs there.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlion_operator.kubernetes.client import Kind
from testbed.addons import virtual_node
from testbed.sites import Testbed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.sites import Site

SITE = "plant-a"
PODS_OF_A_NODE = 100
_HUGE = {"cpu": "1000", "memory": "4Ti", "pods": str(PODS_OF_A_NODE + 10)}


@contextlib.contextmanager
def scaled_site(*, pods: int) -> Iterator[tuple[Site, str]]:
    """Start a site with room for this many pods.

    Yields the site, and the host's address in its network, for webhooks.
    """
    # The operator shares two cores with all of it: use memory, and collect garbage rarely.
    os.environ.setdefault("GOGC", "400")
    with Testbed.up(name=f"s{os.getpid()}", sites=1, nodes=0) as testbed:
        site = testbed.site("site-a")
        site.control_plane.start_kwok(Path(__file__).with_name("kwok-stages.yaml"))
        site.kubectl.apply(*(_node(number) for number in range(-(-pods // PODS_OF_A_NODE))))
        site.kubectl.wait("--for=condition=Ready", "nodes", "--all", timeout_s=180)
        yield site, testbed.layout.host_address


def _node(number: int) -> dict[str, Any]:
    """Return a node that accepts any pod, and is full only by their number."""
    node = virtual_node(number)
    del node["spec"]["taints"]
    node["status"] = {"allocatable": _HUGE, "capacity": _HUGE}
    return node


def job(number: int, workers: int) -> dict[str, Any]:
    """Return the manifest of one job of the site, of one group."""
    group = {"name": "small", "workers": workers}
    return Kind.DLION_JOB.document(
        {"name": f"job-{number:04}", "namespace": "default"},
        spec={
            "runId": "r1",
            "sites": [{"name": SITE, "groups": [group]}],
            "trainer": {
                "program": {"builtin": "digits"},
                "dataset": {"name": "digits"},
                "stop": {"maxSteps": 10**7},
            },
        },
    )
