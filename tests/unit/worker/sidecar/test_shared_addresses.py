"""Test that a sidecar counts connections to an address of several sites for none of them.

The sidecar, the connections and the kernel's list of them are real; the test is the trainer.

Left out: the kernel's list itself (test_link_connections.py).
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

from dlion_api.addresses import join_host_port
from dlion_api.names import Rank, SiteName
from dlion_api.protocol.measurements import Peers
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.spec import load_job
from dlion_worker.sidecar.process import SidecarProcess
from local_run import job_document

if TYPE_CHECKING:
    from pathlib import Path

DOCUMENT = job_document({"a": 1, "b": 1, "c": 1, "d": 2})
JOB = load_job(DOCUMENT)


def test_only_connections_of_one_site_are_counted(tmp_path: Path) -> None:
    here, host = str(tmp_path), "127.0.0.1"
    config = WorkerConfig(
        DOCUMENT, Rank(0), "", "", "", here, f"{here}/s.sock", host, host, here, here
    )
    sidecar = SidecarProcess(config, JOB, metrics_host=host, metrics_port=0)
    with ExitStack() as closing:
        ports = []
        for _ in range(2):
            server = closing.enter_context(socket.create_server((host, 0)))
            ports.append(server.getsockname()[1])
            closing.enter_context(socket.create_connection((host, ports[-1])))
        shared, own = (join_host_port(host, port) for port in ports)
        addresses = ["h:1", shared, shared, own, own]
        members = tuple(
            Member(one, 1, MemberState.READY, address, "h:2")
            for one, address in zip(JOB.workers(), addresses, strict=True)
        )
        sidecar._handle_record(Peers(Membership(1, JOB.key, 5, members), 100))
        assert set(sidecar._reading().connections) == {SiteName("d")}
