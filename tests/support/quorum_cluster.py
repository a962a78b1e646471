"""A cluster of several sites in virtual time whose workers pause without a quorum.

Each worker has the real inbox, step cycle, quorum gate, admission (the simulator's), checkpointer
and machine. Only two parts are replaced. The model is a quadratic whose gradient depends on rank
and iteration. The links of the network keep their order and take a random time.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from dlion_api.names import Rank
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.reasons import EventReason
from dlion_core.lifecycle.event_dispatcher import EventDispatcher
from dlion_core.lifecycle.inbox import EventInbox
from dlion_core.lifecycle.instruction_executor import InstructionExecutor
from dlion_core.lifecycle.step_cycle import ComputeStep, EndStep, Rejoin, StepCycle, StepPhase
from dlion_core.lifecycle.stopping import JobProgress
from dlion_core.links.events import LinkDown, LinkUp, StateRequest, StateSnapshot
from dlion_core.policies.factory import build
from dlion_core.policies.interface import Message, MessageArrived, RejectMessage
from dlion_simulator.admission import VirtualAdmission
from dlion_simulator.clock import VirtualClock
from quorum_parts import LAYOUT, Replica, job

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from dlion_core.links.events import ExchangeEvent

STEP_S, DELAY_S = 0.2, 0.05
"""The maximum time of a step and of a message."""


class Node:
    """One worker, with the parts of `worker` that matter here."""

    def __init__(self, cluster: QuorumCluster, rank: Rank, incarnation: int) -> None:
        self.cluster, self.rank, self.incarnation = cluster, rank, incarnation
        self.replica, self.progress = Replica(), JobProgress()
        self.neighbours = frozenset(cluster.ranks) - {rank}
        reporter = SimpleNamespace(
            rank=rank, incarnation=incarnation, now_s=lambda: cluster.clock.now_s,
            event=lambda reason, words, **_: cluster.events.append(
                (cluster.clock.now_s, rank, reason)
            ),
        )  # fmt: skip
        self.parts: Any = SimpleNamespace(
            job=cluster.job, rank=rank, machine=self.new_machine(), replica=self.replica,
            reporter=reporter, stream=None,
            links={p: SimpleNamespace(push=partial(self.send, p)) for p in self.neighbours},
        )  # fmt: skip
        before = JobProgress()
        undo = SimpleNamespace(
            begin_step=lambda: before.take(self.progress), end_step=lambda: None,
            undo_step=lambda: self.progress.take(before),
        )  # fmt: skip
        links = SimpleNamespace(
            latest_directive=lambda: None, sendable_bytes=dict, one_way_delays_s=dict,
            set_iteration=lambda _iteration: None,
        )  # fmt: skip
        self.inbox = EventInbox(self.send, clock_s=lambda: cluster.clock.now_s)
        dispatcher = EventDispatcher(
            InstructionExecutor(self.parts, self.progress, send=self.send, refuse=self._refuse),
            self.inbox,
            due=lambda after_s: cluster.clock.after(after_s, self._look),
        )
        self.cycle = StepCycle(dispatcher, links, undo)  # type: ignore[arg-type]
        self.quorum_gate = self.cycle.dispatcher.quorum_gate
        self.admission: VirtualAdmission | None = None
        self.lives: dict[Rank, int] = {}
        """The epoch of each link that it believes to be up."""
        self.ends: list[float] = []
        """The end time of each of its iterations."""
        self.weights_after: dict[int, bytes] = {}
        self.is_gone = self.is_paused = False
        self._arrived: list[Any] = []

    def new_machine(self) -> Any:
        spec, ranks = self.cluster.job.spec, self.cluster.ranks
        return build(spec, self.rank, LAYOUT, ranks, replica=self.replica)

    def send(self, peer: Rank, message: Message, _epoch: int | None = None) -> None:
        self.cluster.send(self, peer, message)

    def _refuse(self, rejected: RejectMessage, _iteration: int) -> None:
        raise AssertionError(f"{self.rank} refuses {rejected.peer}: {rejected.reason}")

    def _look(self) -> None:
        if self.admission is None and not self.is_gone:
            self.cycle.handle([])

    # ---- admission -------------------------------------------------------------------------------

    def join(self, before: Any = None) -> None:
        self.admission = VirtualAdmission(
            self,  # type: ignore[arg-type]
            self.cluster.clock, membership=self.cluster.membership,
            pull=partial(self.cluster.pull, self),
            retry=self._rejoin, before=before,
        )  # fmt: skip

    def start_at(self, iteration: int) -> None:
        self.admission = None
        self.cycle.handle(self.inbox.start(iteration))

    def _rejoin(self) -> None:
        before = self.parts.machine
        self.cycle.reset(before.restarted())
        self.inbox.reset(self.progress.iteration)
        self.join(before)
        for peer in sorted(self.neighbours):
            self.cluster.renew(self.rank, peer)

    # ---- steps ---------------------------------------------------------------------------------

    def arrive(self, event: ExchangeEvent) -> None:
        if self.is_gone:
            return
        match event:
            case LinkUp(peer=peer, epoch=life):
                self.lives[peer] = life
            case LinkDown(peer=peer):
                self.lives.pop(peer, None)
        self.inbox.put(event)
        events = self.inbox.drain()
        if self.admission is not None:
            self.admission.advance(events)
        elif self._computes:
            self._arrived += events
        else:
            self.cycle.handle(events)
            self.advance()

    @property
    def _computes(self) -> bool:
        return self.cycle.phase is StepPhase.COMPUTING

    def advance(self) -> None:
        while not (self.is_paused and self.cycle.phase is StepPhase.IDLE) or (
            self.quorum_gate.is_behind
        ):
            match self.cycle.next(lambda: None):
                case ComputeStep(iteration=iteration):
                    self.cluster.later(STEP_S, partial(self._step_done, iteration))
                    return
                case EndStep():
                    self.ends.append(self.cluster.clock.now_s)
                    self.weights_after[self.progress.iteration] = self.replica.weights_D.tobytes()
                case Rejoin():
                    self._rejoin()
                    return
                case _:
                    return

    def resume(self) -> None:
        self.is_paused = False
        if self.admission is None and not (self._computes or self.is_gone):
            self.advance()

    def _step_done(self, iteration: int) -> None:
        if self.is_gone:
            return
        gradient_D = np.float32(0.1) * self.replica.weights_D + np.float32(
            (self.rank + 1) * (iteration % 7 - 3)
        )
        result = SimpleNamespace(loss=1.0, gradient_D=gradient_D, finite=True, features=None)
        self.cycle.step_computed(result, samples=1, trained_s=0.0)  # type: ignore[arg-type]
        arrived, self._arrived = self._arrived, []
        self.cycle.handle(arrived)
        self.advance()


class QuorumCluster:
    """Sites that are all linked at first, and training."""

    def __init__(
        self, workers: Sequence[int], min_sites: int, *, seed: int, mode: str = "asynchronous"
    ) -> None:
        self.job = job(workers, min_sites, mode)
        self.rng = np.random.default_rng(seed)
        self.clock = VirtualClock()
        self.events: list[tuple[float, Rank, EventReason]] = []
        self.ranks = [worker.rank for worker in self.job.workers()]
        self.up: dict[tuple[Rank, Rank], int] = {}
        """Links that are up, by sender and receiver, each with the number of its epoch."""
        self.is_silent: set[tuple[Rank, Rank]] = set()
        """Links that lose everything although both ends believe that they are up."""
        self.cut: frozenset[frozenset[Rank]] = frozenset()
        """Pairs that cannot be linked."""
        self.donors: list[tuple[Rank, Rank, bool]] = []
        """Receiver and donor of each state, and whether the donor was paused."""
        self._last_life = 1
        self._free_s: dict[tuple[Rank, Rank], float] = {}
        self.nodes = {rank: Node(self, rank, 1) for rank in self.ranks}
        for node in self.nodes.values():
            node.lives = dict.fromkeys(sorted(node.neighbours), 1)
            self.up |= {(node.rank, peer): 1 for peer in node.neighbours}
            node.inbox.link_epochs = dict(node.lives)
        for node in self.nodes.values():
            node.start_at(0)
        for node in self.nodes.values():
            node.advance()

    def membership(self) -> Membership:
        workers = self.job.workers()
        gone = {rank for rank, node in self.nodes.items() if node.is_gone}
        states = dict.fromkeys(gone, MemberState.LOST)
        members = tuple(
            Member(worker, 1, states.get(worker.rank, MemberState.READY), "a:1")
            for worker in workers
        )
        return Membership(1, self.job.key, len(workers), members)

    def of_sites(self, *numbers: int) -> list[Rank]:
        names = {f"site-{number}" for number in numbers}
        return [worker.rank for worker in self.job.workers() if worker.site in names]

    # ---- time ----------------------------------------------------------------------------------

    def later(self, max_s: float, action: Callable[[], object]) -> None:
        self.clock.after(max_s * self.rng.random(), action)

    def run(self, seconds: float) -> None:
        due = self.clock.after(seconds, lambda: None)
        while due.action is not None:
            self.clock.advance()

    # ---- links ---------------------------------------------------------------------------------

    def send(self, node: Node, peer: Rank, message: Message) -> None:
        life = node.lives.get(peer)
        if life is not None and self.up.get((node.rank, peer)) == life:
            copied = Message(
                message.kind, message.iteration, message.local_batch_size,
                message.weights_version, bytes(message.payload),
            )  # fmt: skip
            self._bring(node.rank, peer, MessageArrived(node.rank, copied), life)

    def _bring(self, source: Rank, target: Rank, event: ExchangeEvent, life: int) -> None:
        """Deliver an event after everything in transit there; it is lost with its link."""
        free_s = max(self._free_s.get((source, target), 0.0), self.clock.now_s)
        due_s = free_s + DELAY_S * self.rng.random()
        self._free_s[source, target] = due_s
        node = self.nodes[target]

        def arrive() -> None:
            is_lost = self.up.get((source, target)) != life or (source, target) in self.is_silent
            if is_lost and isinstance(event, MessageArrived):
                return
            if self.nodes[target] is node:
                node.arrive(event)

        self.clock.after(due_s - self.clock.now_s, arrive)

    def break_link(self, a: Rank, b: Rank) -> None:
        """Break the link: messages in transit are lost; each end notices at its own time."""
        for source, target in ((a, b), (b, a)):
            self.is_silent.discard((source, target))
            if (life := self.up.pop((source, target), None)) is not None:
                self._bring(source, target, LinkDown(source, life, "cut"), life)

    def mend_link(self, a: Rank, b: Rank) -> None:
        if (a, b) in self.up or self.nodes[a].is_gone or self.nodes[b].is_gone:
            return
        self._last_life += 1
        life = self._last_life
        for source, target in ((a, b), (b, a)):
            self.up[source, target] = life
            done = self.nodes[source].progress.iteration
            self._bring(source, target, LinkUp(source, life, done), life)

    def renew(self, a: Rank, b: Rank) -> None:
        """Break the link off; it is dialled again."""
        if (a, b) in self.up:
            self.break_link(a, b)
            self.later(1.0, partial(self._redial, a, b))

    def _redial(self, a: Rank, b: Rank) -> None:
        if frozenset((a, b)) not in self.cut:
            self.mend_link(a, b)

    def pairs(self, *groups: Iterable[Rank]) -> list[tuple[Rank, Rank]]:
        """Pairs of different groups, in random order."""
        listed = [list(group) for group in groups]
        found = [
            (a, b)
            for at, group in enumerate(listed)
            for other in listed[at + 1 :]
            for a in group
            for b in other
        ]
        return [found[at] for at in self.rng.permutation(len(found))]

    def split(self, *groups: Iterable[Rank], silent_s: float = 0.0) -> None:
        """Cut these groups off from each other. For `silent_s`, before the links break, no worker
        notices."""
        pairs = self.pairs(*groups)
        self.cut = frozenset(frozenset(pair) for pair in pairs)
        if silent_s:
            self.is_silent = {one for a, b in pairs for one in ((a, b), (b, a)) if one in self.up}
            self.run(silent_s)
        for pair in pairs:
            self.later(1.0, partial(self.break_link, *pair))
        self.run(2.0)

    def pause(self) -> None:
        """Start no steps and deliver all messages.

        All peers then have a gradient, or none has, so that lock step stays equal to the bit after
        a cut.
        """
        for node in self.nodes.values():
            node.is_paused = True
        self.run(1.0)

    def resume(self) -> None:
        for node in self.nodes.values():
            node.resume()

    def heal(self) -> None:
        """Mend the links pair by pair, in random order, all within a short time."""
        pairs = sorted(tuple(sorted(pair)) for pair in self.cut)
        self.cut = frozenset()
        for at in self.rng.permutation(len(pairs)):
            self.later(2.0, partial(self.mend_link, *pairs[at]))

    # ---- processes -----------------------------------------------------------------------------

    def pull(
        self, node: Node, donor: Rank, wanted: StateRequest, take: Callable[[StateSnapshot], None]
    ) -> None:
        """Deliver the donor's state a little later, once it is as requested."""

        def give() -> None:
            if (donor, node.rank) in self.up and not self.nodes[donor].is_gone:
                if self.nodes[donor].replica.iteration < wanted.at_least:
                    self.later(DELAY_S, give)
                    return
                snapshot = self.nodes[donor].replica.snapshot_for()
                self.donors.append((node.rank, donor, self.nodes[donor].quorum_gate.is_closed))
                self.later(DELAY_S, lambda: take(snapshot))

        self.later(DELAY_S, give)

    def kill(self, rank: Rank) -> None:
        self.nodes[rank].is_gone = True
        for peer in self.ranks:
            if peer != rank:
                self.break_link(rank, peer)

    def restart(self, rank: Rank) -> None:
        """Restart a worker without a checkpoint."""
        node = self.nodes[rank] = Node(self, rank, self.nodes[rank].incarnation + 1)
        node.join()
        for peer in self.ranks:
            if peer != rank and frozenset((rank, peer)) not in self.cut:
                self.mend_link(rank, peer)

    # ---- checks ----------------------------------------------------------------------------------

    def steps(self, ranks: Collection[Rank], from_s: float) -> dict[Rank, int]:
        """Iterations that ended since then."""
        return {rank: sum(s > from_s for s in self.nodes[rank].ends) for rank in ranks}

    def all_continue(self, seconds: float = 10.0, at_least: int = 15) -> None:
        """Assert that every worker makes that number of steps in the given time, and none is paused
        then."""
        from_s = self.clock.now_s
        alive = [rank for rank in self.ranks if not self.nodes[rank].is_gone]
        while self.clock.now_s < from_s + seconds:
            self.run(1.0)
            if min(self.steps(alive, from_s).values()) >= at_least:
                break
        holding = [rank for rank in alive if self.nodes[rank].quorum_gate.is_closed]
        entering = [rank for rank in alive if self.nodes[rank].admission is not None]
        assert (holding, entering) == ([], [])
        assert min(self.steps(alive, from_s).values()) >= at_least, self.steps(alive, from_s)

    def folds(self) -> int:
        return sum(node.replica.folds for node in self.nodes.values())

    def differing(self, from_iteration: int) -> list[int]:
        """Iterations after which the weights differ between the workers that made them."""
        found: dict[int, set[bytes]] = {}
        for node in self.nodes.values():
            for iteration, weights in node.weights_after.items():
                if iteration >= from_iteration:
                    found.setdefault(iteration, set()).add(weights)
        return sorted(iteration for iteration, one in found.items() if len(one) > 1)
