"""One worker's cycle of steps: when one begins, what the policy learns of it, when it is complete.

A state machine without I/O, driven by the trainer's loop and by the simulated worker:

    IDLE       may begin a step, unless the quorum, a peer or the end of the run prevents it
    COMPUTING  the gradient is being computed
    OPEN       the policy has the gradient; the step ends when it waits for no peer

`next` returns what to do; `step_computed` and `handle` bring it news.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from dlion_api.errors import DivergedError
from dlion_api.names import Rank
from dlion_api.protocol.measurements import Directive, PhaseSeconds, StepTiming
from dlion_api.protocol.progress import StepRecord
from dlion_core.lifecycle.event_dispatcher import EventDispatcher
from dlion_core.policies.interface import (
    BudgetsChanged,
    Event,
    Flat,
    LocalFeatures,
    LocalStepDone,
)
from dlion_core.policies.iteration_guard import IterationGuard
from dlion_core.resource_control.batching import shares
from dlion_core.topology.topology import STAGED

MAX_AWAITED = 8
"""Maximum peers that a record names: usually one arrives last."""


class StepPhase(Enum):
    """Where a worker is in its cycle."""

    IDLE = auto()
    COMPUTING = auto()
    OPEN = auto()


TRANSITIONS = {
    StepPhase.IDLE: frozenset({StepPhase.COMPUTING}),
    StepPhase.COMPUTING: frozenset({StepPhase.OPEN, StepPhase.IDLE}),
    StepPhase.OPEN: frozenset({StepPhase.IDLE}),
}
"""Phase -> the phases that may follow. A step that is abandoned leads to IDLE."""


@dataclass(frozen=True)
class ComputeStep:
    """Compute the gradient of `batch_size` samples, and report it with `step_computed`."""

    iteration: int
    batch_size: int


@dataclass(frozen=True)
class EndStep:
    """The update of the step was made: report it."""


@dataclass(frozen=True)
class WaitForEvents:
    """Nothing to do until something arrives."""


@dataclass(frozen=True)
class Rejoin:
    """Others trained while this worker was paused: it must join again."""


@dataclass(frozen=True)
class EndRun:
    """The run is over for this worker."""

    reason: str


StepAction = ComputeStep | EndStep | WaitForEvents | Rejoin | EndRun


@dataclass(frozen=True)
class StepDuration:
    """How long one step took, in seconds of wall and CPU time."""

    compute_s: float
    wall_s: float
    waited_s: float
    cpu_s: float
    exchange_cpu_s: float
    phases: PhaseSeconds


class StepLinks(Protocol):
    """A worker's links, and its sidecar's advice for them."""

    def latest_directive(self) -> Directive | None: ...
    def set_budgets(self, directive: Directive) -> None: ...
    def sendable_bytes(self) -> Mapping[Rank, int]: ...
    def one_way_delays_s(self) -> Mapping[Rank, float]: ...
    def set_iteration(self, iteration: int) -> None: ...


class StepUndo(Protocol):
    """Restores the state before a step whose update was not made."""

    def begin_step(self) -> None: ...
    def end_step(self) -> None: ...
    def undo_step(self) -> None: ...


class ComputedStep(Protocol):
    """Loss and gradient of a local batch (`training.model`), or its features."""

    @property
    def loss(self) -> float: ...
    @property
    def gradient_D(self) -> Flat: ...  # noqa: N802 - the shape's suffix
    @property
    def finite(self) -> bool: ...
    @property
    def features(self) -> LocalFeatures | None: ...


class StepCycle:
    """The steps of one worker; owns its `directive`."""

    def __init__(self, dispatcher: EventDispatcher, links: StepLinks, undo: StepUndo) -> None:
        self.dispatcher, self._links, self._undo = dispatcher, links, undo
        self._parts, self.progress = dispatcher.parts, dispatcher.progress
        self._norms = dispatcher.instructions.norms
        self.phase = StepPhase.IDLE
        self.directive: Directive | None = None
        self._iteration = 0
        self._loss, self.local_batch_size = 0.0, 0
        self._iteration_s = self._iteration_before_s = 0.0
        self._awaited: frozenset[Rank] = frozenset()
        """The peers that this step has waited for last."""

    @property
    def lacks_quorum(self) -> bool:
        """Whether this worker is paused because too few sites are connected."""
        return self.dispatcher.quorum_gate.is_closed

    @property
    def next_step_s(self) -> float:
        """How long a step that begins now will take: the shorter of the last two, since one may be
        longer for a peer that restarts. 0 if that is unknown, within a step, and where updates do
        not wait for peers."""
        if self.phase is not StepPhase.IDLE or not self.dispatcher.has_barrier:
            return 0.0
        return min(self._iteration_s, self._iteration_before_s)

    def reset(self, machine: IterationGuard) -> None:
        """Prepare to join again, with a machine that has received no events yet."""
        self._abandon()
        self.dispatcher.reset(machine)

    def handle(self, events: Iterable[Event]) -> None:
        """Pass events to the quorum gate, latecomers' negotiation and the policy."""
        self.dispatcher.handle(events)

    # ---- what to do next -------------------------------------------------------------------------

    def next(
        self, over: Callable[[], str | None], *, gives_up: Callable[[], bool] = lambda: False
    ) -> StepAction:
        """Return what to do now. Call it again after every action and every event.

        `over` returns why the run is over, or None. `gives_up`: whether to abandon a step because
        the awaited peers will not answer any more. A step is otherwise finished although the run
        is over.
        """
        assert self.phase is not StepPhase.COMPUTING
        if self.phase is StepPhase.OPEN:
            if self.dispatcher.departures.is_pending and over() is not None:
                self.dispatcher.departures.release()
            if not (awaited := self._parts.machine.waiting_for()):
                self._enter(StepPhase.IDLE)
                self._undo.end_step()
                return EndStep()
            self._awaited = awaited
            if not (gives_up() or self._is_cut_off(over)):
                return WaitForEvents()
            self._abandon()
        if (reason := over()) is not None:
            return EndRun(reason)
        gate = self.dispatcher.quorum_gate
        if not gate.may_step():
            return Rejoin() if gate.is_behind else WaitForEvents()
        if awaited := self._parts.machine.waiting_for():
            self._awaited = awaited  # messages from before the first step may require it, too
            return WaitForEvents()
        return self._begin_step()

    def _is_cut_off(self, over: Callable[[], str | None]) -> bool:
        """Whether the quorum is lost and this worker cannot finish its step: the awaited peers may
        lack it, too. A worker that does not train has no update to finish."""
        if not self._parts.job.spec.exchange.trains(self._parts.rank):
            return over() is not None
        gate = self.dispatcher.quorum_gate
        return gate.is_closed and (gate.is_behind or over() is not None)

    def _enter(self, phase: StepPhase) -> None:
        assert phase in TRANSITIONS[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase

    def _abandon(self) -> None:
        """Discard a step whose update was not made."""
        if self.phase is not StepPhase.IDLE:
            self._enter(StepPhase.IDLE)
            if self.dispatcher.has_barrier:
                self._undo.undo_step()

    def _begin_step(self) -> ComputeStep:
        self.take_directive()
        self._enter(StepPhase.COMPUTING)
        if self.dispatcher.has_barrier:
            self._undo.begin_step()
        self._iteration = self._parts.machine.next_iteration()
        return ComputeStep(self._iteration, self._next_batch_size())

    # ---- a step's gradient -----------------------------------------------------------------------

    def step_computed(self, result: ComputedStep, *, samples: int, trained_s: float) -> None:
        """Pass the gradient of `samples` samples to the policy. `trained_s`: seconds of training so
        far. Raises: DivergedError where the loss or the gradient is not finite."""
        if not result.finite:
            unusual = self.dispatcher.instructions.unusual
            raise DivergedError(
                f"loss {result.loss} at iteration {self._iteration} of worker {self._parts.rank}: "
                "the loss or its gradient is not finite. Lower "
                "spec.trainer.optimizer.learningRate, or check the data for bad samples"
                + (f". Before that, {unusual}" if unusual else "")
            )
        self._loss, self.local_batch_size = float(result.loss), samples
        self._norms.own(result.gradient_D, samples)
        global_batch_size = self.global_batch_size()
        self.progress.advance(
            self._iteration, local_batch_size=samples, global_batch_size=global_batch_size
        )
        self.progress.trained_s = trained_s
        self._links.set_iteration(self._iteration)
        self.take_directive()  # the current rates determine this gradient's size
        self._enter(StepPhase.OPEN)
        self.handle(
            [
                BudgetsChanged(
                    self._links.sendable_bytes(), self._delay_steps(), self._link_rates()
                ),
                LocalStepDone(
                    iteration=self._iteration,
                    gradient_D=result.gradient_D,
                    local_batch_size=samples,
                    loss=result.loss,
                    global_batch_size=global_batch_size,
                    features=result.features,
                ),
            ]
        )

    def _delay_steps(self) -> dict[Rank, float]:
        """One-way delays to peers, in units of the last iteration's duration."""
        if not self._iteration_s:
            return {}
        delays_s = self._links.one_way_delays_s()
        return {peer: delay_s / self._iteration_s for peer, delay_s in delays_s.items()}

    def _link_rates(self) -> Mapping[Rank, float]:
        return {} if self.directive is None else self.directive.bandwidth_bytes_per_s

    # ---- directives and reports ------------------------------------------------------------------

    def take_directive(self) -> None:
        """Follow the sidecar's newest directive."""
        directive = self._links.latest_directive()
        if directive is None or directive is self.directive:
            return
        if self.directive is None or directive.version != self.directive.version:
            self.directive = directive
            self._links.set_budgets(directive)
            self._parts.reporter.directive(directive, self.progress.iteration)

    def _next_batch_size(self) -> int:
        if self._parts.job.spec.exchange.topology == STAGED:
            return self.global_batch_size()  # one worker trains
        if self.directive is not None:
            return self.directive.local_batch_size
        return self._equal_share()

    def _equal_share(self) -> int:
        """As in the sidecar's first directive, which may come after the first step has begun."""
        own, workers = self._parts.rank, self._parts.job.workers()
        ranks = {own, *(worker.rank for worker in workers)}
        return shares(self.global_batch_size(), dict.fromkeys(ranks, 1.0))[own]

    def global_batch_size(self) -> int:
        """Samples of all workers per iteration: the sidecar's value, at first that of the
        checkpoint or the initial one."""
        if self.directive is not None:
            return self.directive.global_batch_size
        growth = self._parts.job.spec.batching.global_batch_size
        return growth.within(self.progress.global_batch_size)

    def report_step(
        self,
        took: StepDuration,
        *,
        training_set_samples: int,
        weights_hash: str,
        passes: int | None = None,
        earlier_passes: int | None = None,
        trained_s: float | None = None,
    ) -> None:
        """`passes`, `earlier_passes`, `trained_s`: as in the record."""
        parts, progress = self._parts, self.progress
        self._iteration_before_s, self._iteration_s = self._iteration_s, took.wall_s
        parts.reporter.step(
            StepRecord(
                time_s=parts.reporter.now_s(),
                rank=parts.rank,
                incarnation=parts.reporter.incarnation,
                iteration=progress.iteration,
                loss=self._loss,
                local_batch_size=self.local_batch_size,
                global_batch_size=self.global_batch_size(),
                learning_rate=parts.replica.learning_rate,
                compute_s=took.compute_s,
                wall_s=took.wall_s,
                cpu_s=took.cpu_s,
                exchange_cpu_s=took.exchange_cpu_s,
                waited_s=took.waited_s,
                samples=progress.own_samples,
                weights_hash=weights_hash,
                epochs=progress.epochs(training_set_samples),
                waited_for=tuple(sorted(self._awaited)[:MAX_AWAITED]),
                passes=passes,
                earlier_passes=earlier_passes,
                trained_s=trained_s,
                # Microseconds are enough, and half as many digits.
                **{name: round(seconds, 6) for name, seconds in vars(took.phases).items()},
            )
        )
        self._awaited = frozenset()

    def timing(
        self,
        took: StepDuration,
        *,
        compute_cpu_s: float,
        exchanged_bytes: int | None,
        quota_changed: bool = False,
    ) -> StepTiming:
        """The timing of the step that has just ended, for the sidecar."""
        return StepTiming(
            iteration=self.progress.iteration,
            samples=self.local_batch_size,
            compute_s=took.compute_s,
            wall_s=took.wall_s,
            cpu_s=took.cpu_s,
            compute_cpu_s=compute_cpu_s,
            waited_s=took.waited_s,
            exchanged_bytes=exchanged_bytes,
            quota_changed=quota_changed,
            norms=self._norms.take(),
            phases=took.phases,
        )
