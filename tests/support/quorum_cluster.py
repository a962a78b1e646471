"""A cluster of several sites whose workers hold still without a quorum, each by its own links.

The real `Standstill`, `Quorum` and folding machine of each worker, joined by queues.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_api.spec import Job, load_job
from dlion_worker.policies import build
from dlion_worker.policies.interface import (
    Fold,
    MemberJoined,
    MemberLeft,
    Message,
    MessageKind,
    Refuse,
    SendState,
    TakeOver,
)
from dlion_worker.trainer.standstill import Standstill
from dlion_worker.trainer.stopping import JobProgress
from weights_cluster import WeightsCluster

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from dlion_worker.policies.interface import Event, Instruction, Machine
    from policy_cluster import Replica


def job(workers: Sequence[int], least_sites: int, mode: str = "asynchronous") -> Job:
    """Sites of so many workers each, whole gradients."""
    sites = [
        {"name": f"site-{number}", "groups": [{"name": "g", "workers": count}]}
        for number, count in enumerate(workers)
    ]
    return load_job(
        {
            "apiVersion": "dlion.dev/v1alpha1",
            "kind": "DLionJob",
            "metadata": {"name": "quorum"},
            "spec": {
                "sites": sites,
                "minSites": least_sites,
                "trainer": {
                    "program": {"builtin": "digits"},
                    "dataset": {"name": "digits"},
                    "stop": {"maxSteps": 10},
                },
                "exchange": {"policy": "full", "codec": "float32"},
                "synchronization": {"mode": mode, "maxStaleness": 3},
                "knowledgeTransfer": {"policy": "none"},
                "batching": {"globalBatchSize": {"initial": sum(workers)}},
            },
        }
    )


class Carried:
    """What `Standstill` needs of `Instructions`, for one worker of a cluster."""

    def __init__(self, cluster: QuorumCluster, rank: Rank) -> None:
        self._cluster, self._rank = cluster, rank

    def handle(self, event: Event) -> None:
        self._cluster.told(self._rank, event)

    def carry_out(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            assert not isinstance(instruction, Refuse), instruction
            self._cluster._carry_out(self._cluster.replicas[self._rank], instruction)

    def waiting_for(self) -> frozenset[Rank]:
        return self._cluster.replicas[self._rank].machine.waiting_for()


class QuorumCluster(WeightsCluster):
    """All linked at first; gradients move nothing: where a group has trained to is the test's."""

    def __init__(
        self, workers: Sequence[int], least_sites: int, *, seed: int, mode: str = "asynchronous"
    ) -> None:
        self.job = job(workers, least_sites, mode)
        self.now_s = 0.0
        self.events: list[tuple[float, Rank, EventReason]] = []
        self.standstills: dict[Rank, Standstill] = {}
        self.links_up: set[tuple[Rank, Rank]] = set()
        self.rng = np.random.default_rng(seed)
        super().__init__(self.job.spec, [1] * sum(workers), seed=seed % 1000, rate=0)
        self.links_up = set(self.links)
        self.deliver_all()
        assert all(self.may_step(rank) for rank in self.ranks)

    def built(self, replica: Replica) -> Machine:
        rank = replica.rank
        carried: Any = Carried(self, rank)
        reporter: Any = SimpleNamespace(
            rank=rank, incarnation=1, now_s=lambda: self.now_s,
            event=lambda reason, message, **_: self.events.append((self.now_s, rank, reason)),
        )  # fmt: skip
        self.standstills[rank] = Standstill(self.job, reporter, JobProgress(), carried)
        return build(self.job.spec, rank, self.layout, self.ranks, replica=replica)

    def _carry_out(self, replica: Replica, instruction: Instruction) -> None:
        match instruction:
            case SendState(peer=peer, iteration=iteration, head=head):
                payload = head + replica.weights_D.tobytes()
                state = Message(MessageKind.STATE, iteration, payload=payload)
                self.links[replica.rank, peer].append(state)
            case TakeOver(state=state_D):
                replica.weights_D[:] = np.frombuffer(state_D, np.float32)
            case _:
                super()._carry_out(replica, instruction)

    def told(self, rank: Rank, event: Event) -> list[Instruction]:
        """To the policy alone."""
        return super().handle(rank, event)

    def handle(self, rank: Rank, event: Event) -> list[Instruction]:
        standstill = self.standstills.get(rank)
        if standstill is None:  # not put together yet
            return super().handle(rank, event)
        told = [] if standstill.take(event) else super().handle(rank, event)
        standstill.look()
        return told

    def may_step(self, rank: Rank) -> bool:
        return self.standstills[rank].may_step() and super().may_step(rank)

    def of_sites(self, numbers: Collection[int]) -> list[Rank]:
        names = {f"site-{number}" for number in numbers}
        return [worker.rank for worker in self.job.workers() if worker.site in names]

    # ---- links ---------------------------------------------------------------------------------

    def break_link(self, a: Rank, b: Rank) -> None:
        """What is under way is lost; both hear of it, one after the other."""
        for source, target in ((a, b), (b, a)):
            self.links[source, target].clear()
            self.links_up.discard((source, target))
        for source, target in ((a, b), (b, a)):
            self.handle(target, MemberLeft(source))

    def mend_link(self, a: Rank, b: Rank) -> None:
        for source, target in ((a, b), (b, a)):
            self.links_up.add((source, target))
        for source, target in ((a, b), (b, a)):
            self.handle(target, MemberJoined(source, self.replicas[source].iteration))

    def lose_across(self, group: Collection[Rank]) -> None:
        """Silence: what is under way to and from that group is lost, and nobody knows."""
        for source, target in self.links:
            if (source in group) != (target in group):
                self.links[source, target].clear()

    def across(self, group: Collection[Rank]) -> list[tuple[Rank, Rank]]:
        """Pairs of that group and the others, in an order by chance."""
        pairs = [(a, b) for a in group for b in self.ranks if b not in group]
        return [pairs[at] for at in self.rng.permutation(len(pairs))]

    def deliver_at_random(self, most: int | None = None) -> None:
        """Until nothing is under way, or so many messages; some come twice."""
        while most is None or most > 0:
            busy = [link for link, queue in self.links.items() if queue]
            if not busy:
                return
            link = busy[self.rng.integers(len(busy))]
            if self.rng.random() < 0.2:
                self.links[link].append(self.links[link][0])
            self.deliver(*link)
            most = None if most is None else most - 1

    # ---- training ------------------------------------------------------------------------------

    def train(self, group: Collection[Rank], steps: int) -> None:
        """So many steps of each in the group, which ends at weights of its own."""
        for _ in range(steps):
            for rank in group:
                self.step(rank)
            self.deliver_all()
        trained_D = self.rng.standard_normal(self.layout.size).astype(np.float32)
        for rank in group if steps else ():
            self.replicas[rank].weights_D[:] = trained_D

    def folds(self) -> list[Fold]:
        return [one for r in self.replicas.values() for one in r.said if isinstance(one, Fold)]
