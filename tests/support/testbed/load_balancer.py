"""A load balancer for a site's Services: as MetalLB with a shared address and routes to it, or k3s'
on a cluster of one node, all have one address and differ by their ports.

What a controller of the cloud or of MetalLB would say, `balance` says; that the address leads to a
node is a route of the site's router, and from there on it is kube-proxy's, as anywhere.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from dlion_local.emulation.network.in_namespace import run_batch

if TYPE_CHECKING:
    from testbed.sites import Site


def balance(site: Site) -> None:
    """Give the site's address to all Services of type LoadBalancer that have none yet.

    Raises: UnavailableError where the API server does not take that.
    """
    address, node = site.layout.load_balancer, site.nodes[0].layout.address
    run_batch("ip", site.layout.netns, [f"route replace {address}/32 via {node} dev br0"])
    said = json.dumps({"status": {"loadBalancer": {"ingress": [{"ip": address}]}}})
    for service in site.kubectl.get("services", "--all-namespaces")["items"]:
        metadata, status = service["metadata"], service["status"].get("loadBalancer")
        if service["spec"]["type"] == "LoadBalancer" and not status:
            kubectl = replace(site.kubectl, namespace=metadata["namespace"])
            kubectl.run("patch", "service", metadata["name"], "--subresource=status",
                        "--type=merge", "-p", said)  # fmt: skip
