"""Worker B in its own process, for test_link_deaths. It answers each gradient with PROGRESS."""

from __future__ import annotations

import queue
import sys

from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_core.links.events import StateSnapshot
from dlion_core.policies.interface import Message, MessageArrived, MessageKind
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey
from dlion_worker.transport import PeerExchange, PeerExchangeConfig


def main() -> None:
    job = JobKey("default", "cifar10", "1")
    me = WorkerIdentity(Rank(1), SiteName("plant-b"), "small", 1)
    peer = WorkerIdentity(Rank(0), SiteName("plant-a"), "small", 0)
    key = WorkerKey()
    sys.stdout.write(key.csr_pem().decode().replace("\n", "|") + "\n")
    sys.stdout.flush()
    chain, plant_a, plant_b = (
        sys.stdin.readline().strip().replace("|", "\n").encode() for _ in range(3)
    )
    address = sys.stdin.readline().strip()
    proof = WorkerCredentials(
        key, chain, {SiteName("plant-a"): plant_a, SiteName("plant-b"): plant_b}
    )
    events: queue.Queue[object] = queue.Queue()
    exchange = PeerExchange(
        PeerExchangeConfig(job, me, int(sys.argv[1]), proof),
        events.put,
        lambda wanted: StateSnapshot(0, 0, b"none"),
    )
    exchange.start()
    there = Member(peer, 1, MemberState.READY, address)
    exchange.set_members(Membership(1, job, 2, (there,)))
    sys.stdout.write(exchange.address + "\n")
    sys.stdout.flush()
    while True:
        event = events.get()
        if isinstance(event, MessageArrived):
            answer = Message(MessageKind.PROGRESS, event.message.iteration)
            exchange.send(event.sender, answer)


if __name__ == "__main__":
    main()
