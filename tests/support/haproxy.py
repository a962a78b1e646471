"""HAProxy as the gateway of a site's workers: it passes TLS through and routes by server name.

The names come from TLSRoutes and IngressRouteTCPs. It runs beside processes on this machine
(`gateways`), or in front of a site of the testbed (`site_gateway`).
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("haproxy", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
_WITHIN_S = 10.0
_MATCH = re.compile(r"HostSNI\(`([^`]+)`\)")
_HEAD = """\
defaults
  mode tcp
  timeout connect 5s
  timeout client 60s
  timeout server 60s
  option contstats
"""


@dataclass(frozen=True)
class Backend:
    """A port of a Service, the target of a route."""

    namespace: str
    service: str
    port: int


def leads(routes: Iterable[Mapping[str, Any]]) -> dict[str, Backend]:
    """Return the backend of each server name in these TLSRoutes and IngressRouteTCPs."""
    found = {}
    for route in routes:
        namespace, spec = route["metadata"]["namespace"], route["spec"]
        if route["kind"] == "TLSRoute":
            (rule,), (host,) = spec["rules"], spec["hostnames"]
            targets = [(host, rule["backendRefs"])]
        else:
            assert spec["tls"] == {"passthrough": True}
            targets = [(_host(each["match"]), each["services"]) for each in spec["routes"]]
        for host, (backend,) in targets:
            found[host] = Backend(namespace, backend["name"], backend["port"])
    return found


def _host(match: str) -> str:
    found = _MATCH.fullmatch(match)
    assert found is not None, f"not understood: {match}"
    return found[1]


def configuration(gateways: Mapping[str, Mapping[str, str]], *, stats: Path | None = None) -> str:
    """Return the configuration of one process: for each `host:port`, the address of each name.

    `stats` is a socket that reports the traffic.
    """
    socket_line = f"  stats socket {stats}\n" if stats else ""
    parts = [_gateway(address, names) for address, names in gateways.items()]
    return "".join(["global\n  maxconn 256\n", socket_line, _HEAD, *parts])


@contextmanager
def gateways(folder: Path, sites: Mapping[int, Mapping[str, str]]) -> Iterator[None]:
    """Start a gateway on each port of 127.0.0.1; `sites` maps a port to the address of each
    name."""
    assert PROGRAM is not None
    config = folder / "haproxy.cfg"
    config.write_text(configuration({f"127.0.0.1:{port}": sites[port] for port in sites}))
    process = subprocess.Popen([PROGRAM, "-db", "-f", str(config)])
    try:
        deadline_s = time.monotonic() + _WITHIN_S
        while not all(_answers(port) for port in sites):
            assert process.poll() is None, "haproxy has ended"
            assert time.monotonic() < deadline_s, "haproxy does not listen"
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(_WITHIN_S)


def _gateway(address: str, names: Mapping[str, str]) -> str:
    lines = [
        f"frontend {address}",
        f"  bind {address}",
        "  tcp-request inspect-delay 5s",
        "  tcp-request content accept if { req.ssl_hello_type 1 }",
        "  tcp-request content reject",
        *(f"  use_backend {name} if {{ req.ssl_sni -i {name} }}" for name in names),
    ]
    for name, server in names.items():
        lines += [f"backend {name}", f"  server worker {server}"]
    return "\n".join(lines) + "\n"


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
