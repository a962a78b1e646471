"""Admits a simulated worker to the run: executes the instructions of `lifecycle.admission`."""

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from dlion_api.names import Rank
from dlion_api.protocol.membership import Membership
from dlion_api.reasons import EventReason
from dlion_core.lifecycle.admission import (
    Admission,
    AdmissionInstruction,
    AdmissionPhase,
    AdoptState,
    KeepOwnState,
    PullState,
)
from dlion_core.lifecycle.catch_up import CatchUp, CatchUpOutcome
from dlion_core.links.events import StateRequest, StateSnapshot
from dlion_core.policies.interface import Event, PolicyMachine, SendMessage
from dlion_core.topology.topology import is_all_to_all
from dlion_simulator.clock import VirtualClock
from dlion_simulator.context import WorkerPhase
from dlion_simulator.worker import VirtualWorker
from dlion_worker.training.checkpointing import Checkpointer


class VirtualAdmission:
    """Admission of one worker."""

    def __init__(
        self,
        worker: VirtualWorker,
        clock: VirtualClock,
        *,
        membership: Callable[[], Membership],
        pull: Callable[[Rank, StateRequest, Callable[[StateSnapshot], None]], None],
        retry: Callable[[], None],
        before: PolicyMachine | None = None,
    ) -> None:
        """Set up the admission of `worker`.

        `pull(donor, wanted, take)` requests a peer's state. `retry` is called if catching up
        failed. `before` is the previous policy state of a returning worker; it is restored if the
        worker continues with its own weights.
        """
        self._worker, self._clock = worker, clock
        self._pull_from, self._retry = pull, retry
        self._job, self._before = worker.parts.job, before
        self.is_rejoin = before is not None
        """Whether the worker took part in the run before."""
        self._admission = Admission(
            self._job,
            worker.rank,
            worker.inbox,
            membership=membership,
            now_s=clock.now_s,
            state_bytes=2 * worker.parts.replica.model.weights_D.nbytes,
            is_rejoin=self.is_rejoin,
            neighbours=None if is_all_to_all(self._job, worker.rank) else lambda: worker.neighbours,
        )
        self._catching_up: CatchUp | None = None
        self._pull: PullState | None = None
        self._wake_at_s: float | None = None
        self._schedule()

    def advance(self, events: Iterable[Event] = ()) -> None:
        """Advance as far as the current state allows.

        `events` are new events, used only while catching up.
        """
        if self._worker.admission is not self:
            return
        if self._catching_up is not None:
            self._advance_catch_up(self._catching_up, events)
        else:
            self._execute(self._admission.advance(self._clock.now_s))

    def _wake(self) -> None:
        self._wake_at_s = None
        if self._catching_up is None:
            self.advance()

    def _schedule(self) -> None:
        wake_at_s = self._admission.wake_at_s
        if wake_at_s is not None and wake_at_s != self._wake_at_s:
            self._wake_at_s = wake_at_s
            self._clock.after(max(0.0, wake_at_s - self._clock.now_s), self._wake)

    def _execute(self, instructions: Iterable[AdmissionInstruction]) -> None:
        self._schedule()
        if self._admission.phase is not AdmissionPhase.STATE:
            self._pull = None
        for instruction in instructions:
            match instruction:
                case SendMessage(peer, message):
                    self._worker.parts.links[peer].push(message)
                case PullState(peer, wanted) as pull:
                    self._pull = pull
                    self._pull_from(peer, wanted, partial(self._pulled, pull))
                case AdoptState(snapshot):
                    self._adopt(snapshot)
                case KeepOwnState():
                    self._keep()

    def _pulled(self, pull: PullState, snapshot: StateSnapshot) -> None:
        # A transfer may end after the admission has asked another peer.
        if self._worker.admission is self and self._pull is pull and self._catching_up is None:
            self._pull = None
            self._execute(self._admission.pulled(snapshot, self._clock.now_s))

    def _keep(self) -> None:
        if self._before is not None:
            self._worker.parts.machine.restore(self._before.state())
        self._begin()

    def _adopt(self, snapshot: StateSnapshot) -> None:
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
        if self._worker.inbox.peers_ahead:
            self._catch_up()
        else:
            self._begin()

    # ---- catching up -----------------------------------------------------------------------------

    def _catch_up(self) -> None:
        worker = self._worker
        self._catching_up = CatchUp(
            worker.inbox,
            dispatcher=worker.cycle.dispatcher,
            send=lambda peer, message: worker.parts.links[peer].push(message),
            before_pass=self._count_iteration,
            after_pass=lambda: None,
        )
        self._catching_up.begin()
        self._advance_catch_up(self._catching_up, ())

    def _count_iteration(self, iteration: int) -> None:
        samples = self._worker.cycle.global_batch_size()
        self._worker.progress.advance(iteration, local_batch_size=0, global_batch_size=samples)

    def _advance_catch_up(self, way: CatchUp, events: Iterable[Event]) -> None:
        way.take(events)
        outcome = way.advance()
        if outcome is CatchUpOutcome.FAILED:
            self._retry()
        elif outcome is CatchUpOutcome.CAUGHT_UP:
            self._report_start()
            self._worker.admission, self._worker.phase = None, WorkerPhase.HELD
            self._worker.advance()

    # ---- the end ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._report_start()
        self._worker.start_at(self._worker.progress.iteration)
        self._worker.advance()

    def _report_start(self) -> None:
        worker = self._worker
        worker.parts.reporter.event(
            EventReason.TRAINING_STARTED,
            f"linked workers: {len(worker.inbox.linked)}",
            iteration=worker.progress.iteration,
        )
