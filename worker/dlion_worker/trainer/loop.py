"""The training loop of one worker: directive, gradient, policies, arrivals.

Runs on the main thread. Only `_wait_for_peers` blocks, while the synchronisation policy waits for
peers. Training errors, such as a loss that is not finite, raise; peers' faults do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dlion_api.errors import DivergedError
from dlion_api.names import Rank
from dlion_api.protocol.measurements import Directive, StepTiming
from dlion_api.protocol.progress import StepRecord
from dlion_api.spec import Job
from dlion_core.lifecycle.catch_up import CatchUp, CatchUpOutcome
from dlion_core.lifecycle.event_dispatcher import EventDispatcher
from dlion_core.lifecycle.gradient_norms import NormMeter
from dlion_core.lifecycle.inbox import stop_message
from dlion_core.lifecycle.reporting import Reporter, has_traffic
from dlion_core.lifecycle.stopping import JobProgress, stop_reason
from dlion_core.policies.interface import BudgetsChanged, Event, LocalStepDone
from dlion_core.policies.iteration_guard import IterationGuard
from dlion_worker.trainer.background.peer_refusals import PeerRefusalReporter
from dlion_worker.trainer.background.quota_watch import QuotaWatch
from dlion_worker.trainer.background.sidecar_client import SidecarClient
from dlion_worker.trainer.step_clock import StepClock
from dlion_worker.trainer.waiting_inbox import WaitingInbox
from dlion_worker.training.checkpointing import Checkpointer
from dlion_worker.training.datasets import BatchStream
from dlion_worker.training.evaluation import weights_hash
from dlion_worker.training.replica import LocalReplica
from dlion_worker.transport.peer_exchange import PeerExchange

WAIT_SLICE_S = 0.2
"""How often a blocked loop checks for stop requests and lost peers."""

STOPPED_PEER_WAIT_S = 2.0
"""How long a peer that has stopped may still deliver outstanding messages."""


@dataclass
class TrainerComponents:
    """The parts of one worker."""

    job: Job
    rank: Rank
    replica: LocalReplica
    stream: BatchStream
    machine: IterationGuard
    exchange: PeerExchange
    sidecar: SidecarClient
    reporter: Reporter
    inbox: WaitingInbox
    refusals: PeerRefusalReporter
    training_set_samples: Callable[[bool], int]
    """Samples of all workers; 0 if unknown. Its argument: whether this worker has made a step."""
    worker_count: int


class TrainingLoop:
    """Trains until a stop condition is met; `run` returns the reason."""

    def __init__(
        self,
        parts: TrainerComponents,
        *,
        progress: JobProgress,
        checkpointer: Checkpointer,
        has_barrier: bool,
        external_stop: Callable[[], str | None],
        interrupted: Callable[[], bool],
        after_step: Callable[[JobProgress], None],
    ) -> None:
        """`has_barrier`: an iteration's update waits for the peers' gradients."""
        self._parts = parts
        self.progress = progress
        self._checkpointer = checkpointer
        self._has_barrier = has_barrier
        self._external_stop = external_stop
        self._interrupted = interrupted
        self._after_step = after_step
        self._directive: Directive | None = None
        self._norms = NormMeter(parts.job)
        self._dispatcher = EventDispatcher(
            parts,
            progress,
            send=parts.exchange.send,
            refuse=lambda peer, reason, _: parts.refusals.refuse(peer, reason),
            norms=self._norms,
            has_barrier=has_barrier,
            cpu_s=time.thread_time,
        )
        self._instructions = self._dispatcher.instructions
        self._quorum_gate = self._dispatcher.quorum_gate
        self._quota = QuotaWatch()
        self._loss = 0.0
        self._local_batch_size = 0
        self._iteration_s = 0.0
        self._trained_before_s = progress.trained_s
        self._began_s = time.monotonic()
        self._clock = self._new_clock()

    # ---- the loop ------------------------------------------------------------------------------

    def run(self) -> str | None:
        """Iterate until the run ends, and return the reason.

        None: the run goes on without this worker, which must call `reset` and rejoin. It lost the
        quorum or could not catch up. A local step without an update is undone.
        """
        self._parts.exchange.set_iteration(self.progress.iteration)
        with self._quota.reporting_changes(self._parts.sidecar.send):
            reason = self._iterate() if self._begin() else self._over()
        self._checkpointer.undo_step()
        if reason is not None and not self._interrupted():
            self._announce(reason)
        return reason

    def reset(self, machine: IterationGuard) -> None:
        """Prepare for another `run`, with a machine that has received no events yet."""
        self._dispatcher.reset(machine)
        self._checkpointer.reset(machine)

    @property
    def lacks_quorum(self) -> bool:
        """Whether too few sites are connected for this worker to continue."""
        return self._quorum_gate.is_closed

    def _begin(self) -> bool:
        """Catch up to the current iteration. Return False on failure."""
        parts = self._parts
        if not parts.inbox.peers_ahead:
            self._handle(parts.inbox.start(self.progress.iteration))
            return True
        catch_up = CatchUp(
            parts.inbox,
            dispatcher=self._dispatcher,
            progress=self.progress,
            machine=parts.machine,
            send=parts.exchange.send,
            before_pass=self._before_pass,
            after_pass=self._checkpointer.end_step,
        )
        catch_up.begin()
        while (
            outcome := catch_up.advance()
        ) is CatchUpOutcome.IN_PROGRESS and self._over() is None:
            catch_up.take(parts.inbox.wait(WAIT_SLICE_S))
        return outcome is CatchUpOutcome.CAUGHT_UP

    def _before_pass(self, iteration: int) -> None:
        self._checkpointer.begin_step()
        self.progress.advance(
            iteration, local_batch_size=0, global_batch_size=self.global_batch_size()
        )
        self._parts.exchange.set_iteration(iteration)

    def _iterate(self) -> str | None:
        parts = self._parts
        while (reason := self._over()) is None:
            if not self._quorum_gate.may_step():
                if self._quorum_gate.is_behind:
                    return None
                self._handle(parts.inbox.wait(WAIT_SLICE_S))
                self.report_links()  # observers must see a cut-off worker, too
                self._after_step(self.progress)  # a checkpoint may be due
                continue
            if parts.machine.waiting_for():  # messages from before the first step may require it
                self._handle(parts.inbox.wait(WAIT_SLICE_S))
                continue
            self._take_directive()
            self._step()
            if not self._wait_for_peers():
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
        self._take_directive()  # the current rates determine this gradient's size
        self._handle(
            [
                BudgetsChanged(parts.exchange.sendable_bytes(), self._delay_steps()),
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
        """One-way delays to peers, in units of the last iteration's duration."""
        if not self._iteration_s:
            return {}
        delays_s = self._parts.exchange.one_way_delays_s()
        return {peer: delay_s / self._iteration_s for peer, delay_s in delays_s.items()}

    def _wait_for_peers(self) -> bool:
        """Process arrivals and wait for the peers that the machine names. False: give up.

        An iteration is finished even when the run stops. It is given up if a peer stopped before
        it, if all awaited peers have stopped and deliver nothing for a while, or if this worker
        must end.
        """
        inbox = self._parts.inbox
        self._handle(inbox.drain())
        silent_s = 0.0
        while awaited := self._parts.machine.waiting_for():
            if inbox.stop_iteration is not None and inbox.stop_iteration < self.progress.iteration:
                return False
            began_s = time.monotonic()
            events = inbox.wait(WAIT_SLICE_S)
            waited_s = time.monotonic() - began_s
            self._clock.waited_s += waited_s
            silent_s = silent_s + waited_s if awaited <= inbox.stopped and not events else 0.0
            if silent_s > STOPPED_PEER_WAIT_S:
                return False
            if self._interrupted():  # others may end too; do not update without them
                return False
            self._handle(events)
            if self.lacks_quorum:  # the awaited peers may lack it, too
                if self._quorum_gate.is_behind or self._over() is not None:
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
        inbox.stop_message = stop_message(reason, self.progress.iteration)
        for peer in sorted(inbox.linked):
            self._parts.exchange.send(peer, inbox.stop_message)

    # ---- events --------------------------------------------------------------------------------

    def _handle(self, events: Iterable[Event]) -> None:
        self._dispatcher.handle(events)

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
        """Samples of all workers per iteration: the sidecar's value, at first the initial one."""
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
        self._report_to_sidecar(wall_s, cpu_s)

    def report_links(self, *, now: bool = False) -> None:
        """Report link counters when due, or `now`."""
        states, iteration = self._parts.exchange.link_counters, self.progress.iteration
        self._parts.reporter.links(states, self._directive, iteration, now=now)

    def _report_to_sidecar(self, wall_s: float, cpu_s: float) -> None:
        """Send deliveries before the timing, which closes their iteration."""
        parts = self._parts
        for delivery in filter(has_traffic, parts.exchange.take_deliveries()):
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
        """CPU seconds spent on peers in this iteration.

        Counts gRPC, TLS, policies, codecs, wake-ups and link accounting.
        """
        clock = self._clock
        threads_s = self._parts.exchange.cpu_s() - clock.exchange_thread_began_s
        update_s = self._instructions.update_cpu_s - clock.update_began_cpu_s
        main_s = time.thread_time() - clock.began_thread_s
        return threads_s + main_s - clock.own_thread_s - update_s

    def _own_cpu_s(self) -> float:
        """CPU seconds that this iteration would have taken without peers."""
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
