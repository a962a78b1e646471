"""One worker in virtual time, with the real policies, sidecar and replica.

Drives `lifecycle.step_cycle` as `trainer.loop` does for a real worker. A gradient is computed in a
thread while virtual time stands still. Its inputs are fixed when the step begins, so threading does
not affect the result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dlion_api.protocol.measurements import CpuAllowance
from dlion_api.reasons import EventReason
from dlion_core.heat.duty_cycle import rest_s
from dlion_core.heat.heat_controller import SAMPLE_S
from dlion_core.lifecycle.event_dispatcher import EventDispatcher
from dlion_core.lifecycle.inbox import EventInbox
from dlion_core.lifecycle.instruction_executor import InstructionExecutor
from dlion_core.lifecycle.reporting import has_traffic
from dlion_core.lifecycle.step_cycle import (
    ComputeStep,
    EndRun,
    EndStep,
    Rejoin,
    StepCycle,
    StepDuration,
    WaitForEvents,
)
from dlion_core.lifecycle.stopping import JobProgress, own_stop, stop_reason
from dlion_core.policies.catalogue import rejection_error
from dlion_core.policies.interface import Event, MessageArrived, TopologyChanged
from dlion_core.topology.clusters import graph_of_groups
from dlion_simulator.context import ProgressUndo, SimulatedLinks, WorkerPhase
from dlion_simulator.costs import exchange_phases
from dlion_worker.training.evaluation import weights_hash

if TYPE_CHECKING:
    from concurrent.futures import Future

    from dlion_api.names import Rank
    from dlion_api.protocol.measurements import Capacity, Grouping
    from dlion_core.links.events import ExchangeEvent
    from dlion_core.policies.interface import Message, RejectMessage
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
        self.inbox = EventInbox(self._send, clock_s=lambda: context.clock.now_s)

        def due(after_s: float) -> ScheduledEvent:
            return context.clock.after(after_s, self._check_time)

        instructions = InstructionExecutor(
            parts, self.progress, send=self._send, refuse=self._refuse, due=due
        )
        dispatcher = EventDispatcher(instructions, self.inbox, due=due)
        self.cycle = StepCycle(dispatcher, SimulatedLinks(parts), ProgressUndo(self.progress))
        self.admission: VirtualAdmission | None = None
        """Set while the worker joins a run that may already be training."""
        self.phase = WorkerPhase.ENTERING
        self.stopping: str | None = None
        self._context = context
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
        self._resting_batch_size: int | None = None
        """Batch size of the step that begins after the rest that the heat budget requires."""

    @property
    def is_training(self) -> bool:
        """Whether it takes part in training, or did until the end."""
        # Asked of every worker at every step: a set of members would cost ten times as much.
        return self.phase is not WorkerPhase.ENTERING and self.phase is not WorkerPhase.GONE

    @property
    def blocked_reason(self) -> str:
        """What it waits for, as the end of a sentence."""
        match self.phase:
            case WorkerPhase.GONE:
                return "is gone"
            case WorkerPhase.ENTERING:
                return "waits for other workers"
        if self.cycle.lacks_quorum:
            return "is paused: too few sites (minSites) are connected to it"
        return f"waits for {', '.join(map(str, sorted(self.parts.machine.waiting_for())))}"

    def start_at(self, iteration: int) -> None:
        """Start training with the linked peers, from the step after `iteration` on."""
        self.admission = None
        self.phase = WorkerPhase.HELD
        self.cycle.handle(self.inbox.start(iteration))

    def reset(self) -> None:
        """Prepare to join again, keeping the weights and persistent state.

        A step whose update was not applied is discarded.
        """
        self.phase = WorkerPhase.ENTERING
        self._arrived = []
        self.cycle.reset(self.parts.machine.restarted())
        self.inbox.reset(self.progress.iteration)

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

    def check_links(self) -> None:
        """Probe links that are due, follow the grouping, and send the capacity if it changed."""
        self._context.probe_links(self.rank)
        self.follow_grouping()
        self.send_capacity()

    def set_compute_units(self, units: float) -> None:
        """Change the share of the machine, also for the current step."""
        is_resting = self._resting_batch_size is not None
        if self.phase is WorkerPhase.COMPUTING and self._due is not None and not is_resting:
            self._count_work()
            self._due.cancel()
            self.parts.units = units
            self._schedule()
        else:
            self.parts.units = units
        allowance = CpuAllowance(self.parts.quota_cores, 0.0, 0.0)
        self.parts.director.handle(allowance, self._context.clock.now_s)
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
            self.admission.advance(events)
        elif self.phase is WorkerPhase.COMPUTING:
            self._arrived += events
        elif self.phase is WorkerPhase.HELD:
            self.cycle.handle(events)
            self.advance()

    def stop(self, reason: str) -> None:
        """Stop after the current step.

        Stop at once, with its own weights, if it is paused, is rejoining or does not train.
        """
        self.stopping = reason
        if self.admission is not None and self.admission.is_rejoin:
            self.phase, self.admission = WorkerPhase.STOPPED, None
        elif self.cycle.lacks_quorum or not self.parts.job.spec.exchange.trains(self.rank):
            self.advance()
        elif self._resting_batch_size is not None and self._due is not None:
            self._due.cancel()
            self._begin_step(self._resting_batch_size)

    def _check_time(self) -> None:
        """Do what is due by the clock: the quorum's report, and the policy's reminder."""
        if self.is_training:
            self.cycle.handle(())
            self.advance()

    def advance(self) -> None:
        """Do what can be done now, unless it computes, joins or has ended."""
        while self.phase is WorkerPhase.HELD:
            match self.cycle.next(lambda: self.stopping):
                case ComputeStep(batch_size=batch_size):
                    self._compute(batch_size)
                case EndStep():
                    self._end_step()
                case Rejoin():
                    self._context.rejoin(self.rank)
                case EndRun():
                    self.phase = WorkerPhase.STOPPED
                case WaitForEvents():
                    return

    def _compute(self, batch_size: int) -> None:
        self.phase = WorkerPhase.COMPUTING
        self._follow_machine(is_busy=False)
        heat, now_s = self.parts.heat, self._context.clock.now_s
        rest = 0.0
        if heat is not None and self.stopping is None:
            rest = rest_s(heat.share, busy_s=self._busy_s, wall_s=now_s - self._began_s)
        if rest < MIN_STEP_S:
            self._begin_step(batch_size)
            return
        self._resting_batch_size = batch_size
        # The share may change meanwhile.
        self._due = self._context.clock.after(
            min(rest, SAMPLE_S), lambda: self._compute(batch_size)
        )

    def _begin_step(self, batch_size: int) -> None:
        self._resting_batch_size = None
        parts = self.parts
        x_B, y_B = parts.stream.next(batch_size)
        self._batch_size = len(y_B)
        self._step = self._context.executor.submit(parts.replica.step, x_B, y_B)
        self._began_s = self._since_s = self._context.clock.now_s
        slowdown = parts.straggler_model.next_slowdown(self._began_s)
        # Charge the bytes exchanged since the last step began: this step's are not known yet.
        self._charged_bytes, self._exchanged_bytes = self._exchanged_bytes, 0
        costs = parts.costs
        self._step_core_s = slowdown * costs.step_core_s(self._batch_size, self._charged_bytes)
        self._left_core_s = self._step_core_s
        self._schedule()

    def _schedule(self) -> None:
        parts, clock = self.parts, self._context.clock
        seconds = max(MIN_STEP_S, self._left_core_s / parts.speed(clock.now_s))
        slice_s = parts.next_change_s(clock.now_s) - clock.now_s
        if slice_s < seconds:
            self._due = clock.after(max(MIN_STEP_S, slice_s), self._go_on)
        else:
            self._due = clock.after(seconds, self._step_done)

    def _go_on(self) -> None:
        """Continue the step after its speed may have changed."""
        self._count_work()
        self._schedule()

    def _count_work(self) -> None:
        """Subtract what was computed since the last call from the step."""
        now_s = self._context.clock.now_s
        self._left_core_s -= (now_s - self._since_s) * self.parts.speed(self._since_s)
        self._since_s = now_s
        self._follow_machine(is_busy=True)

    def _follow_machine(self, *, is_busy: bool) -> None:
        """Follow the machine's temperature and its other work until now, and the heat budget."""
        heat, now_s = self.parts.heat, self._context.clock.now_s
        if (demand := self.parts.demand) is not None:
            demand.machine.advance(now_s, self.parts.units, is_busy=is_busy)
        if heat is None:
            return
        before = (heat.share, heat.mean_share)
        heat.advance(now_s, is_busy=is_busy)
        if (heat.share, heat.mean_share) != before:
            self.parts.director.set_compute_share(heat.share, heat.mean_share, now_s)
            self.send_capacity()

    def _step_done(self) -> None:
        assert self._step is not None
        self._follow_machine(is_busy=True)
        result, now_s = self._step.result(), self._context.clock.now_s
        self._step = self._due = None
        self._busy_s = now_s - self._began_s
        self._computed_s = self._busy_s * self._computing_fraction
        self.cycle.step_computed(result, samples=self._batch_size, trained_s=now_s)
        self.phase = WorkerPhase.HELD
        arrived, self._arrived = self._arrived, []
        self.cycle.handle(arrived)
        self.advance()

    @property
    def _computing_fraction(self) -> float:
        """Fraction of the current step's time and CPU spent on computing."""
        return self.parts.costs.computing_fraction(self._batch_size, self._charged_bytes)

    def _end_step(self) -> None:
        self._report()
        self._context.step_finished(self)
        self.progress.trained_s = self._context.clock.now_s
        reason = stop_reason(
            own_stop(self.parts.job.spec, self.rank),
            self.progress,
            training_set_samples=self.parts.counted_training_samples(),
            next_step_s=self.cycle.next_step_s,
        )
        if reason is not None:
            self._context.on_stop(self.rank, reason)

    def _send(self, peer: Rank, message: Message, epoch: int | None = None) -> None:
        self._exchanged_bytes += message.size_bytes
        self.parts.links[peer].push(message, epoch)

    def _refuse(self, rejected: RejectMessage, iteration: int) -> None:
        if not rejected.is_violation:
            self.parts.reporter.event(
                EventReason.MESSAGE_REFUSED,
                f"worker {rejected.peer}: {rejected.reason}",
                iteration=iteration,
                warning=True,
            )
            return
        policy = self.parts.job.spec.exchange.policy
        raise rejection_error(policy, self.rank, rejected.peer, rejected.reason, iteration)

    def _report(self) -> None:
        parts, cpu_s = self.parts, self._step_core_s
        # A slower clock takes more CPU seconds for the same work, and other work does not.
        if parts.heat is not None and parts.demand is None:
            cpu_s = self._busy_s * parts.units
        wall_s = self._context.clock.now_s - self._began_s
        took = StepDuration(
            compute_s=self._computed_s,
            wall_s=wall_s,
            waited_s=wall_s - self._busy_s,
            cpu_s=cpu_s,
            exchange_cpu_s=cpu_s * (1 - self._computing_fraction),
            phases=exchange_phases(self._busy_s - self._computed_s),
        )
        has_hash = parts.job.spec.trainer.hash_weights
        self.cycle.report_step(
            took,
            training_set_samples=parts.counted_training_samples(),
            weights_hash=weights_hash(parts.replica.model.weights_D) if has_hash else "",
            passes=parts.stream.passes,
        )
        self.report_links()
        self._report_to_sidecar(took)

    def report_machine(self, now_s: float) -> None:
        """Report what became of the machine's temperature and other work, at the run's end."""
        if (heat := self.parts.heat) is not None:
            heat.advance(now_s, is_busy=False)
            self.parts.reporter.event(EventReason.MACHINE_TEMPERATURE, heat.summary())
        if (demand := self.parts.demand) is not None:
            self.parts.reporter.event(EventReason.OTHER_WORK, demand.summary())

    def report_links(self, *, now: bool = False) -> None:
        """Report sent bytes when due, or at the end of the run."""
        self.parts.reporter.links(
            lambda: {peer: link.state() for peer, link in self.parts.links.items()},
            self.cycle.directive,
            self.progress.iteration,
            now=now,
        )

    def _report_to_sidecar(self, took: StepDuration) -> None:
        director, now_s = self.parts.director, self._context.clock.now_s
        for link in self.parts.links.values():
            if has_traffic(delivery := link.take_delivery()):
                director.handle(delivery, now_s)
        costs, exchanged_bytes = self.parts.costs, None
        compute_cpu_s = took.cpu_s * self._computing_fraction
        if costs.exchange_core_s_per_byte:  # the next step's charge is known now
            exchanged_bytes = self._exchanged_bytes
            took = replace(took, cpu_s=compute_cpu_s + costs.exchange_s(exchanged_bytes))
        timing = self.cycle.timing(
            took, compute_cpu_s=compute_cpu_s, exchanged_bytes=exchanged_bytes
        )
        director.handle(timing, now_s)
        if (demand := self.parts.demand) is not None:
            demand.end_step(timing, director, now_s, self.parts.units)
        self.check_links()

    def send_capacity(self) -> None:
        """Send this worker's capacity to its peers if it has changed."""
        own = self.parts.director.own()
        if own != self._published_capacity and own.samples_per_s > 0:
            self._published_capacity = own
            self._context.publish_capacity(self.rank, own)
