"""A load balancer for a site's Services, which share one address and differ by their ports.

MetalLB with a shared address and routes to it works like this, and k3s' load balancer on a cluster
of one node. `balance` replaces the controller of the cloud or of MetalLB. A route of the site's
router leads the address to a node; from there kube-proxy forwards, as in any cluster.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from dlion_local.emulation.network.in_namespace import run_batch

if TYPE_CHECKING:
    from testbed.sites import Site


def balance(site: Site) -> None:
    """Assign the site's address to all Services of type LoadBalancer without one.

    Raises: UnavailableError if the API server refuses it.
    """
    address, node = site.layout.load_balancer, site.nodes[0].layout.address
    run_batch("ip", site.layout.netns, [f"route replace {address}/32 via {node} dev br0"])
    patch = json.dumps({"status": {"loadBalancer": {"ingress": [{"ip": address}]}}})
    for service in site.kubectl.get("services", "--all-namespaces")["items"]:
        metadata, status = service["metadata"], service["status"].get("loadBalancer")
        if service["spec"]["type"] == "LoadBalancer" and not status:
            kubectl = replace(site.kubectl, namespace=metadata["namespace"])
            kubectl.run("patch", "service", metadata["name"], "--subresource=status",
                        "--type=merge", "-p", patch)  # fmt: skip
