"""HAProxy on a site's node, led by the routes of that site's cluster.

It stands for a gateway's controller and its proxy: it takes up TLSRoutes that name its listener and
IngressRouteTCPs of its entry point, in any namespace, and no others. Services' cluster addresses
are reached as from any node.
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
    """Of one site; `folder` is its own."""

    site: Site
    folder: Path

    @property
    def address(self) -> str:
        """Where other sites reach it, `host:port`."""
        return f"{self.site.nodes[0].layout.address}:{PORT}"

    def documents(self) -> list[dict[str, Any]]:
        """Its listener, as the Gateway API has it, in a namespace of its own."""
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
        """Lead as the cluster's routes say by now; connections stay as they are."""
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
        is_told = self._config.exists() and self._config.read_text() == text
        self._config.write_text(text)
        if not is_told or self.taken_bytes().keys() != names.keys():
            self._reload()  # a signal is lost on one that is about to start

    def taken_bytes(self) -> dict[str, int]:
        """What came in for each name since it was last told of another one; empty before."""
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
