"""One worker in virtual time: the same policies, sidecar and replica, driven step by step.

Owns what `trainer.loop` owns for a real worker: the order of directive, gradient, policies and
what arrived. Called by `run`. A gradient is computed in a thread while virtual time stands still;
its inputs are fixed when the step begins, so threads change nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_api.errors import DivergedError
from dlion_api.measurements import CpuAllowance, StepTiming
from dlion_api.progress import StepRecord
from dlion_worker.exchange.window import levelled
from dlion_worker.policies.catalogue import has_barrier, refusal
from dlion_worker.policies.clusters import graph_of_groups
from dlion_worker.policies.interface import (
    BudgetsChanged,
    Event,
    LocalStepDone,
    MessageArrived,
    Regrouped,
)
from dlion_worker.simulation.surroundings import Phase
from dlion_worker.trainer.gradient_norms import NormMeter
from dlion_worker.trainer.hearing import Hearing
from dlion_worker.trainer.inbox import Inbox
from dlion_worker.trainer.reporting import worth_telling
from dlion_worker.trainer.stopping import JobProgress, stop_reason

if TYPE_CHECKING:
    from concurrent.futures import Future

    from dlion_api.measurements import Capacity, Directive, Grouping
    from dlion_api.names import Rank
    from dlion_worker.exchange import ExchangeEvent
    from dlion_worker.policies.interface import Message
    from dlion_worker.simulation.clock import Appointment
    from dlion_worker.simulation.entrance import VirtualEntrance
    from dlion_worker.simulation.surroundings import Surroundings, WorkerParts
    from dlion_worker.training.model import StepResult


LEAST_STEP_S = 1e-9
"""Of virtual time: a step that took none would never bring the run to its end."""


class VirtualWorker:
    """Trains until it is told to stop."""

    def __init__(self, parts: WorkerParts, around: Surroundings) -> None:
        self.parts = parts
        self.rank = parts.rank
        self.progress = JobProgress()
        self._norms = NormMeter(parts.job)
        self.hearing = Hearing(
            parts,
            self.progress,
            send=self._send,
            refuse=self._refuse,
            norms=self._norms,
            has_barrier=has_barrier(parts.job.spec),
            due=lambda after_s: around.clock.after(after_s, self._look),
        )
        self._standstill = self.hearing.standstill
        self.inbox = Inbox(self._send)
        self.entrance: VirtualEntrance | None = None
        """The way in of one that comes while others may train already."""
        self.phase = Phase.ENTERING
        self.stopping: str | None = None
        self._around = around
        self._directive: Directive | None = None
        self._told: Capacity | None = None
        self._grouping: Grouping | None = None
        self.neighbours = frozenset(parts.links)
        """With whom it exchanges now."""
        self._arrived: list[Event] = []
        self._step: Future[StepResult] | None = None
        self._due: Appointment | None = None
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
        """Before the last local step."""

    # ---- coming and going ----------------------------------------------------------------------

    @property
    def is_in(self) -> bool:
        """Whether it takes part in the training, or has until the end."""
        return self.phase not in {Phase.ENTERING, Phase.GONE}

    def take_part(self, iteration: int) -> None:
        """With those who are linked now, from the step after `iteration` on."""
        self.entrance = None
        self.phase = Phase.HELD
        self.hearing.handle(self.inbox.start(iteration))

    def begin_anew(self) -> None:
        """It comes in once more: of what it knew only the weights are left, and what lasts. A step
        whose update was not made is as if it had not been."""
        self.phase = Phase.ENTERING
        self._undo_step()
        self._arrived = []
        self.hearing.begin_anew(self.parts.machine.anew())
        self.inbox.begin_anew(self.progress.iteration)

    def _undo_step(self) -> None:
        if self._result is not None and has_barrier(self.parts.job.spec):
            self.progress.take(self._before)
        self._result = None

    def leave(self) -> None:
        """Its process is gone, and with it the step under way."""
        self.phase, self.entrance = Phase.GONE, None
        if self._due is not None:
            self._due.cancel()
        self._step = self._due = None

    def heard(self, capacity: Capacity, incarnation: int) -> None:
        """A peer's sidecar told its worker's capacity."""
        self.parts.director.heard(capacity, incarnation)
        self.follow_grouping()

    def follow_grouping(self) -> None:
        """Where its sidecar holds another grouping its links change, and its policy is told."""
        grouping = self.parts.director.grouping
        if grouping is None or grouping == self._grouping:
            return
        self._grouping = grouping
        graph = graph_of_groups(grouping)
        self.neighbours = graph[self.rank]
        self.inbox.put(Regrouped(graph))
        self._around.regrouped(self.rank, self.neighbours)

    # ---- steps ---------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begins the next local step; its gradient comes when its time has passed. What came before
        the first one may hold it."""
        if self.phase is not Phase.HELD or not self._standstill.may_step():
            return
        if self.parts.machine.waiting_for():
            return
        self.phase = Phase.COMPUTING
        parts = self.parts
        self._take_directive()
        self._iteration = parts.machine.next_iteration()
        x_B, y_B = parts.stream.next(self._next_batch_size())
        self._batch_size = len(y_B)
        self._step = self._around.executor.submit(parts.replica.model.step, x_B, y_B)
        self._began_s = self._since_s = self._around.clock.now_s
        slowdown = parts.pace.next_slowdown(self._began_s)
        # What has come and gone since the last one began is paid for now: no step knows its own.
        self._charged_bytes, self._exchanged_bytes = self._exchanged_bytes, 0
        costs = parts.costs
        self._step_core_s = slowdown * costs.step_core_s(self._batch_size, self._charged_bytes)
        self._left_core_s = self._step_core_s
        self._schedule()

    def change_units(self, units: float) -> None:
        """Another share of the machine from now on, the step under way included."""
        if self.phase is Phase.COMPUTING and self._due is not None:
            now_s = self._around.clock.now_s
            self._left_core_s -= (now_s - self._since_s) * self.parts.units
            self._since_s = now_s
            self._due.cancel()
            self.parts.units = units
            self._schedule()
        else:
            self.parts.units = units
        self.parts.director.handle(CpuAllowance(units, 0.0, 0.0), self._around.clock.now_s)
        self.tell()

    def arrive(self, arrival: ExchangeEvent) -> None:
        """Takes what its links bring: at once while held, else when the step under way is done."""
        if self.phase in {Phase.STOPPED, Phase.GONE}:
            return
        if isinstance(arrival, MessageArrived):
            self._exchanged_bytes += arrival.message.size_bytes
        self.inbox.put(arrival)
        events = self.inbox.drain()
        if self.entrance is not None:
            self.entrance.look(events)
        elif self.phase is Phase.COMPUTING:
            self._arrived += events
        elif self.phase is Phase.HELD:
            self.hearing.handle(events)
            self._go_on()

    def stop(self, reason: str) -> None:
        """The run is over: it ends with its present step; where it holds still, or is on its way
        back, at once and with its own weights."""
        self.stopping = reason
        comes_back = self.entrance is not None and self.entrance.comes_back
        if comes_back or (self.holds_still and self.phase is Phase.HELD):
            self._undo_step()
            self.phase, self.entrance = Phase.STOPPED, None

    @property
    def holds_still(self) -> bool:
        """Whether too few sites are joined with it."""
        return self._standstill.holds

    def awaited(self) -> frozenset[Rank]:
        """Peers that hold this worker."""
        return self.parts.machine.waiting_for()

    def _look(self) -> None:
        if self.is_in:
            self._standstill.look()

    def _schedule(self) -> None:
        seconds = max(LEAST_STEP_S, self._left_core_s / self.parts.units)
        self._due = self._around.clock.after(seconds, self._step_done)

    def _step_done(self) -> None:
        assert self._step is not None
        parts, result = self.parts, self._step.result()
        self._step = self._due = None
        if not result.finite:
            raise DivergedError(
                f"loss {result.loss} at iteration {self._iteration} of worker {self.rank}: it or "
                "its gradient is not finite. Lower spec.trainer.optimizer.learningRate, or look "
                "for bad samples in the data"
            )
        now_s = self._around.clock.now_s
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
        rooms = {p: r for p, link in parts.links.items() if (r := link.room_bytes()) is not None}
        self.hearing.handle(
            [
                BudgetsChanged(levelled(rooms), self._delay_steps()),
                LocalStepDone(
                    self._iteration, result.gradient_D, self._batch_size, result.loss, of_all
                ),
            ]
        )
        self.phase = Phase.HELD
        arrived, self._arrived = self._arrived, []
        self.hearing.handle(arrived)
        self._go_on()

    @property
    def _computing_fraction(self) -> float:
        """Of the present step's time and CPU, what is computing."""
        return self.parts.costs.computing_fraction(self._batch_size, self._charged_bytes)

    def _delay_steps(self) -> dict[Rank, float]:
        """How far peers are, in iterations as long as the last one."""
        if not self._iteration_s:
            return {}
        return {p: link.latency_s / self._iteration_s for p, link in self.parts.links.items()}

    def _go_on(self) -> None:
        """Begins the next step unless peers must be heard before."""
        if self.phase is not Phase.HELD:
            return
        if self._standstill.is_behind and self.stopping is None:
            self._around.behind(self.rank)
            return
        if self.parts.machine.waiting_for():
            return
        if self._result is not None:
            self._end_step(self._result)
        if self.stopping is not None:
            self.phase = Phase.STOPPED
        else:
            self.begin_step()

    def _end_step(self, result: StepResult) -> None:
        self._result = None
        self._report(result)
        self._around.stepped(self)
        reason = stop_reason(
            self.parts.job.spec.trainer.stop,
            self.progress,
            training_set_samples=self.parts.whole_set(),
        )
        if reason is not None:
            self._around.stopped(self.rank, reason)

    # ---- carrying out --------------------------------------------------------------------------

    def _send(self, peer: Rank, message: Message) -> None:
        self._exchanged_bytes += message.size_bytes
        self.parts.links[peer].push(message)

    def _refuse(self, peer: Rank, reason: str, iteration: int) -> None:
        raise refusal(self.parts.job.spec.exchange.policy, self.rank, peer, reason, iteration)

    def _report(self, result: StepResult) -> None:
        parts, now_s = self.parts, self._around.clock.now_s
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
                epochs=self.progress.epochs(parts.whole_set()),
            )
        )
        self.report_links()
        self._tell_sidecar(wall_s, cpu_s, waited_s)

    def report_links(self, *, now: bool = False) -> None:
        """What has been sent, where it is due or at the end of the run."""
        self.parts.reporter.links(
            lambda: {peer: link.state() for peer, link in self.parts.links.items()},
            self._directive,
            self.progress.iteration,
            now=now,
        )

    # ---- the sidecar ---------------------------------------------------------------------------

    def _tell_sidecar(self, wall_s: float, cpu_s: float, waited_s: float) -> None:
        director, now_s = self.parts.director, self._around.clock.now_s
        for link in self.parts.links.values():
            if worth_telling(delivery := link.take_delivery()):
                director.handle(delivery, now_s)
        costs = self.parts.costs
        compute_cpu_s = cpu_s * self._computing_fraction
        if costs.exchange_core_s_per_byte:  # what is paid in the next step is known now
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
        self._around.measured(self.rank)
        self.follow_grouping()
        self.tell()

    def tell(self) -> None:
        """This worker's capacity to its peers, where it is another than the last one told."""
        own = self.parts.director.own()
        if own != self._told and own.samples_per_s > 0:
            self._told = own
            self._around.told(self.rank, own)

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
