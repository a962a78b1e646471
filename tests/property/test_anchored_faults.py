"""Anchored rounds (`adaptive`, `sparseloco`) while links break and return and workers die.

Faults occur at any time, and workers notice them in any order. Once all links are up, no worker
blocks, all continue, and those in the same round have the same anchor. Sides whose links return one
after the other keep the training of both, also if one is far ahead.

Left out: the exact result of a merge (test_anchor_merge.py).
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_core.policies.interface import (
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    SendMessage,
)
from dlion_core.policies.iteration_guard import IterationGuard
from dlion_core.policies.weights.anchored_rounds import AnchoredRounds
from example_counts import examples
from policy_cluster import spec, with_small_merges
from weighing_cluster import WeighingCluster

if TYPE_CHECKING:
    from dlion_core.policies.interface import Instruction
    from policy_cluster import Replica

EXCHANGES = {
    "adaptive": {"codec": "float32", "density": 1, "localSteps": 2, "outerMomentum": 0.9},
    "sparseloco": {"localSteps": 3, "share": 0.5},
}
MEMBERSHIP = (MemberJoined, MemberLeft)


class FragileCluster(WeighingCluster):
    """Workers that notice each link's end and return at any later time, in the link's order."""

    def __init__(self, policy: str, workers: int, seed: int) -> None:
        self.up: set[frozenset[Rank]] | None = None
        job = spec(exchange={"policy": policy, "parameters": EXCHANGES[policy]})
        job = with_small_merges(job)
        # Smaller batches would diverge in isolated workers, at this learning rate.
        super().__init__(job, [4 + rank % 3 for rank in range(workers)], seed=seed % 999)
        self.queues: dict[tuple[Rank, Rank], deque[Message | MemberJoined | MemberLeft]]
        self.queues = defaultdict(deque)
        self.rng = np.random.default_rng(seed)
        self.alive = set(self.ranks)
        self.up = {frozenset(link) for link in self.links}

    def _carry_out(self, replica: Replica, instruction: Instruction) -> None:
        if self.up is None or not isinstance(instruction, SendMessage):
            super()._carry_out(replica, instruction)
        elif frozenset((replica.rank, instruction.peer)) in self.up:
            self.queues[replica.rank, instruction.peer].append(instruction.message)

    def rounds(self, rank: Rank) -> AnchoredRounds:
        guard = self.replicas[rank].machine
        assert isinstance(guard, IterationGuard)
        assert isinstance(guard.machine, AnchoredRounds)
        return guard.machine

    def cut(self, one: Rank, other: Rank) -> None:
        assert self.up is not None
        if frozenset((one, other)) not in self.up:
            return
        self.up.discard(frozenset((one, other)))
        for source, target in ((one, other), (other, one)):
            heard = [each for each in self.queues[source, target] if isinstance(each, MEMBERSHIP)]
            self.queues[source, target] = deque([*heard, MemberLeft(source)])

    def heal(self, one: Rank, other: Rank) -> None:
        assert self.up is not None
        if frozenset((one, other)) in self.up or not {one, other} <= self.alive or one == other:
            return
        self.up.add(frozenset((one, other)))
        for source, target in ((one, other), (other, one)):
            joined = MemberJoined(source, self.replicas[source].iteration)
            self.queues[source, target].append(joined)

    def die(self, rank: Rank) -> None:
        for peer in self.ranks:
            if peer != rank:
                self.cut(rank, peer)
                self.queues[peer, rank].clear()
        self.alive.discard(rank)

    def restart(self, rank: Rank) -> None:
        """A new process with a live worker's weights, with or without its own checkpoint."""
        donor = self.replicas[self.any_of(self.alive)]
        replica = self.replicas[rank]
        kept = replica.machine.state()
        replica.weights_D = donor.weights_D.copy()
        machine = self.machine(rank, replica.weights_D)
        assert isinstance(machine, IterationGuard)
        if self.rng.random() < 0.5:
            machine.restore(kept)
        machine.take_over(donor.machine.next_iteration() - 1)
        replica.machine, replica.iteration = machine, machine.next_iteration() - 1
        self.alive.add(rank)
        for peer in self.ranks:
            self.heal(rank, peer)

    def any_of(self, ranks: set[Rank]) -> Rank:
        return sorted(ranks)[int(self.rng.integers(len(ranks)))]

    def move(self, *, keeps_up: bool = False) -> bool:
        """One step or delivery; return whether one was possible.

        `keeps_up`: links carry more than is sent. Otherwise the messages of an isolated worker far
        ahead would hide all others.
        """
        may = [rank for rank in sorted(self.alive) if self.may_step(rank)]
        links = [link for link, queue in self.queues.items() if queue and link[1] in self.alive]
        if keeps_up and links and self.rng.random() < 0.8:
            may = []
        if not may and not links:
            return False
        choice = int(self.rng.integers(len(may) + len(links)))
        if choice < len(may):
            self.step(may[choice])
            return True
        source, target = links[choice - len(may)]
        each = self.queues[source, target].popleft()
        self.handle(target, MessageArrived(source, each) if isinstance(each, Message) else each)
        return True

    def fault(self) -> None:
        """A link breaks or returns; rarely a worker dies or restarts."""
        one, other = self.any_of(set(self.ranks)), self.any_of(set(self.ranks))
        match int(self.rng.integers(10)):
            case 0 | 1 | 2 if one != other:
                self.cut(one, other)
            case 8 if len(self.alive) > 2:
                self.die(self.any_of(self.alive))
            case 9 if dead := set(self.ranks) - self.alive:
                self.restart(self.any_of(dead))
            case _:
                self.heal(one, other)

    def make_whole(self) -> None:
        for rank in self.ranks:
            if rank not in self.alive:
                self.restart(rank)
            for peer in self.ranks:
                self.heal(rank, peer)


