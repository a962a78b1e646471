"""Agreement on the steps of a lost worker.

A worker is lost while it sends steps. Another worker, or a link between two of the rest, may fail
while the rest agree on these steps. Messages and link failures arrive in any order. All survivors
have received the same steps of the lost workers when their policy learns of the loss, and each
learns of it. None blocks, with up to three links down for good. A worker that only one peer cannot
reach delays no other. The withheld steps of a returning worker are delivered after its loss.
Hostile messages are refused or ignored.

Left out: real machines and weights (tests/simulated/test_faults.py, test_kill_and_rejoin.py); more
losses and links that return meanwhile, under which the agreement may still block.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_core.lifecycle.departure_agreement import (
    KEPT_STEPS,
    DepartureAgreement,
    MissedSteps,
    forwarded_step,
)
from dlion_core.policies.interface import (
    Event,
    LocalStepDone,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
)
from quorum_parts import job

ITERATION = 20
"""The open step of every survivor; a lost worker may have made the next one as well."""


@dataclass
class Survivor:
    """One worker's agreement, and the events of its policy."""

    rank: Rank
    network: Network
    mode: str = "synchronous"
    passed: list[Event] = field(default_factory=list)
    refused: list[RejectMessage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.progress = SimpleNamespace(iteration=ITERATION)
        instructions: Any = SimpleNamespace(
            parts=SimpleNamespace(job=job([6], 1, self.mode)),
            progress=self.progress,
            send=lambda peer, message: self.network.send(self.rank, peer, message),
            carry_out=self.refused.extend,
        )
        self.agreement = DepartureAgreement(instructions, self.passed.append)

    def hear(self, sender: int, message: Message) -> None:
        self.agreement.handle(MessageArrived(Rank(sender), message))

    def steps_of(self, rank: int) -> list[int]:
        """Iterations of that worker's steps that the policy got before the loss."""
        steps: list[int] = []
        for event in self.passed:
            match event:
                case MemberLeft(rank=left) if left == rank:
                    return steps
                case MessageArrived(sender=sender, message=message) if sender == rank:
                    assert bytes(message.payload) == content(rank, message.iteration)
                    assert message.local_batch_size == 8
                    steps.append(message.iteration)
        raise AssertionError(f"worker {self.rank} does not know that {rank} is lost")

    def knows_of(self, rank: int) -> bool:
        return MemberLeft(Rank(rank)) in self.passed


class ClosedLink(deque[Message | None]):
    """Accepts no more messages."""

    def append(self, message: Message | None) -> None:
        del message


class Network:
    """Links that keep their order; those of a lost worker end after a prefix."""

    def __init__(self, ranks: range) -> None:
        self.links: dict[tuple[Rank, Rank], deque[Message | None]] = {
            (Rank(a), Rank(b)): deque() for a in ranks for b in ranks if a != b
        }
        self.survivors = {Rank(r): Survivor(Rank(r), self) for r in ranks}

    def send(self, sender: Rank, receiver: Rank, message: Message) -> None:
        if (sender, receiver) in self.links:
            self.links[sender, receiver].append(message)

    def lose(self, rank: Rank, kept: dict[Rank, int]) -> None:
        """End the worker; the first messages on each of its links, `kept` in number, arrive."""
        del self.survivors[rank]
        for (sender, receiver), link in list(self.links.items()):
            if receiver == rank:
                del self.links[sender, receiver]
            elif sender == rank:
                left = list(link)[: kept.get(receiver, 0)]
                self.links[sender, receiver] = deque([*left, None])  # None: the link is down

    def cut(self, one: Rank, other: Rank, kept: tuple[int, int]) -> None:
        """Break their link; the first messages each way, `kept` in number, arrive."""
        for pair, count in zip(((one, other), (other, one)), kept, strict=True):
            if pair in self.links:
                self.links[pair] = ClosedLink([*list(self.links[pair])[:count], None])

    def waiting(self) -> list[tuple[Rank, Rank]]:
        return sorted(pair for pair, link in self.links.items() if link)

    def deliver(self, pair: tuple[Rank, Rank]) -> None:
        sender, receiver = pair
        message = self.links[pair].popleft()
        if message is None:
            self.survivors[receiver].agreement.handle(MemberLeft(sender))
            del self.links[pair]
        else:
            self.survivors[receiver].hear(sender, message)


def content(rank: int, iteration: int) -> bytes:
    return b"%d of %d" % (iteration, rank)


def step(rank: int, iteration: int) -> Message:
    return Message(MessageKind.GRADIENT, iteration, 8, payload=content(rank, iteration))


def all_stepped(network: Network) -> None:
    """Every worker has received every step before the open one."""
    for receiver, survivor in network.survivors.items():
        for sender in network.survivors:
            if sender != receiver:
                survivor.agreement.handle(MemberJoined(sender))
                survivor.hear(sender, step(sender, ITERATION - 1))


def lost_while_it_sends(network: Network, data: st.DataObject) -> Rank:
    """All send their step, the last worker two; parts of these arrive as it is lost."""
    lost = max(network.survivors)
    for sender in network.survivors:
        for receiver in network.survivors.keys() - {sender}:
            network.send(sender, receiver, step(sender, ITERATION))
            if sender == lost:
                network.send(sender, receiver, step(sender, ITERATION + 1))
    network.lose(lost, {rank: data.draw(st.integers(0, 2)) for rank in network.survivors})
    return lost


def train_on(network: Network) -> None:
    """Workers that nothing blocks make some steps."""
    for iteration in range(ITERATION + 1, ITERATION + 4):
        for one in network.survivors.values():
            if not one.agreement.is_pending:
                one.progress.iteration = iteration
                for peer in network.survivors.keys() - {one.rank}:
                    network.send(one.rank, peer, step(one.rank, iteration))
        while waiting := network.waiting():
            network.deliver(waiting[0])


@given(data=st.data(), count=st.integers(3, 5), second=st.booleans())
def test_survivors_have_the_same_steps_of_lost_workers(
    data: st.DataObject, count: int, second: bool
) -> None:
    network = Network(range(count))
    all_stepped(network)
    lost, also_lost = lost_while_it_sends(network, data), Rank(count - 2)
    delivered = 0
    second_at = data.draw(st.integers(0, 40)) if second else None
    while waiting := network.waiting():
        if delivered == second_at and also_lost in network.survivors:
            lengths = st.integers(0, 6)
            network.lose(also_lost, {rank: data.draw(lengths) for rank in network.survivors})
            continue
        network.deliver(data.draw(st.sampled_from(waiting)))
        delivered += 1
    left = list(network.survivors.values())
    assert len({tuple(one.steps_of(lost)) for one in left}) == 1
    if also_lost not in network.survivors:
        assert len({tuple(one.steps_of(also_lost)) for one in left}) == 1
    assert not any(one.refused or one.agreement.is_pending for one in left)


def test_a_survivor_waits_for_what_the_requester_cannot_get_itself() -> None:
    """The third survivor alone has the lost worker's last step, and has no link with the first.
    The first gets the step through the second."""
    network = Network(range(4))
    all_stepped(network)
    first, second, third, lost = map(Rank, range(4))
    for receiver in (first, second, third):
        network.send(lost, receiver, step(lost, ITERATION))
    network.lose(lost, {third: 1})
    network.cut(first, third, (0, 0))
    for link in ((lost, first), (third, first), (lost, second)):
        network.deliver(link)
    while network.links[first, second]:
        network.deliver((first, second))
    while waiting := network.waiting():
        network.deliver(waiting[0])
    for one in network.survivors.values():
        assert one.steps_of(lost) == [ITERATION - 1, ITERATION]


@pytest.mark.parametrize("cut_count", [1, 3])
@given(data=st.data(), count=st.integers(4, 6))
def test_links_that_break_meanwhile_block_no_worker(
    cut_count: int, data: st.DataObject, count: int
) -> None:
    """With one broken link, all have the same steps as well."""
    network = Network(range(count))
    all_stepped(network)
    lost, at = lost_while_it_sends(network, data), st.integers(0, 40)
    pairs = [(a, b) for a in network.survivors for b in network.survivors if a < b]
    broken = data.draw(st.lists(st.sampled_from(pairs), max_size=cut_count, unique=True))
    cuts = {pair: data.draw(at) for pair in broken}
    delivered = 0
    while (waiting := network.waiting()) or cuts:
        for pair in [pair for pair, due in cuts.items() if due <= delivered or not waiting]:
            network.cut(*pair, (data.draw(st.integers(0, 6)), data.draw(st.integers(0, 6))))
            del cuts[pair]
        if waiting := network.waiting():
            network.deliver(data.draw(st.sampled_from(waiting)))
            delivered += 1
    train_on(network)
    left = list(network.survivors.values())
    assert not any(one.agreement.is_pending for one in left)
    if len(broken) <= 1:
        assert len({tuple(one.steps_of(lost)) for one in left}) == 1


@pytest.fixture
def three() -> Network:
    network = Network(range(3))
    all_stepped(network)
    return network


def test_a_broken_link_between_two_live_workers_delays_no_other(three: Network) -> None:
    """The third has both requests, and needs no loss of its own."""
    one, other = three.survivors[Rank(0)], three.survivors[Rank(1)]
    one.agreement.handle(MemberLeft(Rank(1)))
    three.deliver((Rank(0), Rank(2)))
    assert three.waiting() == []
    other.agreement.handle(MemberLeft(Rank(0)))
    while waiting := three.waiting():
        three.deliver(waiting[0])
    assert one.knows_of(1)
    assert other.knows_of(0)


def test_a_worker_that_continues_without_the_requester_is_not_lost(three: Network) -> None:
    one, third = three.survivors[Rank(0)], three.survivors[Rank(2)]
    one.agreement.handle(MemberLeft(Rank(1)))
    three.deliver((Rank(0), Rank(2)))
    for iteration in (ITERATION, ITERATION + 1):  # what it may have made with the requester's step
        third.hear(1, step(1, iteration))
        assert three.waiting() == []
    third.hear(1, step(1, ITERATION + 2))
    for _ in range(4):
        three.deliver((Rank(2), Rank(0)))
    assert one.knows_of(1)
    assert one.steps_of(1) == [ITERATION - 1, ITERATION, ITERATION + 1]


def test_steps_of_a_returning_worker_are_delivered_after_its_loss(three: Network) -> None:
    one = three.survivors[Rank(0)]
    one.agreement.handle(MemberLeft(Rank(1)))
    returns = [
        MemberJoined(Rank(1)),
        MessageArrived(Rank(1), Message(MessageKind.MEET, 0, payload=b"\0")),
    ]
    before = len(one.passed)
    for event in returns:
        one.agreement.handle(event)
    assert len(one.passed) == before
    three.survivors[Rank(2)].agreement.handle(MemberLeft(Rank(1)))
    while waiting := three.waiting():
        three.deliver(waiting[0])
    assert one.passed[before:] == [MemberLeft(Rank(1)), *returns]


def test_a_worker_that_returns_and_leaves_again_is_lost_once(three: Network) -> None:
    one = three.survivors[Rank(0)]
    for event in (MemberLeft(Rank(1)), MemberJoined(Rank(1)), MemberLeft(Rank(1))):
        one.agreement.handle(event)
    one.agreement.release()
    assert one.passed.count(MemberLeft(Rank(1))) == 1
    assert one.passed[-1] == MemberLeft(Rank(1))


def test_the_last_worker_does_not_wait() -> None:
    network = Network(range(2))
    all_stepped(network)
    one = network.survivors[Rank(0)]
    one.agreement.handle(MemberLeft(Rank(1)))
    assert one.knows_of(1)


def test_a_new_worker_gets_no_request_before_its_first_step(three: Network) -> None:
    """It may wait for the requester before it begins."""
    one = three.survivors[Rank(0)]
    one.agreement.handle(MemberJoined(Rank(3)))
    one.agreement.handle(MemberLeft(Rank(1)))
    assert [pair for pair in three.waiting() if pair[0] == 0] == [(0, 2)]
    three.survivors[Rank(2)].agreement.handle(MemberLeft(Rank(1)))
    while waiting := three.waiting():
        three.deliver(waiting[0])
    assert one.knows_of(1)


def test_only_steps_that_may_be_missing_are_kept(three: Network) -> None:
    one = three.survivors[Rank(0)]
    for iteration in range(ITERATION, ITERATION + 5):
        one.progress.iteration = iteration
        one.agreement.handle(LocalStepDone(iteration, None, 8, 0.0))  # type: ignore[arg-type]
        one.hear(1, step(1, iteration))
    request = MissedSteps(Rank(1), 1, 0).encode()
    one.agreement.handle(MemberLeft(Rank(1)))
    three.links[Rank(0), Rank(2)].clear()
    one.hear(2, Message(MessageKind.MISSED_STEPS_REQUEST, ITERATION + 4, payload=request))
    sent = [(m.kind.name, m.iteration) for m in three.links[Rank(0), Rank(2)] if m]
    forwarded = [("FORWARDED_STEP", ITERATION + 3), ("FORWARDED_STEP", ITERATION + 4)]
    assert sent == [*forwarded, ("MISSED_STEPS_SENT", ITERATION + 4)]


@pytest.mark.parametrize("mode", ["bounded", "asynchronous", "backup"])
def test_a_loss_is_reported_at_once_if_replicas_may_differ(mode: str) -> None:
    network = Network(range(3))
    one = network.survivors[Rank(0)] = Survivor(Rank(0), network, mode)
    all_stepped(network)
    one.agreement.handle(MemberLeft(Rank(1)))
    assert one.knows_of(1)
    assert not network.waiting()
    one.hear(
        2, Message(MessageKind.MISSED_STEPS_REQUEST, 1, payload=MissedSteps(Rank(1), 1, 0).encode())
    )
    assert len(one.refused) == 1


@pytest.mark.parametrize(
    "message",
    [
        Message(MessageKind.MISSED_STEPS_REQUEST, 1),
        Message(MessageKind.MISSED_STEPS_REQUEST, 1, payload=bytes(17)),
        Message(MessageKind.MISSED_STEPS_SENT, 1, payload=bytes(3)),
        Message(MessageKind.FORWARDED_STEP, 1, payload=bytes(8)),
        Message(MessageKind.FORWARDED_STEP, 1, payload=struct.pack("<IBI", 1, 6, 8)),
        Message(MessageKind.FORWARDED_STEP, 1, payload=struct.pack("<IBI", 1, 1, 0)),
    ],
    ids=["empty", "long", "short", "head", "kind", "samples"],
)
def test_a_malformed_message_is_refused(three: Network, message: Message) -> None:
    one = three.survivors[Rank(0)]
    before = list(one.passed)
    one.hear(2, message)
    assert [refusal.peer for refusal in one.refused] == [2]
    assert one.passed == before


def test_a_peer_that_does_not_wait_fills_no_memory(three: Network) -> None:
    one = three.survivors[Rank(0)]
    for ahead in range(100):
        one.hear(1, step(1, ITERATION + ahead))
    one.agreement.handle(MemberLeft(Rank(1)))
    three.links[Rank(0), Rank(2)].clear()
    request = MissedSteps(Rank(1), 1, 0).encode()
    one.hear(2, Message(MessageKind.MISSED_STEPS_REQUEST, ITERATION, payload=request))
    kinds = [message.kind for message in three.links[Rank(0), Rank(2)] if message]
    assert kinds.count(MessageKind.FORWARDED_STEP) == KEPT_STEPS + 1


def test_requests_about_impossible_workers_are_refused(three: Network) -> None:
    one = three.survivors[Rank(0)]
    for rank in (6, 2**32 - 1):
        request = MissedSteps(Rank(rank), 1, 0).encode()
        one.hear(2, Message(MessageKind.MISSED_STEPS_REQUEST, ITERATION, payload=request))
    assert [refusal.peer for refusal in one.refused] == [2, 2]


def test_impossible_claims_are_ignored(three: Network) -> None:
    one = three.survivors[Rank(0)]
    stale = Message(MessageKind.MISSED_STEPS_SENT, 1, payload=MissedSteps(Rank(1), 0, 0).encode())
    one.hear(2, stale)  # no worker has asked
    one.hear(2, forwarded_step(Rank(1), step(1, ITERATION)))
    assert one.passed[-1] == MessageArrived(Rank(2), step(2, ITERATION - 1))
    one.agreement.handle(MemberLeft(Rank(1)))
    one.hear(2, stale)
    one.hear(
        1, Message(MessageKind.MISSED_STEPS_SENT, 1, payload=MissedSteps(Rank(1), 1, 0).encode())
    )
    assert one.agreement.is_pending
    for absurd in (2**53, ITERATION + 2):
        one.hear(2, forwarded_step(Rank(1), step(1, absurd)))
    assert one.passed[-1] == MessageArrived(Rank(2), step(2, ITERATION - 1))
    one.hear(
        2, Message(MessageKind.MISSED_STEPS_SENT, 1, payload=MissedSteps(Rank(1), 1, 0).encode())
    )
    assert one.steps_of(1) == [ITERATION - 1]
