"""Test links whose peer's process is killed, stopped, or returns as a new incarnation.

Left out: the supervisor that restarts it (tests/unit/worker/supervisor); the trainer's rejoining.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dlion_api.names import Rank, SiteName
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_core.links.events import LinkDown, LinkUp
from dlion_core.policies.interface import Message, MessageArrived, MessageKind
from dlion_operator.pki.authority import CertificateAuthority
from linked_workers import JOB, PLANT_A, PLANT_B, Worker, credentials, identity

A = identity(0)
B = identity(1, PLANT_B)
PEER = Path(__file__).parent / "linked_peer.py"

Authorities = dict[SiteName, CertificateAuthority]


@pytest.fixture
def authorities() -> Authorities:
    return {site: CertificateAuthority(site) for site in (PLANT_A, PLANT_B)}


@pytest.fixture
def a(authorities: Authorities) -> Iterator[Worker]:
    worker = Worker(A, credentials(A, authorities))
    yield worker
    worker.exchange.close()


@contextmanager
def peer(a: Worker, authorities: Authorities, incarnation: int) -> Iterator[subprocess.Popen[str]]:
    """Start worker B in another process, known to A; kill it at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, str(PEER), str(incarnation)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        csr_pem = process.stdout.readline().encode().replace(b"|", b"\n")
        chain = authorities[PLANT_B].sign(csr_pem, B, JOB)
        for pem in (chain, authorities[PLANT_A].bundle_pem, authorities[PLANT_B].bundle_pem):
            process.stdin.write(pem.decode().replace("\n", "|") + "\n")
        process.stdin.write(a.exchange.address + "\n")
        process.stdin.flush()
        address = process.stdout.readline().strip()
        member = Member(B, incarnation, MemberState.READY, address)
        a.exchange.set_members(Membership(incarnation, JOB, 2, (a.member(), member)))
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_killed_process_is_detected_at_once_and_returns(
    a: Worker, authorities: Authorities
) -> None:
    for incarnation in (1, 2, 3):
        with peer(a, authorities, incarnation) as process:
            assert a.wait_for(LinkUp).epoch == incarnation
            gradient = Message(MessageKind.GRADIENT, incarnation, payload=os.urandom(2_000_000))
            a.exchange.send(Rank(1), gradient)
            # It answers each gradient with PROGRESS.
            assert a.wait_for(MessageArrived).message.iteration == incarnation
            process.send_signal(signal.SIGKILL)
            down = a.wait_for(LinkDown)
            assert down.epoch == incarnation
            assert "timeout" not in down.reason, "its connection ended: no wait"


def test_a_stopped_process_is_detected_by_its_usual_gaps(
    a: Worker, authorities: Authorities
) -> None:
    with peer(a, authorities, 1) as process:
        a.wait_for(LinkUp)
        process.send_signal(signal.SIGSTOP)
        assert "; timeout: " in a.wait_for(LinkDown).reason
        process.send_signal(signal.SIGCONT)
        a.wait_for(LinkUp)
