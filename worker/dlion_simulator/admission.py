"""Admits a simulated worker to a run in which others may already train.

Makes the decisions of `trainer.admission`, re-evaluated on every event instead of in a waiting
loop. The messages and the choice of the iteration to join at come from `lifecycle.join_barrier`.
Called by `worker` on events and by `churn` when a worker starts.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dlion_api.reasons import EventReason
from dlion_core.lifecycle import join_barrier
from dlion_core.lifecycle.catch_up import MAX_BUFFERED_BYTES, CatchUp, CatchUpOutcome
from dlion_core.links.events import StateRequest
from dlion_core.policies.catalogue import is_fully_synchronous, may_catch_up, may_step_concurrently
from dlion_simulator.context import WorkerPhase
from dlion_worker.training.checkpointing import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlion_api.names import Rank
    from dlion_core.links.events import StateSnapshot
    from dlion_core.policies.interface import Event, PolicyMachine
    from dlion_simulator.clock import VirtualClock
    from dlion_simulator.worker import VirtualWorker

RETRY_S = 0.1
"""Delay before retrying after an unsuitable state, as on real links."""


class VirtualAdmission:
    """Admission of one worker."""

    def __init__(
        self,
        worker: VirtualWorker,
        clock: VirtualClock,
        *,
        pull: Callable[[Rank, StateRequest, Callable[[StateSnapshot], None]], None],
        start_training: Callable[[], None],
        retry: Callable[[], None],
        before: PolicyMachine | None = None,
    ) -> None:
        """Set up the admission of `worker`.

        `pull(donor, wanted, take)` requests a peer's state. `start_training` is called on success,
        `retry` if catching up failed. `before` is the previous policy state of a returning worker;
        it is restored if the worker continues with its own weights.
        """
        self._worker, self._clock = worker, clock
        self._pull_from, self._start_training, self._retry = pull, start_training, retry
        self._job = worker.parts.job
        self._all_update_together = is_fully_synchronous(self._job.spec)
        self._begins_beside = may_step_concurrently(self._job.spec)
        state_bytes = 2 * worker.parts.replica.model.weights_D.nbytes
        is_first = before is None and may_catch_up(self._job.spec)
        self._max_ahead = MAX_BUFFERED_BYTES // state_bytes if is_first else 0
        self._catching_up: CatchUp | None = None
        self._peers_have_trained = False
        self._barrier = join_barrier.JoinBarrier()
        self._donor: tuple[Rank, int] | None = None
        """The peer whose state was requested, and the connection count of its link then."""
        self._began_s = clock.now_s
        self._peers_training_since_s: float | None = None
        """Since when at least one peer has been training."""
        deadline_s: float | None = self._job.spec.start_deadline_seconds
        self._before, self._links_timeout_s = before, 0.0
        if before is not None:
            deadline_s = join_barrier.TRAINING_PEER_WAIT_S if deadline_s is None else deadline_s
            self._links_timeout_s = join_barrier.ALL_LINKS_WAIT_S
        if deadline_s is not None:
            clock.after(deadline_s, self.look)
        self._deadline_s = deadline_s

    @property
    def is_rejoin(self) -> bool:
        """Whether it took part in the run before."""
        return self._before is not None

    def look(self, events: Iterable[Event] = ()) -> None:
        """Advance as far as the current state allows.

        `events` are new events, used only while catching up.
        """
        if self._worker.admission is not self:
            return
        if self._catching_up is not None:
            self._advance_catch_up(self._catching_up, events)
            return
        link_epochs = self._worker.inbox.link_epochs
        if self._donor is not None:
            donor, life = self._donor
            if link_epochs.get(donor) == life:
                return
            self._donor = None
        if training := self._training_peers():
            self._peers_have_trained = True
            if not (self._is_fully_linked() or self._has_waited_for_links()):
                return
            if not self._all_update_together:
                self._pull(training[0])
            elif self._may_catch_up(training):
                self._pull_for_catch_up(training)
            else:
                self._join_at_barrier(training)
            return
        self._peers_training_since_s = None
        if self._peers_have_trained:
            self._ask_again()
        elif self._may_start_together():
            self._continue_with_own_weights()

    def _ask_again(self) -> None:
        """Ask all peers again, because those that trained have left.

        Another joining worker may have adopted their state and started since it answered.
        """
        self._peers_have_trained = False
        self._barrier = join_barrier.JoinBarrier()
        self._worker.inbox.discard_announcements()
        self._worker.inbox.answers.clear()
        for peer in sorted(self._worker.inbox.linked):
            self._worker.parts.links[peer].push(join_barrier.join_request())

    def _training_peers(self) -> list[Rank]:
        """Ranks of the peers that train, in order."""
        return sorted(
            rank for rank, answer in self._worker.inbox.answers.items() if answer.is_training
        )

    def _has_waited_for_links(self) -> bool:
        """Whether it has waited long enough for links to all neighbours."""
        now_s = self._clock.now_s
        if self._peers_training_since_s is None:
            self._peers_training_since_s = now_s
            self._clock.after(self._links_timeout_s, self.look)
        return round(now_s - self._peers_training_since_s, 6) >= self._links_timeout_s

    def _is_fully_linked(self) -> bool:
        return self._worker.inbox.linked >= self._worker.neighbours

    def _may_start_together(self) -> bool:
        """Whether no peer trains and those present may begin together."""
        linked, answers = self._worker.inbox.linked, self._worker.inbox.answers
        if not all(peer in answers and not answers[peer].asked for peer in linked):
            return False
        if any(answer.lacks_quorum for answer in answers.values()):
            return False
        workers = self._job.workers()
        if self._is_fully_linked():
            return True
        deadline_s = self._deadline_s
        if deadline_s is None or self._clock.now_s - self._began_s < deadline_s:
            return False
        there = {*linked, self._worker.rank}
        sites = {worker.site for worker in workers if worker.rank in there}
        return len(sites) >= self._job.spec.min_sites

    def _join_at_barrier(self, training: list[Rank]) -> None:
        """Join at a common iteration, for policies in which all update together.

        No worker may pass that iteration alone.
        """
        inbox, barrier = self._worker.inbox, self._barrier
        for peer in barrier.peers_to_ask(inbox.link_epochs, inbox.answers):
            self._worker.parts.links[peer].push(join_barrier.join_request(barrier.iteration))
        before = barrier.iteration - 1
        inbox.discard_steps(before - 1)
        if not barrier.is_agreed(inbox.link_epochs, inbox.answers):
            return
        if self._begins_beside and barrier.should_pull_early(
            training, inbox.peers_with_step(before)
        ):
            self._pull(training[0], at=before)
        elif held := sorted(inbox.peers_with_step(barrier.iteration) & set(training)):
            self._pull(held[0])

    def _may_catch_up(self, training: list[Rank]) -> bool:
        others = self._worker.inbox.linked - set(training)
        return not others & self._worker.inbox.answers.keys() and len(training) <= self._max_ahead

    def _pull_for_catch_up(self, training: list[Rank]) -> None:
        """Pull a state while the others train, once their updates can be replayed onto it."""
        inbox = self._worker.inbox
        firsts = inbox.first_steps()
        if inbox.linked != set(training) or not set(training) <= firsts.keys():
            return
        peers_ahead = {peer: inbox.link_epochs[peer] for peer in training}
        donor, least = training[0], max(firsts[peer] for peer in training) - 1
        self._donor = (donor, peers_ahead[donor])
        wanted = StateRequest(at_least=least)
        self._pull_from(donor, wanted, lambda snapshot: self._catch_up(snapshot, peers_ahead))

    def _catch_up(self, snapshot: StateSnapshot, peers_ahead: dict[Rank, int]) -> None:
        worker = self._worker
        if worker.admission is not self:
            return
        self._adopt_state(snapshot)
        worker.inbox.peers_ahead = peers_ahead
        self._catching_up = CatchUp(
            worker.inbox,
            dispatcher=worker.dispatcher,
            progress=worker.progress,
            machine=worker.parts.machine,
            send=lambda peer, message: worker.parts.links[peer].push(message),
            before_pass=self._count_iteration,
            after_pass=lambda: None,
        )
        self._catching_up.begin()
        self._advance_catch_up(self._catching_up, ())

    def _count_iteration(self, iteration: int) -> None:
        progress, samples = self._worker.progress, self._worker.global_batch_size()
        progress.advance(iteration, local_batch_size=0, global_batch_size=samples)

    def _advance_catch_up(self, way: CatchUp, events: Iterable[Event]) -> None:
        way.take(events)
        outcome = way.advance()
        if outcome is CatchUpOutcome.FAILED:
            self._retry()
        elif outcome is CatchUpOutcome.CAUGHT_UP:
            self._report_start()
            self._worker.admission, self._worker.phase = None, WorkerPhase.HELD
            self._start_training()

    def _pull(self, donor: Rank, *, at: int | None = None) -> None:
        """Pull the donor's state: after iteration `at`, or its current state."""
        self._donor = (donor, self._worker.inbox.link_epochs[donor])
        wanted = StateRequest(at_least=at or 0)
        self._pull_from(donor, wanted, lambda snapshot: self._take(snapshot, at))

    def _take(self, snapshot: StateSnapshot, at: int | None) -> None:
        if self._worker.admission is not self:
            return
        self._donor = None
        if self._all_update_together:
            is_right = (
                self._barrier.accepts(snapshot.iteration)
                if at is None
                else (snapshot.iteration == at == self._barrier.iteration - 1)
            )
            if not is_right:
                self._clock.after(RETRY_S, self.look)
                return
            snapshot = replace(snapshot, iteration=self._barrier.iteration - 1)
        self._adopt_state(snapshot)
        self._finish()

    def _adopt_state(self, snapshot: StateSnapshot) -> None:
        parts, progress = self._worker.parts, self._worker.progress
        Checkpointer(
            Path(os.devnull),  # nothing is saved in virtual time
            every_s=float("inf"),
            replica=parts.replica,
            progress=progress,
            stream=parts.stream,
            machine=parts.machine,
        ).adopt(snapshot)
        initial = self._job.spec.batching.global_batch_size.initial
        progress.job_samples = max(progress.job_samples, snapshot.iteration * initial)
        parts.reporter.event(
            EventReason.WORKER_REJOINED, "took over a peer's state", iteration=snapshot.iteration
        )

    def _continue_with_own_weights(self) -> None:
        """Continue from its own weights."""
        if self._before is not None:
            self._worker.parts.machine.restore(self._before.state())
        self._finish()

    def _finish(self) -> None:
        self._report_start()
        self._worker.start_at(self._worker.progress.iteration)
        self._start_training()

    def _report_start(self) -> None:
        worker = self._worker
        worker.parts.reporter.event(
            EventReason.TRAINING_STARTED,
            f"linked with {len(worker.inbox.linked)} workers",
            iteration=worker.progress.iteration,
        )
