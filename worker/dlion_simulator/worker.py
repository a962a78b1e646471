"""One worker in virtual time, with the real policies, sidecar and replica.

Does what `trainer.loop` does for a real worker: directive, gradient, policies, received messages,
in that order. A gradient is computed in a thread while virtual time stands still. Its inputs are
fixed when the step begins, so threading does not affect the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_api.errors import DivergedError
from dlion_api.protocol.measurements import CpuAllowance, StepTiming
from dlion_api.protocol.progress import StepRecord
from dlion_core.lifecycle.event_dispatcher import EventDispatcher
from dlion_core.lifecycle.gradient_norms import NormMeter
from dlion_core.lifecycle.inbox import EventInbox
from dlion_core.lifecycle.reporting import has_traffic
from dlion_core.lifecycle.stopping import JobProgress, stop_reason
from dlion_core.links.send_queue import equalize_similar
from dlion_core.policies.catalogue import has_barrier, rejection_error
from dlion_core.policies.interface import (
    BudgetsChanged,
    Event,
    LocalStepDone,
    MessageArrived,
    TopologyChanged,
)
from dlion_core.topology.clusters import graph_of_groups
from dlion_simulator.context import WorkerPhase

if TYPE_CHECKING:
    from concurrent.futures import Future

    from dlion_api.names import Rank
    from dlion_api.protocol.measurements import Capacity, Directive, Grouping
    from dlion_core.links.events import ExchangeEvent
    from dlion_core.policies.interface import Message
    from dlion_simulator.admission import VirtualAdmission
    from dlion_simulator.clock import ScheduledEvent
    from dlion_simulator.context import SimulationContext, WorkerParts
    from dlion_worker.training.model import StepResult


MIN_STEP_S = 1e-9
"""Minimum virtual duration of a step: with steps of zero length a run would never end."""


class VirtualWorker:
    """Trains until it is stopped."""

    def __init__(self, parts: WorkerParts, context: SimulationContext) -> None:
        self.parts = parts
        self.rank = parts.rank
        self.progress = JobProgress()
        self._norms = NormMeter(parts.job)
        self.dispatcher = EventDispatcher(
            parts,
            self.progress,
            send=self._send,
            refuse=self._refuse,
            norms=self._norms,
            has_barrier=has_barrier(parts.job.spec),
            due=lambda after_s: context.clock.after(after_s, self._check_quorum),
        )
        self._quorum_gate = self.dispatcher.quorum_gate
        self.inbox = EventInbox(self._send, clock_s=lambda: context.clock.now_s)
        self.admission: VirtualAdmission | None = None
        """Set while the worker joins a run that may already be training."""
        self.phase = WorkerPhase.ENTERING
        self.stopping: str | None = None
        self._context = context
        self._directive: Directive | None = None
        self._published_capacity: Capacity | None = None
        self._grouping: Grouping | None = None
        self.neighbours = frozenset(parts.links)
        """Peers that it currently exchanges with."""
        self._arrived: list[Event] = []
        self._step: Future[StepResult] | None = None
        self._due: ScheduledEvent | None = None
        self._step_core_s = self._left_core_s = 0.0
        self._since_s = 0.0
        self._began_s = 0.0
        self._computed_s = self._busy_s = 0.0
        self._exchanged_bytes = self._charged_bytes = 0
        self._batch_size = 0
        self._iteration = 0
        self._iteration_s = 0.0
        self._result: StepResult | None = None
        self._before = JobProgress()
        """State before the last local step."""

    @property
    def is_training(self) -> bool:
        """Whether it takes part in training, or did until the end."""
        return self.phase not in {WorkerPhase.ENTERING, WorkerPhase.GONE}

    def start_at(self, iteration: int) -> None:
        """Start training with the linked peers, from the step after `iteration` on."""
        self.admission = None
        self.phase = WorkerPhase.HELD
        self.dispatcher.handle(self.inbox.start(iteration))

    def reset(self) -> None:
        """Prepare to join again, keeping the weights and persistent state.

        A step whose update was not applied is discarded.
        """
        self.phase = WorkerPhase.ENTERING
        self._discard_step()
        self._arrived = []
        self.dispatcher.reset(self.parts.machine.restarted())
        self.inbox.reset(self.progress.iteration)

    def _discard_step(self) -> None:
        if self._result is not None and has_barrier(self.parts.job.spec):
            self.progress.take(self._before)
        self._result = None

    def leave(self) -> None:
        """End the process and discard the current step."""
        self.phase, self.admission = WorkerPhase.GONE, None
        if self._due is not None:
            self._due.cancel()
        self._step = self._due = None

    def heard(self, capacity: Capacity, incarnation: int) -> None:
        """Handle a peer's capacity, received by the sidecar."""
        self.parts.director.handle_capacity(capacity, incarnation)
        self.follow_grouping()

    def follow_grouping(self) -> None:
        """Update links and policy if the sidecar has a new grouping."""
        grouping = self.parts.director.grouping
        if grouping is None or grouping == self._grouping:
            return
        self._grouping = grouping
        graph = graph_of_groups(grouping)
        self.neighbours = graph[self.rank]
        self.inbox.put(TopologyChanged(graph))
        self._context.set_neighbours(self.rank, self.neighbours)

    def begin_step(self) -> None:
        """Begin the next local step, unless a peer or the quorum blocks it."""
        if self.phase is not WorkerPhase.HELD or not self._quorum_gate.may_step():
            return
        if self.parts.machine.waiting_for():
            return
        self.phase = WorkerPhase.COMPUTING
        parts = self.parts
        self._take_directive()
        self._iteration = parts.machine.next_iteration()
        x_B, y_B = parts.stream.next(self._next_batch_size())
        self._batch_size = len(y_B)
        self._step = self._context.executor.submit(parts.replica.model.step, x_B, y_B)
        self._began_s = self._since_s = self._context.clock.now_s
        slowdown = parts.straggler_model.next_slowdown(self._began_s)
        # Charge the bytes exchanged since the last step began: this step's are not known yet.
        self._charged_bytes, self._exchanged_bytes = self._exchanged_bytes, 0
        costs = parts.costs
        self._step_core_s = slowdown * costs.step_core_s(self._batch_size, self._charged_bytes)
        self._left_core_s = self._step_core_s
        self._schedule()

    def set_compute_units(self, units: float) -> None:
        """Change the share of the machine, also for the current step."""
        if self.phase is WorkerPhase.COMPUTING and self._due is not None:
            now_s = self._context.clock.now_s
            self._left_core_s -= (now_s - self._since_s) * self.parts.units
            self._since_s = now_s
            self._due.cancel()
            self.parts.units = units
            self._schedule()
        else:
            self.parts.units = units
        self.parts.director.handle(CpuAllowance(units, 0.0, 0.0), self._context.clock.now_s)
        self.send_capacity()

    def arrive(self, arrival: ExchangeEvent) -> None:
        """Handle an event from a link: at once while waiting, else after the current step."""
        if self.phase in {WorkerPhase.STOPPED, WorkerPhase.GONE}:
            return
        if isinstance(arrival, MessageArrived):
            self._exchanged_bytes += arrival.message.size_bytes
        self.inbox.put(arrival)
        events = self.inbox.drain()
        if self.admission is not None:
            self.admission.look(events)
        elif self.phase is WorkerPhase.COMPUTING:
            self._arrived += events
        elif self.phase is WorkerPhase.HELD:
            self.dispatcher.handle(events)
            self._continue()

    def stop(self, reason: str) -> None:
        """Stop after the current step.

        Stop at once, with its own weights, if it is paused or is rejoining.
        """
        self.stopping = reason
        is_rejoin = self.admission is not None and self.admission.is_rejoin
        if is_rejoin or (self.lacks_quorum and self.phase is WorkerPhase.HELD):
            self._discard_step()
            self.phase, self.admission = WorkerPhase.STOPPED, None

    @property
    def lacks_quorum(self) -> bool:
        """Whether it is paused because too few sites are connected."""
        return self._quorum_gate.is_closed

    def awaited(self) -> frozenset[Rank]:
        """Peers that it waits for."""
        return self.parts.machine.waiting_for()

    def _check_quorum(self) -> None:
        if self.is_training:
            self._quorum_gate.update()

    def _schedule(self) -> None:
        seconds = max(MIN_STEP_S, self._left_core_s / self.parts.units)
        self._due = self._context.clock.after(seconds, self._step_done)

    def _step_done(self) -> None:
        assert self._step is not None
        parts, result = self.parts, self._step.result()
        self._step = self._due = None
        if not result.finite:
            raise DivergedError(
                f"loss {result.loss} at iteration {self._iteration} of worker {self.rank}: the "
                "loss or its gradient is not finite. Lower spec.trainer.optimizer.learningRate, or "
                "check the data for bad samples"
            )
        now_s = self._context.clock.now_s
        self._result, self._busy_s = result, now_s - self._began_s
        self._computed_s = self._busy_s * self._computing_fraction
        self._norms.own(result.gradient_D, self._batch_size)
        self._before.take(self.progress)
        self.progress.advance(
            self._iteration,
            local_batch_size=self._batch_size,
            global_batch_size=(of_all := self.global_batch_size()),
        )
        self.progress.trained_s = now_s
        self._take_directive()
        rooms = {
            p: r for p, link in parts.links.items() if (r := link.sendable_bytes()) is not None
        }
        self.dispatcher.handle(
            [
                BudgetsChanged(equalize_similar(rooms), self._delay_steps()),
                LocalStepDone(
                    self._iteration, result.gradient_D, self._batch_size, result.loss, of_all
                ),
            ]
        )
        self.phase = WorkerPhase.HELD
        arrived, self._arrived = self._arrived, []
        self.dispatcher.handle(arrived)
        self._continue()

    @property
    def _computing_fraction(self) -> float:
        """Fraction of the current step's time and CPU spent on computing."""
        return self.parts.costs.computing_fraction(self._batch_size, self._charged_bytes)

    def _delay_steps(self) -> dict[Rank, float]:
        """One-way delay to each peer, in units of the last iteration's duration."""
        if not self._iteration_s:
            return {}
        return {p: link.latency_s / self._iteration_s for p, link in self.parts.links.items()}

    def _continue(self) -> None:
        """Begin the next step unless it must wait for peers."""
        if self.phase is not WorkerPhase.HELD:
            return
        if self._quorum_gate.is_behind and self.stopping is None:
            self._context.rejoin(self.rank)
            return
        if self.parts.machine.waiting_for():
            return
        if self._result is not None:
            self._end_step(self._result)
        if self.stopping is not None:
            self.phase = WorkerPhase.STOPPED
        else:
            self.begin_step()

    def _end_step(self, result: StepResult) -> None:
        self._result = None
        self._report(result)
        self._context.step_finished(self)
        reason = stop_reason(
            self.parts.job.spec.trainer.stop,
            self.progress,
            training_set_samples=self.parts.counted_training_samples(),
        )
        if reason is not None:
            self._context.on_stop(self.rank, reason)

    def _send(self, peer: Rank, message: Message) -> None:
        self._exchanged_bytes += message.size_bytes
        self.parts.links[peer].push(message)

    def _refuse(self, peer: Rank, reason: str, iteration: int) -> None:
        raise rejection_error(
            self.parts.job.spec.exchange.policy, self.rank, peer, reason, iteration
        )

    def _report(self, result: StepResult) -> None:
        parts, now_s = self.parts, self._context.clock.now_s
        wall_s = self._iteration_s = now_s - self._began_s
        cpu_s = self._step_core_s
        waited_s = wall_s - self._busy_s
        parts.reporter.step(
            StepRecord(
                time_s=now_s,
                rank=self.rank,
                incarnation=parts.reporter.incarnation,
                iteration=self.progress.iteration,
                loss=result.loss,
                local_batch_size=self._batch_size,
                global_batch_size=self.global_batch_size(),
                learning_rate=parts.replica.learning_rate,
                compute_s=self._computed_s,
                wall_s=wall_s,
                cpu_s=cpu_s,
                exchange_cpu_s=cpu_s * (1 - self._computing_fraction),
                waited_s=waited_s,
                samples=self.progress.own_samples,
                epochs=self.progress.epochs(parts.counted_training_samples()),
            )
        )
        self.report_links()
        self._report_to_sidecar(wall_s, cpu_s, waited_s)

    def report_links(self, *, now: bool = False) -> None:
        """Report sent bytes when due, or at the end of the run."""
        self.parts.reporter.links(
            lambda: {peer: link.state() for peer, link in self.parts.links.items()},
            self._directive,
            self.progress.iteration,
            now=now,
        )

    def _report_to_sidecar(self, wall_s: float, cpu_s: float, waited_s: float) -> None:
        director, now_s = self.parts.director, self._context.clock.now_s
        for link in self.parts.links.values():
            if has_traffic(delivery := link.take_delivery()):
                director.handle(delivery, now_s)
        costs = self.parts.costs
        compute_cpu_s = cpu_s * self._computing_fraction
        if costs.exchange_core_s_per_byte:  # the next step's charge is known now
            cpu_s = compute_cpu_s + costs.exchange_s(self._exchanged_bytes)
        director.handle(
            StepTiming(
                iteration=self.progress.iteration,
                samples=self._batch_size,
                compute_s=self._computed_s,
                wall_s=wall_s,
                cpu_s=cpu_s,
                compute_cpu_s=compute_cpu_s,
                waited_s=waited_s,
                exchanged_bytes=self._exchanged_bytes if costs.exchange_core_s_per_byte else None,
                norms=self._norms.take(),
            ),
            now_s,
        )
        self._context.probe_links(self.rank)
        self.follow_grouping()
        self.send_capacity()

    def send_capacity(self) -> None:
        """Send this worker's capacity to its peers if it has changed."""
        own = self.parts.director.own()
        if own != self._published_capacity and own.samples_per_s > 0:
            self._published_capacity = own
            self._context.publish_capacity(self.rank, own)

    def _take_directive(self) -> None:
        directive = self.parts.director.directive
        if directive is None or directive is self._directive:
            return
        self._directive = directive
        for peer, link in self.parts.links.items():
            link.set_budget(directive.budget_bytes.get(peer))
        self.parts.reporter.directive(directive, self.progress.iteration)

    def _next_batch_size(self) -> int:
        if self._directive is not None:
            return self._directive.local_batch_size
        return max(1, self.global_batch_size() // len(self.parts.job.workers()))

    def global_batch_size(self) -> int:
        """Samples of all workers in one iteration."""
        if self._directive is not None:
            return self._directive.global_batch_size
        return self.parts.job.spec.batching.global_batch_size.initial
