"""The server of each port as a process of its own, which a test floods and measures.

The script's arguments: the server's name, a folder, and constants that have another value
there, such as `dlion_api.protocol.port_limits.HANDSHAKE_WITHIN_S=2`. It writes its address to the
folder and runs until it is killed. The folder has the authorities of two sites.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlion_api.names import KeeperIdentity, SiteName
from dlion_api.protocol.port_limits import prepare_process
from dlion_operator.pki.authority import CertificateAuthority, StoredAuthority

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

A, B = SiteName("plant-a"), SiteName("plant-b")
WITHIN_S = 60.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class FloodedServer:
    """The process, as /proc shows it."""

    pid: int
    folder: Path

    def descriptors(self) -> int:
        """Count its open descriptors."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))  # noqa: PTH208 - a count, often

    def threads(self) -> int:
        """Count its threads."""
        return len(os.listdir(f"/proc/{self.pid}/task"))  # noqa: PTH208

    def resident_mib(self) -> float:
        """Return its resident memory, without pages of files."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        match = re.search(r"RssAnon:\s+(\d+) kB", status)
        assert match
        return int(match[1]) / 1024

    def address(self, name: str = "address") -> str:
        """Return what the process wrote to that file of the folder."""
        path, give_up_s = self.folder / name, time.monotonic() + WITHIN_S
        while not path.is_file():
            assert time.monotonic() < give_up_s, (self.folder / "log").read_text()
            time.sleep(0.02)
        return path.read_text()


@contextmanager
def flooded_server(
    name: str,
    folder: Path,
    authorities: Mapping[SiteName, CertificateAuthority],
    constants: Mapping[str, float],
) -> Iterator[FloodedServer]:
    """Run the server of that name with these constants, by their modules and names."""
    for site, authority in authorities.items():
        stored = authority.to_stored()
        (folder / f"{site}.key").write_bytes(stored.key_pem)
        (folder / f"{site}.pem").write_bytes(stored.certificate_pem)
    given = [f"{constant}={value}" for constant, value in constants.items()]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, name, str(folder), *given],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield FloodedServer(process.pid, folder)
    finally:
        process.kill()
        process.wait(WITHIN_S)


# ---- in the process ------------------------------------------------------------------------------


def _authorities(folder: Path) -> dict[SiteName, CertificateAuthority]:
    return {
        site: CertificateAuthority(
            site,
            stored=StoredAuthority(
                (folder / f"{site}.key").read_bytes(), (folder / f"{site}.pem").read_bytes()
            ),
        )
        for site in (A, B)
    }


def _ready(folder: Path, address: str, name: str = "address") -> None:
    partial = folder / f"{name}.partial"
    partial.write_text(address)
    partial.replace(folder / name)


def _sleep() -> None:
    while True:
        time.sleep(3600)


def _exchange(folder: Path) -> None:
    from dlion_api.protocol.membership import Member, Membership, MemberState
    from linked_workers import JOB, Worker, credentials, identity

    me, peer = identity(1, B), identity(0, A)
    worker = Worker(me, credentials(me, _authorities(folder)))
    _ready(folder, worker.exchange.address)
    there = Member(peer, 1, MemberState.READY, (folder / "peer").read_text())
    worker.exchange.set_members(Membership(1, JOB, 2, (worker.member(), there)))
    _sleep()


def _keeper(folder: Path) -> None:
    import keeper_service

    keeper_service.AUTHORITIES.update(_authorities(folder))
    (folder / "kept").mkdir()
    keeper = keeper_service.Keeper(folder / "kept")
    _ready(folder, keeper.address)
    _sleep()


def _sidecar(folder: Path) -> None:
    port = (folder / "metrics-port").read_text()
    sys.argv = ["sidecar", "--config", str(folder / "config.json"), "--metrics-port", port]
    runpy.run_module("dlion_worker.sidecar", run_name="__main__")


async def _coordinator(folder: Path) -> None:
    import keeper_service
    from dlion_operator.coordinator import CoordinatorServer
    from dlion_operator.pki.authority import Tokens

    authorities, job, tokens = _authorities(folder), keeper_service.job(), Tokens()
    server = CoordinatorServer(f"{LOOPBACK}:0", authorities[A])
    server.open(job, authorities=authorities, tokens=tokens, on_record=lambda _: None)
    (folder / "token").write_text(tokens.issue(KeeperIdentity(A), job.key))
    (folder / "ca.pem").write_bytes(server.authority_pem)
    _ready(folder, f"{LOOPBACK}:{await server.start()}")
    await asyncio.Event().wait()


async def _federation(folder: Path) -> None:
    from federated import FederatedSite
    from operator_process import free_ports

    authorities, (port, elsewhere) = _authorities(folder), free_ports(2)
    site = FederatedSite(A, folder, port, authorities[A])
    other = FederatedSite(B, folder, elsewhere, authorities[B])
    other.bundle_file.write_bytes(authorities[B].bundle_pem)
    await site.start(other)
    _ready(folder, f"{LOOPBACK}:{port}")
    await asyncio.Event().wait()


async def _operator_ports(folder: Path) -> None:
    from dlion_operator.controller.health import HealthMonitor, serve_health, serve_metrics
    from dlion_operator.controller.metrics import OperatorMetrics
    from dlion_operator.kubernetes.resync import Resync
    from dlion_operator.kubernetes.store import ClusterStore
    from operator_process import free_ports

    metrics, ports, no_cluster = OperatorMetrics(), free_ports(2), None
    resync: Any = Resync(no_cluster, ClusterStore(), (), lambda _: None)  # type: ignore[arg-type]
    await serve_metrics(metrics.registry, ports[0])
    health = HealthMonitor(metrics, resync)
    await serve_health(health, ports[1])
    _ready(folder, f"{LOOPBACK}:{ports[1]}", "health")
    _ready(folder, f"{LOOPBACK}:{ports[0]}")
    await health.tick()


def main(arguments: Sequence[str]) -> None:
    """Set the constants, then start the server."""
    name, folder, *constants = arguments
    prepare_process()
    for given, value in (each.split("=") for each in constants):
        module, _, constant = given.rpartition(".")
        setattr(importlib.import_module(module), constant, json.loads(value))
    started = {
        "exchange": _exchange, "keeper": _keeper, "sidecar": _sidecar, "coordinator": _coordinator,
        "federation": _federation, "operator": _operator_ports,
    }[name](Path(folder))  # fmt: skip
    if started is not None:
        asyncio.run(started)


if __name__ == "__main__":
    main(sys.argv[1:])
