"""Measure the cost of a megabyte between two workers: `python benchmarks/exchange.py`.

There are two processes on loopback, with mutual TLS by default. The sender keeps a few messages
queued. CPU is that of all threads of a process (gRPC's included), user and system, from the first
message to the last acknowledgement. On loopback the kernel's part is smaller than on a network.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import resource
import subprocess
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_core.links import framing
from dlion_core.links.events import LinkUp, StateSnapshot
from dlion_core.policies.interface import Message, MessageArrived, MessageKind
from dlion_operator.pki.authority import CertificateAuthority
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey
from dlion_worker.transport import PeerExchange, PeerExchangeConfig

JOB = JobKey("default", "benchmark", "1")
SITES = (SiteName("plant-a"), SiteName("plant-b"))
QUEUED_MESSAGES = 4
MB = 1e6


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    message_bytes: int
    tls: bool = True
    budget_bytes: int | None = None
    max_chunk_bytes: int = framing.MAX_CHUNK_BYTES
    total_bytes: int = 100_000_000


CASES = (
    Case(50_000),
    Case(250_000),
    Case(1_000_000),
    Case(1_000_000, budget_bytes=1_000_000),
    Case(1_000_000, tls=False),
    Case(1_000_000, max_chunk_bytes=128 * 1024),
    Case(1_000_000, max_chunk_bytes=64 * 1024),
    Case(1_000_000, max_chunk_bytes=16 * 1024, total_bytes=30_000_000),
    Case(4_500_000),
)


def cpu_s() -> float:
    """Return the CPU seconds of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def worker(rank: int, case: Case, pipe: Connection) -> None:
    """Run one process: authenticate, send or receive, report its CPU."""
    framing.MAX_CHUNK_BYTES = case.max_chunk_bytes
    me = WorkerIdentity(Rank(rank), SITES[rank], "small", rank)
    proof = WorkerCredentials.insecure()
    if case.tls:
        key = WorkerKey()
        pipe.send(key.csr_pem())
        proof = WorkerCredentials(key, *pipe.recv())
    events: queue.Queue[Any] = queue.Queue()
    config = PeerExchangeConfig(JOB, me, 1, proof)
    exchange = PeerExchange(config, events.put, lambda _: StateSnapshot(0, 0, b"none"))
    exchange.start()
    pipe.send(Member(me, 1, MemberState.READY, exchange.address))
    exchange.set_members(pipe.recv())
    while not isinstance(events.get(), LinkUp):
        pass
    pipe.send("up")
    pipe.recv()
    before_s = cpu_s()
    count = case.total_bytes // case.message_bytes
    if rank == 0:
        send(exchange, case, count)
    else:
        for _ in range(count):
            while not isinstance(events.get(), MessageArrived):
                pass
    pipe.send(cpu_s() - before_s)
    pipe.recv()
    exchange.close()


def send(exchange: PeerExchange, case: Case, count: int) -> None:
    """Keep the link busy until everything is acknowledged."""
    payload = os.urandom(case.message_bytes)
    if case.budget_bytes is not None:
        exchange.set_budgets({Rank(1): case.budget_bytes})
    sent = 0
    while True:
        state = exchange.link_counters()[Rank(1)]
        waiting = sent * case.message_bytes - state.acknowledged_total
        while sent < count and waiting < QUEUED_MESSAGES * case.message_bytes:
            sent += 1
            waiting += case.message_bytes
            exchange.send(Rank(1), Message(MessageKind.GRADIENT, sent, payload=payload))
        if not waiting:
            return
        time.sleep(0.001)


def measure(case: Case) -> tuple[float, float, float]:
    """Return seconds, sender's CPU seconds, receiver's CPU seconds."""
    context = multiprocessing.get_context("spawn")
    authorities = {site: CertificateAuthority(site) for site in SITES}
    bundles = {site: authority.bundle_pem for site, authority in authorities.items()}
    pipes, processes = [], []
    for rank in (0, 1):
        ours, theirs = context.Pipe()
        process = context.Process(target=worker, args=(rank, case, theirs))
        process.start()
        pipes.append(ours)
        processes.append(process)
    if case.tls:
        for rank, pipe in enumerate(pipes):
            me = WorkerIdentity(Rank(rank), SITES[rank], "small", rank)
            pipe.send((authorities[me.site].sign(pipe.recv(), me, JOB), bundles))
    membership = Membership(1, JOB, 2, tuple(pipe.recv() for pipe in pipes))
    for pipe in pipes:
        pipe.send(membership)
    for pipe in pipes:
        pipe.recv()
    began_s = time.monotonic()
    for pipe in pipes:
        pipe.send("go")
    spent = [pipe.recv() for pipe in pipes]
    took_s = time.monotonic() - began_s
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("end")
        process.join()
    return took_s, spent[0], spent[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)))
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    print(f"commit {commit or 'none'}, {os.cpu_count()} cores; CPU in ms per MB (10^6 bytes)")
    print(f"{'message':>10} {'chunk':>8} {'budget':>10} {'tls':>4} {'MB/s':>7}"
          f" {'send':>6} {'receive':>8} {'both':>6}")  # fmt: skip
    for case in (CASES[index] for index in arguments.cases):
        took_s, sender_s, receiver_s = measure(case)
        megabytes = case.total_bytes // case.message_bytes * case.message_bytes / MB
        chunk = framing.chunk_bytes(case.message_bytes, case.max_chunk_bytes)
        each = [1e3 * spent_s / megabytes for spent_s in (sender_s, receiver_s)]
        print(f"{case.message_bytes:>10,} {chunk:>8,} {case.budget_bytes or '-':>10}"
              f" {'on' if case.tls else 'off':>4} {megabytes / took_s:>7.0f}"
              f" {each[0]:>6.2f} {each[1]:>8.2f} {sum(each):>6.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
