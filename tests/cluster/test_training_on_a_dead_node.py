"""Test a node that loses its power while a worker trains there.

The other workers continue and the job is Degraded. The dead node's pod is released and its worker
returns on another node. All train again, though the dead node never reports anything. The test
prints the times. Left out: a keeper or an operator on the dead node.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from trained_jobs import SITE, SYSTEM, eventually, manifest, status_of, wait_until_trains

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl
    from testbed.sites import Testbed

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]


@pytest.mark.usefixtures("testbed_alone")
def test_a_worker_on_a_dead_node_is_released_and_trains_elsewhere(
    restricted: Kubectl, testbed: Testbed
) -> None:
    kubectl = restricted
    operator = replace(kubectl, namespace=SYSTEM).get("pods")["items"][0]
    stays = operator["spec"]["nodeName"]
    (dies,) = {node.layout.name for node in testbed.site(SITE).nodes} - {stays}
    kubectl.run("cordon", dies)
    # This testbed has one CoreDNS, without which no name resolves.
    system = replace(kubectl, namespace="kube-system")
    system.run("delete", "pod", "--all", "--wait=true")
    system.wait("--for=condition=Available", "deployment", "--all", timeout_s=90)
    document = manifest({"a": 400, "b": 400}, startDeadlineSeconds=60)
    document["spec"]["trainer"]["stop"] = {"maxSeconds": 3000}
    kubectl.apply(document)
    wait_until_trains(kubectl)
    kubectl.run("cordon", stays)
    kubectl.run("uncordon", dies)
    kubectl.run("delete", "pod", "-l", "dlion.dev/group=b")
    wait_until_trains_on(kubectl, dies)
    kubectl.run("uncordon", stays)
    testbed.kill_node(dies)
    began_s = time.monotonic()
    try:
        eventually(
            lambda: status_of(kubectl).get("state") == "Degraded", within_s=90, what="Degraded"
        )
        degraded_s = time.monotonic() - began_s
        wait_until_trains_on(kubectl, stays, within_s=300)
        print(
            f"node dead: Degraded after {degraded_s:.0f} s, its worker trains elsewhere after "
            f"{time.monotonic() - began_s:.0f} s"
        )
    finally:
        testbed.start_node(dies)
        testbed.site(SITE).wait_for_nodes()


def wait_until_trains_on(kubectl: Kubectl, node: str, within_s: float = 180.0) -> None:
    """Return once group b's worker runs on that node and all train."""

    def look() -> bool:
        pods = kubectl.get("pods", "-l", "dlion.dev/group=b")["items"]
        there = [p["spec"].get("nodeName") for p in pods if p["status"]["phase"] == "Running"]
        return there == [node] and status_of(kubectl).get("state") == "Training"

    eventually(look, within_s=within_s, what=f"training on {node}")
