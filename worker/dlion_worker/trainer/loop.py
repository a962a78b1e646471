"""The training loop of one worker, top to bottom: directive, gradient, policies, what arrived.

Runs on the process's main thread. Nothing here blocks but `_hold`, and that only while the
synchronisation policy names peers to wait for. Errors of training (a loss that is no longer
finite) raise; faults of peers never do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dlion_api.errors import DivergedError
from dlion_api.measurements import Directive, StepTiming
from dlion_api.names import Rank
from dlion_api.progress import StepRecord
from dlion_api.spec import Job
from dlion_worker.exchange import Exchange
from dlion_worker.policies.horizon import Horizon
from dlion_worker.policies.interface import BudgetsChanged, Event, LocalStepDone
from dlion_worker.sidecar_client import SidecarClient
from dlion_worker.trainer.catching_up import CatchUp, Outcome
from dlion_worker.trainer.checkpointing import Checkpointer
from dlion_worker.trainer.gradient_norms import NormMeter
from dlion_worker.trainer.hearing import Hearing
from dlion_worker.trainer.inbox import Inbox, farewell
from dlion_worker.trainer.quota_watch import QuotaWatch
from dlion_worker.trainer.refusals import Refusals
from dlion_worker.trainer.replica import LocalReplica
from dlion_worker.trainer.reporting import Reporter, worth_telling
from dlion_worker.trainer.step_clock import StepClock
from dlion_worker.trainer.stopping import JobProgress, stop_reason
from dlion_worker.training.datasets import BatchStream
from dlion_worker.training.evaluation import weights_hash

HOLD_SLICE_S = 0.2
"""While held, how often stop requests and lost peers are looked at."""

OWED_S = 2.0
"""For so long a peer that has stopped is still expected to send what it owes."""


@dataclass
class Parts:
    """What one worker is put together from."""

    job: Job
    rank: Rank
    replica: LocalReplica
    stream: BatchStream
    machine: Horizon
    exchange: Exchange
    sidecar: SidecarClient
    reporter: Reporter
    inbox: Inbox
    refusals: Refusals
    training_set_samples: Callable[[bool], int]
    """Of all workers, 0: not known yet; told whether this one has made a step."""
    worker_count: int


class TrainingLoop:
    """Trains until a stop condition is met; `run` yields the reason."""

    def __init__(
        self,
        parts: Parts,
        *,
        progress: JobProgress,
        checkpointer: Checkpointer,
        has_barrier: bool,
        external_stop: Callable[[], str | None],
        interrupted: Callable[[], bool],
        after_step: Callable[[JobProgress], None],
    ) -> None:
        """`has_barrier`: an iteration's update is made when the peers' gradients are in."""
        self._parts = parts
        self.progress = progress
        self._checkpointer = checkpointer
        self._has_barrier = has_barrier
        self._external_stop = external_stop
        self._interrupted = interrupted
        self._after_step = after_step
        self._directive: Directive | None = None
        self._norms = NormMeter(parts.job)
        self._hearing = Hearing(
            parts,
            progress,
            send=parts.exchange.send,
            refuse=lambda peer, reason, _: parts.refusals.refuse(peer, reason),
            norms=self._norms,
            has_barrier=has_barrier,
        )
        self._instructions = self._hearing.instructions
        self._standstill = self._hearing.standstill
        self._quota = QuotaWatch()
        self._loss = 0.0
        self._local_batch_size = 0
        self._iteration_s = 0.0
        self._trained_before_s = progress.trained_s
        self._began_s = time.monotonic()
        self._clock = self._new_clock()

    # ---- the loop ------------------------------------------------------------------------------

    def run(self) -> str | None:
        """Iterates until the run is over; why it is. None: it goes on without this worker, which
        has held still or lost the others' track, and is to come in anew (`begin_anew`).

        A local step whose update was not made then is as if it had not been.
        """
        self._parts.exchange.set_iteration(self.progress.iteration)
        with self._quota.telling(self._parts.sidecar.send):
            reason = self._iterate() if self._begin() else self._over()
        self._checkpointer.undo_step()
        if reason is not None and not self._interrupted():
            self._announce(reason)
        return reason

    def begin_anew(self, machine: Horizon) -> None:
        """Before `run` once more: with a machine that has heard nothing yet."""
        self._hearing.begin_anew(machine)
        self._checkpointer.begin_anew(machine)

    @property
    def holds_still(self) -> bool:
        """Whether too few sites are joined with this worker for it to go on."""
        return self._standstill.holds

    def _begin(self) -> bool:
        """Comes to where its own steps begin. False: in vain."""
        parts = self._parts
        if not parts.inbox.ahead:
            self._handle(parts.inbox.start(self.progress.iteration))
            return True
        way = CatchUp(
            parts.inbox,
            hearing=self._hearing,
            progress=self.progress,
            machine=parts.machine,
            send=parts.exchange.send,
            passing=self._passing,
            passed=self._checkpointer.end_step,
        )
        way.begin()
        while (outcome := way.look()) is Outcome.UNDER_WAY and self._over() is None:
            way.take(parts.inbox.wait(HOLD_SLICE_S))
        return outcome is Outcome.LEVEL

    def _passing(self, iteration: int) -> None:
        self._checkpointer.begin_step()
        self.progress.advance(
            iteration, local_batch_size=0, global_batch_size=self.global_batch_size()
        )
        self._parts.exchange.set_iteration(iteration)

    def _iterate(self) -> str | None:
        parts = self._parts
        while (reason := self._over()) is None:
            if not self._standstill.may_step():
                if self._standstill.is_behind:
                    return None
                self._handle(parts.inbox.wait(HOLD_SLICE_S))
                self.report_links()  # whoever makes no step is to be seen as cut off all the same
                self._after_step(self.progress)  # a checkpoint may be due
                continue
            if parts.machine.waiting_for():  # before the first step: what came early may say so
                self._handle(parts.inbox.wait(HOLD_SLICE_S))
                continue
            self._take_directive()
            self._step()
            if not self._hold():
                continue
            self._checkpointer.end_step()
            self._report()
            self._after_step(self.progress)
        return reason

    def _step(self) -> None:
        parts, batch_size = self._parts, self._batch_size()
        self._clock = self._new_clock()
        if self._has_barrier:
            self._checkpointer.begin_step()
        iteration = parts.machine.next_iteration()
        with self._clock.own():
            x_B, y_B = parts.stream.next(batch_size)
            result = parts.replica.model.step(x_B, y_B)
        self._clock.compute_s = time.monotonic() - self._clock.began_s
        if not result.finite:
            msg = (
                f"loss {result.loss} at iteration {iteration}: it or its gradient is not finite. "
                "Lower spec.trainer.optimizer.learningRate, or look for bad samples in the data"
            )
            raise DivergedError(msg)
        self._loss, self._local_batch_size = result.loss, len(y_B)
        self._norms.own(result.gradient_D, len(y_B))
        global_batch_size = self.global_batch_size()
        self.progress.advance(
            iteration,
            local_batch_size=self._local_batch_size,
            global_batch_size=global_batch_size,
        )
        self.progress.trained_s = self._trained_s()
        parts.exchange.set_iteration(iteration)
        self._take_directive()  # the rates as of now: this gradient's size goes by them
        self._handle(
            [
                BudgetsChanged(parts.exchange.room_bytes(), self._delay_steps()),
                LocalStepDone(
                    iteration=self.progress.iteration,
                    gradient_D=result.gradient_D,
                    local_batch_size=self._local_batch_size,
                    loss=result.loss,
                    global_batch_size=global_batch_size,
                ),
            ]
        )

    def _delay_steps(self) -> dict[Rank, float]:
        """How far peers are, in iterations as long as the last one."""
        if not self._iteration_s:
            return {}
        delays_s = self._parts.exchange.one_way_delays_s()
        return {peer: delay_s / self._iteration_s for peer, delay_s in delays_s.items()}

    def _hold(self) -> bool:
        """Hands over what has arrived; waits while the machine names peers. False: in vain.

        An iteration under way is finished even when the run is to stop, unless a peer has stopped
        before it, whose contribution will never come, or all who are waited for have stopped and
        what they owed has not come for a while, or this worker itself is told to end.
        """
        inbox = self._parts.inbox
        self._handle(inbox.drain())
        gone_s = 0.0
        while awaited := self._parts.machine.waiting_for():
            if inbox.stop_iteration is not None and inbox.stop_iteration < self.progress.iteration:
                return False
            began_s = time.monotonic()
            events = inbox.wait(HOLD_SLICE_S)
            waited_s = time.monotonic() - began_s
            self._clock.waited_s += waited_s
            gone_s = gone_s + waited_s if awaited <= inbox.stopped and not events else 0.0
            if gone_s > OWED_S:
                return False
            if self._interrupted():  # others may end too: not an update without them
                return False
            self._handle(events)
            if self.holds_still:  # as those may do who are waited for
                if self._standstill.is_behind or self._over() is not None:
                    return False
                self.report_links()
                self._after_step(self.progress)
        return True

    def _trained_s(self) -> float:
        return self._trained_before_s + time.monotonic() - self._began_s

    def _over(self) -> str | None:
        self.progress.trained_s = self._trained_s()
        return (
            self._parts.inbox.stop_reason
            or self._external_stop()
            or stop_reason(
                self._parts.job.spec.trainer.stop,
                self.progress,
                training_set_samples=self._training_set_samples(),
            )
        )

    def _training_set_samples(self) -> int:
        return self._parts.training_set_samples(self._local_batch_size > 0)

    def _announce(self, reason: str) -> None:
        inbox = self._parts.inbox
        inbox.farewell = farewell(reason, self.progress.iteration)
        for peer in sorted(inbox.linked):
            self._parts.exchange.send(peer, inbox.farewell)

    # ---- carrying out what the policies say ----------------------------------------------------

    def _handle(self, events: Iterable[Event]) -> None:
        self._hearing.handle(events)

    # ---- directives and reports ----------------------------------------------------------------

    def _take_directive(self) -> None:
        directive = self._parts.sidecar.latest_directive()
        if directive is None or directive is self._directive:
            return
        if self._directive is None or directive.version != self._directive.version:
            self._directive = directive
            self._parts.exchange.set_budgets(
                directive.budget_bytes, directive.bandwidth_bytes_per_s
            )
            self._parts.reporter.directive(directive, self.progress.iteration)

    def _batch_size(self) -> int:
        if self._directive is not None:
            return self._directive.local_batch_size
        return max(1, self.global_batch_size() // self._parts.worker_count)

    def global_batch_size(self) -> int:
        """Samples of all workers in one iteration, as the sidecar says; at first the initial."""
        if self._directive is not None:
            return self._directive.global_batch_size
        return self._parts.job.spec.batching.global_batch_size.initial

    def _report(self) -> None:
        parts, clock = self._parts, self._clock
        wall_s = self._iteration_s = time.monotonic() - clock.began_s
        cpu_s = time.process_time() - clock.began_cpu_s
        exchange_cpu_s = self._exchange_cpu_s()
        with clock.own():
            parts.reporter.step(
                StepRecord(
                    time_s=parts.reporter.now_s(),
                    rank=parts.rank,
                    incarnation=parts.reporter.incarnation,
                    iteration=self.progress.iteration,
                    loss=float(self._loss),
                    local_batch_size=self._local_batch_size,
                    global_batch_size=self.global_batch_size(),
                    learning_rate=parts.replica.learning_rate,
                    compute_s=clock.compute_s,
                    wall_s=wall_s,
                    cpu_s=cpu_s,
                    exchange_cpu_s=exchange_cpu_s,
                    waited_s=clock.waited_s,
                    samples=self.progress.own_samples,
                    weights_hash=weights_hash(parts.replica.model.weights_D)
                    if parts.job.spec.trainer.hash_weights
                    else "",
                    epochs=self.progress.epochs(self._training_set_samples()),
                )
            )
        parts.refusals.report(parts.inbox.take_refusals())
        self.report_links()
        self._tell_sidecar(wall_s, cpu_s)

    def report_links(self, *, now: bool = False) -> None:
        """What has been sent, where it is due or at the end of the run."""
        states, iteration = self._parts.exchange.link_states, self.progress.iteration
        self._parts.reporter.links(states, self._directive, iteration, now=now)

    def _tell_sidecar(self, wall_s: float, cpu_s: float) -> None:
        """Deliveries first: the timing closes the iteration that they belong to."""
        parts = self._parts
        for delivery in filter(worth_telling, parts.exchange.take_deliveries()):
            parts.sidecar.send(delivery)
        quota_changed = self._quota.changed()
        parts.sidecar.send(
            StepTiming(
                iteration=self.progress.iteration,
                samples=self._local_batch_size,
                compute_s=self._clock.compute_s,
                wall_s=wall_s,
                cpu_s=cpu_s,
                compute_cpu_s=self._own_cpu_s(),
                waited_s=self._clock.waited_s,
                exchanged_bytes=parts.exchange.wire_bytes() - self._clock.exchange_began_bytes,
                quota_changed=quota_changed,
                norms=self._norms.take(),
            )
        )
        if (allowance := self._quota.allowance(now=quota_changed)) is not None:
            parts.sidecar.send(allowance)

    def _exchange_cpu_s(self) -> float:
        """CPU seconds that peers have cost in this iteration: gRPC and TLS, policies, codecs, being
        woken by what arrives, keeping account of links."""
        clock = self._clock
        threads_s = self._parts.exchange.cpu_s() - clock.exchange_thread_began_s
        update_s = self._instructions.update_cpu_s - clock.update_began_cpu_s
        main_s = time.thread_time() - clock.began_thread_s
        return threads_s + main_s - clock.own_thread_s - update_s

    def _own_cpu_s(self) -> float:
        """CPU seconds that this iteration would have taken without any peers."""
        return max(0.0, time.process_time() - self._clock.began_cpu_s - self._exchange_cpu_s())

    def _new_clock(self) -> StepClock:
        return StepClock(
            began_s=time.monotonic(),
            began_cpu_s=time.process_time(),
            exchange_thread_began_s=self._parts.exchange.cpu_s(),
            exchange_began_bytes=self._parts.exchange.wire_bytes(),
            update_began_cpu_s=self._instructions.update_cpu_s,
            began_thread_s=time.thread_time(),
        )
