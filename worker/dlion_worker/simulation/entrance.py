"""How a worker comes into a virtual run in which others may train already.

Owns the decisions of `trainer.entrance`, taken anew whenever something arrives instead of in a
loop that waits; the words and the choice of the iteration to meet at are `trainer.rendezvous`
itself. Called by `worker` (something has arrived) and `roster` (a worker comes).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dlion_api.reasons import EventReason
from dlion_worker.exchange import StateWanted
from dlion_worker.policies.catalogue import (
    all_update_together,
    may_begin_beside,
    may_catch_up,
)
from dlion_worker.simulation.surroundings import Phase
from dlion_worker.trainer import rendezvous
from dlion_worker.trainer.catching_up import MOST_BYTES, CatchUp, Outcome
from dlion_worker.trainer.checkpointing import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlion_api.names import Rank
    from dlion_worker.exchange import StateSnapshot
    from dlion_worker.policies.interface import Event, Machine
    from dlion_worker.simulation.clock import VirtualClock
    from dlion_worker.simulation.worker import VirtualWorker

SLICE_S = 0.1
"""After a state that was not the right one: before the next look, as on real links."""


class VirtualEntrance:
    """One worker's way in."""

    def __init__(
        self,
        worker: VirtualWorker,
        clock: VirtualClock,
        *,
        pull: Callable[[Rank, StateWanted, Callable[[StateSnapshot], None]], None],
        come_in: Callable[[], None],
        come_anew: Callable[[], None],
        before: Machine | None = None,
    ) -> None:
        """`pull(donor, wanted, take)`: asks a peer for its state. `come_in`: it trains from now on.
        `come_anew`: it could not catch up, and comes in once more.
        `before`: of one that comes back the policies as they were: where it goes on from its own
        weights they go on, too."""
        self._worker, self._clock = worker, clock
        self._pull_from, self._come_in, self._come_anew = pull, come_in, come_anew
        self._job = worker.parts.job
        self._all_update_together = all_update_together(self._job.spec)
        self._begins_beside = may_begin_beside(self._job.spec)
        state_bytes = 2 * worker.parts.replica.model.weights_D.nbytes
        is_first = before is None and may_catch_up(self._job.spec)
        self._most_ahead = MOST_BYTES // state_bytes if is_first else 0
        self._way: CatchUp | None = None
        self._somebody_trained = False
        self._meeting = rendezvous.Meeting()
        self._donor: tuple[Rank, int] | None = None
        """Who was asked for its state, and the life of its link then."""
        self._began_s = clock.now_s
        self._seen_s: float | None = None
        """Since when there is somebody who trains."""
        deadline_s: float | None = self._job.spec.start_deadline_seconds
        self._before, self._whole_s = before, 0.0
        if before is not None:
            deadline_s = rendezvous.ALONE_S if deadline_s is None else deadline_s
            self._whole_s = rendezvous.WHOLE_S
        if deadline_s is not None:
            clock.after(deadline_s, self.look)
        self._deadline_s = deadline_s

    @property
    def comes_back(self) -> bool:
        """Whether it has been in the run before."""
        return self._before is not None

    def look(self, events: Iterable[Event] = ()) -> None:
        """Takes the next step that what is known by now allows. `events`: what has come, of one
        that catches up already."""
        if self._worker.entrance is not self:
            return
        if self._way is not None:
            self._follow(self._way, events)
            return
        lives = self._worker.inbox.lives
        if self._donor is not None:
            donor, life = self._donor
            if lives.get(donor) == life:
                return
            self._donor = None
        if inside := self._inside():
            self._somebody_trained = True
            if not (self._is_whole() or self._has_waited()):
                return
            if not self._all_update_together:
                self._pull(inside[0])
            elif self._may_catch_up(inside):
                self._pull_ahead(inside)
            else:
                self._meet(inside)
            return
        self._seen_s = None
        if self._somebody_trained:
            self._ask_anew()
        elif self._complete():
            self._go_on()

    def _ask_anew(self) -> None:
        """Who trained is gone; another latecomer may have taken its state and come in since it
        answered that it is out."""
        self._somebody_trained = False
        self._meeting = rendezvous.Meeting()
        self._worker.inbox.forget_promises()
        self._worker.inbox.answers.clear()
        for peer in sorted(self._worker.inbox.linked):
            self._worker.parts.links[peer].push(rendezvous.ask())

    def _inside(self) -> list[Rank]:
        """Peers that train."""
        return sorted(rank for rank, answer in self._worker.inbox.answers.items() if answer.is_in)

    def _has_waited(self) -> bool:
        """For links with all."""
        now_s = self._clock.now_s
        if self._seen_s is None:
            self._seen_s = now_s
            self._clock.after(self._whole_s, self.look)
        return round(now_s - self._seen_s, 6) >= self._whole_s

    def _is_whole(self) -> bool:
        return self._worker.inbox.linked >= self._worker.neighbours

    def _complete(self) -> bool:
        """Whether nobody trains and those who are there may begin."""
        linked, answers = self._worker.inbox.linked, self._worker.inbox.answers
        if not all(peer in answers and not answers[peer].asked for peer in linked):
            return False
        if any(answer.is_still for answer in answers.values()):
            return False
        workers = self._job.workers()
        if self._is_whole():
            return True
        deadline_s = self._deadline_s
        if deadline_s is None or self._clock.now_s - self._began_s < deadline_s:
            return False
        there = {*linked, self._worker.rank}
        sites = {worker.site for worker in workers if worker.rank in there}
        return len(sites) >= self._job.spec.min_sites

    def _meet(self, inside: list[Rank]) -> None:
        """Where all update together: nobody is to pass one iteration alone."""
        inbox, meeting = self._worker.inbox, self._meeting
        for peer in meeting.to_ask(inbox.lives, inbox.answers):
            self._worker.parts.links[peer].push(rendezvous.ask(meeting.iteration))
        before = meeting.iteration - 1
        inbox.forget_steps(before - 1)
        if not meeting.agreed(inbox.lives, inbox.answers):
            return
        if self._begins_beside and meeting.tries_beside(inside, inbox.heard_at(before)):
            self._pull(inside[0], at=before)
        elif held := sorted(inbox.heard_at(meeting.iteration) & set(inside)):
            self._pull(held[0])

    def _may_catch_up(self, inside: list[Rank]) -> bool:
        others = self._worker.inbox.linked - set(inside)
        return not others & self._worker.inbox.answers.keys() and len(inside) <= self._most_ahead

    def _pull_ahead(self, inside: list[Rank]) -> None:
        """While all go on, as soon as what they send leads on from the state to theirs."""
        inbox = self._worker.inbox
        firsts = inbox.first_steps()
        if inbox.linked != set(inside) or not set(inside) <= firsts.keys():
            return
        ahead = {peer: inbox.lives[peer] for peer in inside}
        donor, least = inside[0], max(firsts[peer] for peer in inside) - 1
        self._donor = (donor, ahead[donor])
        wanted = StateWanted(at_least=least)
        self._pull_from(donor, wanted, lambda snapshot: self._catch_up(snapshot, ahead))

    def _catch_up(self, snapshot: StateSnapshot, ahead: dict[Rank, int]) -> None:
        worker = self._worker
        if worker.entrance is not self:
            return
        self._overtake(snapshot)
        worker.inbox.ahead = ahead
        self._way = CatchUp(
            worker.inbox,
            hearing=worker.hearing,
            progress=worker.progress,
            machine=worker.parts.machine,
            send=lambda peer, message: worker.parts.links[peer].push(message),
            passing=self._passing,
            passed=lambda: None,
        )
        self._way.begin()
        self._follow(self._way, ())

    def _passing(self, iteration: int) -> None:
        progress, samples = self._worker.progress, self._worker.global_batch_size()
        progress.advance(iteration, local_batch_size=0, global_batch_size=samples)

    def _follow(self, way: CatchUp, events: Iterable[Event]) -> None:
        way.take(events)
        outcome = way.look()
        if outcome is Outcome.LOST:
            self._come_anew()
        elif outcome is Outcome.LEVEL:
            self._tell_start()
            self._worker.entrance, self._worker.phase = None, Phase.HELD
            self._come_in()

    def _pull(self, donor: Rank, *, at: int | None = None) -> None:
        """`at`: the state before F, while everybody makes the step F; else as it is."""
        self._donor = (donor, self._worker.inbox.lives[donor])
        wanted = StateWanted(at_least=at or 0)
        self._pull_from(donor, wanted, lambda snapshot: self._take(snapshot, at))

    def _take(self, snapshot: StateSnapshot, at: int | None) -> None:
        if self._worker.entrance is not self:
            return
        self._donor = None
        if self._all_update_together:
            is_right = (
                self._meeting.holds(snapshot.iteration)
                if at is None
                else (snapshot.iteration == at == self._meeting.iteration - 1)
            )
            if not is_right:
                self._clock.after(SLICE_S, self.look)
                return
            snapshot = replace(snapshot, iteration=self._meeting.iteration - 1)
        self._overtake(snapshot)
        self._enter()

    def _overtake(self, snapshot: StateSnapshot) -> None:
        parts, progress = self._worker.parts, self._worker.progress
        Checkpointer(
            Path(os.devnull),  # nothing is saved in virtual time
            every_s=float("inf"),
            replica=parts.replica,
            progress=progress,
            stream=parts.stream,
            machine=parts.machine,
        ).overtake(snapshot)
        initial = self._job.spec.batching.global_batch_size.initial
        progress.job_samples = max(progress.job_samples, snapshot.iteration * initial)
        parts.reporter.event(
            EventReason.WORKER_REJOINED, "took over a peer's state", iteration=snapshot.iteration
        )

    def _go_on(self) -> None:
        """From its own weights."""
        if self._before is not None:
            self._worker.parts.machine.restore(self._before.state())
        self._enter()

    def _enter(self) -> None:
        self._tell_start()
        self._worker.take_part(self._worker.progress.iteration)
        self._come_in()

    def _tell_start(self) -> None:
        worker = self._worker
        worker.parts.reporter.event(
            EventReason.TRAINING_STARTED,
            f"linked with {len(worker.inbox.linked)} workers",
            iteration=worker.progress.iteration,
        )