@pytest.mark.parametrize("policy", EXCHANGES)
@given(seed=st.integers(0, 2**32))
@example(seed=329)  # one joins after a round, of which it waits for a contribution
@example(seed=132504)  # one is asked for the anchor of a round before the state that it took over
@settings(max_examples=examples(20), deadline=None)
def test_after_all_faults_all_workers_continue_with_the_same_anchors(
    policy: str, seed: int
) -> None:
    cluster = FragileCluster(policy, 3 + seed % 2, seed)
    for _ in range(500):
        if cluster.rng.random() < 0.06:
            cluster.fault()
        else:
            cluster.move()
    cluster.make_whole()
    before = {rank: cluster.replicas[rank].iteration for rank in cluster.ranks}
    for _ in range(2000):
        assert cluster.move(keeps_up=True), "blocked"
    after = {rank: cluster.replicas[rank].iteration for rank in cluster.ranks}
    assert all(after[rank] > before[rank] + 3 for rank in cluster.ranks), (before, after)
    anchors = defaultdict(set)
    for rank in cluster.ranks:
        rounds = cluster.rounds(rank)
        assert rounds.anchor_D is not None
        assert rounds._merge is None, "repairs do not end"
        anchors[rounds.closed].add(rounds.anchor_D.tobytes())
    assert max(map(len, anchors.values())) == 1


@pytest.mark.parametrize("ahead", [0, 200])
@given(seed=st.integers(0, 2**32))
@example(seed=21203311)  # of three groups two share what neither has alone
@settings(max_examples=examples(10), deadline=None)
def test_sides_whose_links_return_one_by_one_keep_all_training(ahead: int, seed: int) -> None:
    cluster = FragileCluster("adaptive", 4, seed)
    sides = [cluster.ranks[:2], cluster.ranks[2:]]
    across = [(one, other) for one in sides[0] for other in sides[1]]
    for link in across:
        cluster.cut(*link)
    steps = dict(zip(map(tuple, sides), (40 + ahead, 40), strict=True))
    while any(cluster.replicas[side[0]].iteration < count for side, count in steps.items()):
        done = {r for side, n in steps.items() for r in side if cluster.replicas[r].iteration >= n}
        cluster.alive = set(cluster.ranks) - done
        if not cluster.move():
            cluster.alive = set(cluster.ranks)
            cluster.move()
    cluster.alive = set(cluster.ranks)
    apart = [cluster.rounds(side[0]).state() for side in sides]
    for place in cluster.rng.permutation(len(across)):
        cluster.heal(*across[place])
        for _ in range(int(cluster.rng.integers(60))):
            assert cluster.move()
    for _ in range(600):
        assert cluster.move(), "blocked"
    for rank in cluster.ranks:
        held = cluster.rounds(rank).state()
        for state in apart:
            for name, count in state.items():
                if name.startswith("held_samples_"):
                    assert held.get(name, 0) >= count, "the training of a side is lost"
