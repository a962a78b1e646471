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
from dlion_worker.policies.catalogue import all_update_together, may_begin_beside
from dlion_worker.trainer import rendezvous
from dlion_worker.trainer.checkpointing import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlion_api.names import Rank
    from dlion_worker.exchange import StateSnapshot
    from dlion_worker.policies.interface import Machine
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
        pull: Callable[[Rank, Callable[[StateSnapshot], None]], None],
        come_in: Callable[[], None],
        before: Machine | None = None,
    ) -> None:
        """`pull(donor, take)`: asks a peer for its state. `come_in`: this worker trains now.
        `before`: of one that comes back the policies as they were: where it goes on from its own
        weights they go on, too."""
        self._worker, self._clock = worker, clock
        self._pull_from, self._come_in = pull, come_in
        self._job = worker.parts.job
        self._all_update_together = all_update_together(self._job.spec)
        self._begins_beside = may_begin_beside(self._job.spec)
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

    def look(self) -> None:
        """Takes the next step that what is known by now allows."""
        if self._worker.entrance is not self:
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
            if self._all_update_together:
                self._meet(inside)
            else:
                self._pull(inside[0])
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
            self._clock.after(rendezvous.UPDATE_S, lambda: self._pull_beside(inside[0], before))
        elif held := sorted(inbox.heard_at(meeting.iteration) & set(inside)):
            self._pull(held[0])

    def _pull_beside(self, donor: Rank, before: int) -> None:
        """The state before F while everybody makes the step F."""
        is_free = self._worker.entrance is self and self._donor is None
        if is_free and donor in self._worker.inbox.lives:
            self._pull(donor, at=before)

    def _pull(self, donor: Rank, *, at: int | None = None) -> None:
        self._donor = (donor, self._worker.inbox.lives[donor])
        self._pull_from(donor, lambda snapshot: self._take(snapshot, at))

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
        worker = self._worker
        worker.parts.reporter.event(
            EventReason.TRAINING_STARTED,
            f"linked with {len(worker.inbox.linked)} workers",
            iteration=worker.progress.iteration,
        )
        worker.take_part(worker.progress.iteration)
        self._come_in()
