"""HAProxy on a site's node, configured by the routes of that site's cluster.

It replaces a gateway's controller and its proxy. It accepts TLSRoutes that name its listener and
IngressRouteTCPs of its entry point, in any namespace, and no others. It reaches Services' cluster
addresses as any node does.
"""

from __future__ import annotations

import csv
import signal
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from haproxy import PROGRAM, configuration, leads

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.sites import Site

PORT = 8443
PARENT = {"name": "edge", "namespace": "gateways", "sectionName": "passthrough"}
"""Its listener."""
ENTRY_POINT = "dlion"
_NAME = "haproxy"


@dataclass(frozen=True)
class SiteGateway:
    """The gateway of one site; `folder` is its own."""

    site: Site
    folder: Path

    @property
    def address(self) -> str:
        """The `host:port` at which other sites reach it."""
        return f"{self.site.nodes[0].layout.address}:{PORT}"

    def documents(self) -> list[dict[str, Any]]:
        """Its listener as a Gateway API object, in a separate namespace."""
        listener = {
            "name": PARENT["sectionName"],
            "port": PORT,
            "protocol": "TLS",
            "tls": {"mode": "Passthrough"},
            "allowedRoutes": {"namespaces": {"from": "All"}},
        }
        return [
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": PARENT["namespace"]}},
            {
                "apiVersion": "gateway.networking.k8s.io/v1",
                "kind": "Gateway",
                "metadata": {"name": PARENT["name"], "namespace": PARENT["namespace"]},
                "spec": {"gatewayClassName": _NAME, "listeners": [listener]},
            },
        ]

    def take_up(self) -> None:
        """Apply the cluster's present routes; connections stay."""
        kinds = "services,tlsroutes,ingressroutetcps"
        items = self.site.kubectl.get(kinds, "--all-namespaces")["items"]
        servers = {
            (each["metadata"]["namespace"], each["metadata"]["name"]): each["spec"]["clusterIP"]
            for each in items
            if each["kind"] == "Service"
        }
        names = {
            name: f"{servers[to.namespace, to.service]}:{to.port}"
            for name, to in leads(each for each in items if _is_ours(each)).items()
            if (to.namespace, to.service) in servers
        }
        text = configuration({self.address: names}, stats=self._stats)
        is_current = self._config.exists() and self._config.read_text() == text
        self._config.write_text(text)
        if not is_current or self.taken_bytes().keys() != names.keys():
            self._reload()  # a process that is about to start loses a signal

    def taken_bytes(self) -> dict[str, int]:
        """Received bytes for each name since its last configuration; empty before."""
        with socket.socket(socket.AF_UNIX) as asked:
            try:
                asked.connect(str(self._stats))
            except (FileNotFoundError, ConnectionRefusedError):
                return {}
            asked.sendall(b"show stat\n")
            with asked.makefile("r") as answer:
                lines = answer.read().removeprefix("# ").strip().splitlines()
        return {
            row["pxname"]: int(row["bin"])
            for row in csv.DictReader(lines)
            if row["svname"] == "BACKEND"
        }

    @property
    def _config(self) -> Path:
        return self.folder / "haproxy.cfg"

    @property
    def _stats(self) -> Path:
        return self.folder / "stats"

    def _reload(self) -> None:
        machine = self.site.nodes[0].machine
        if machine.process(_NAME) is None:
            assert PROGRAM is not None, "no haproxy here: `make testbed-setup`"
            machine.start(_NAME, [PROGRAM, "-W", "-db", "-f", str(self._config)])
        else:
            machine.signal(_NAME, signal.SIGUSR2)


def _is_ours(document: dict[str, Any]) -> bool:
    spec = document["spec"]
    if document["kind"] == "TLSRoute":
        return any(PARENT.items() <= parent.items() for parent in spec["parentRefs"])
    return document["kind"] == "IngressRouteTCP" and ENTRY_POINT in spec["entryPoints"]
