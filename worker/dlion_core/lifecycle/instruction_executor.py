"""Applies the policies' instructions to a replica and sends them to peers.

For trainer and simulator: `loop` and `worker` provide sending and refusing. Meters the norms of an
iteration's own and mean gradient. Uses no clock and no link.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import DivergedError
from dlion_api.names import Rank
from dlion_api.protocol.measurements import GradientNorms
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_core.codecs import NotFiniteError
from dlion_core.lifecycle.reporting import Reporter
from dlion_core.lifecycle.stopping import JobProgress
from dlion_core.phase_clock import Phase, in_phase
from dlion_core.policies.interface import (
    AddSamples,
    AddUpdate,
    ApplyGradient,
    AverageWeights,
    Event,
    Flat,
    Instruction,
    MergeReplicas,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
    RemindAfter,
    ReminderDue,
    ReplaceWeights,
    ReportEvent,
    SendMessage,
    SendWeights,
    UpdateApplied,
    WithholdUpdate,
)
from dlion_core.policies.iteration_guard import IterationGuard
from dlion_core.policies.partitions.version_vector import merge_text

MAX_SQUARED_NORM = 1e18
"""Larger norms are not reported: the record's limit, and no useful gradient."""


_WARNINGS = frozenset({EventReason.UNUSUAL_VALUES, EventReason.FEATURES_AWAITED})
"""The warnings among the events that policies report."""


class Replica(Protocol):
    """One worker's weights and optimizer (`training.replica`)."""

    def apply_gradient(
        self,
        gradient_D: Flat,
        *,
        batch_samples: int,
        iteration: int,
        samples: int,
        on_updated: Callable[[], None],
    ) -> None: ...
    def add(self, update_D: Flat) -> None: ...
    def replace(self, weights_D: Flat) -> None: ...
    def blend(self, weights_D: Flat, fraction: float, since_D: Flat | None) -> None: ...
    def withhold(self, update_D: Flat) -> None: ...
    def encoded_weights(self, weights_D: Flat | None) -> bytes: ...

    learning_rate: float
    """Learning rate of the last update."""


class SampleStream(Protocol):
    """A worker's training samples (`training.datasets.stream`)."""

    def extend(self, parts: Mapping[str, tuple[NDArray[Any], NDArray[Any]]]) -> None: ...


class WorkerComponents(Protocol):
    """The parts of a worker that its lifecycle needs."""

    job: Job
    rank: Rank
    machine: IterationGuard
    reporter: Reporter

    @property
    def replica(self) -> Replica: ...
    @property
    def stream(self) -> SampleStream: ...


def squared_norm(gradient_D: Flat) -> float:
    """|g|^2, summed in float64, part by part."""
    parts = np.array_split(gradient_D, max(1, gradient_D.size // 2**16))
    return math.fsum(float(np.dot(wide, wide)) for wide in (p.astype(np.float64) for p in parts))


class NormMeter:
    """The norms of one iteration, for the batching policy `goodput`; else it computes nothing."""

    def __init__(self, job: Job) -> None:
        self._is_enabled = job.spec.batching.policy == "goodput"
        self._own: tuple[float, int] | None = None
        self._mean: tuple[float, int] | None = None

    def own(self, gradient_D: Flat, samples: int) -> None:
        """Record the local gradient before a policy gets it; starts a new iteration."""
        if self._is_enabled:
            self._own, self._mean = (squared_norm(gradient_D), samples), None

    def mean(self, gradient_D: Flat, samples: int) -> None:
        """Record the optimizer's gradient, over the samples of all workers."""
        if self._is_enabled:
            self._mean = (squared_norm(gradient_D), samples)

    def take(self) -> GradientNorms | None:
        """Return this iteration's norms; None without an update, or if not enabled."""
        own, mean = self._own, self._mean
        self._own = self._mean = None
        if own is None or mean is None or max(own[0], mean[0]) > MAX_SQUARED_NORM:
            return None
        return GradientNorms(*own, *mean)


class InstructionExecutor:
    """Executes one worker's instructions in order."""

    def __init__(
        self,
        parts: WorkerComponents,
        progress: JobProgress,
        *,
        send: Callable[[Rank, Message], None],
        refuse: Callable[[RejectMessage, int], None],
        cpu_s: Callable[[], float] = lambda: 0.0,
        due: Callable[[float], object] = lambda _after_s: None,
    ) -> None:
        """`refuse(rejection, iteration)`: a peer's message was invalid. `cpu_s`: CPU seconds of the
        calling thread. `due(after_s)` schedules a call of `remind`, where nothing else calls it."""
        self.parts, self.progress, self.send = parts, progress, send
        self._replica, self._reporter = parts.replica, parts.reporter
        self._refuse, self._cpu_s, self._due = refuse, cpu_s, due
        self.norms = NormMeter(parts.job)
        self.unusual = ""
        """What a peer last sent that may explain a divergence."""
        self.reminder_s = math.inf
        """When the policy wants to be reminded, in seconds since the run began."""
        self._remind_after_s = 0.0
        """The time that the policy gave."""
        self.update_cpu_s = 0.0
        """CPU seconds of the optimizer so far, on the calling thread."""

    def handle(self, event: Event) -> None:
        """Pass an event to the policy and execute its instructions. Raises: DivergedError where
        weights or updates to send are not finite."""
        try:
            arrived = isinstance(event, MessageArrived)
            with in_phase(Phase.DECODE if arrived else Phase.SELECT):
                instructions = self.parts.machine.handle(event)
            self.carry_out(instructions)
        except NotFiniteError as error:
            raise DivergedError(f"iteration {self.progress.iteration}: {error}") from error

    def remind(self) -> None:
        """Remind the policy if it is time."""
        if self._reporter.now_s() >= self.reminder_s:
            self.reminder_s = math.inf
            self.handle(ReminderDue())

    def postpone_reminder(self) -> None:
        """Count the time until the policy's reminder from now on, if it waits for one."""
        if self.reminder_s < math.inf:
            self.carry_out([RemindAfter(self._remind_after_s)])

    def carry_out(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case SendMessage(peer=peer, message=message):
                with in_phase(Phase.SEND):
                    self.send(peer, message)
            case SendWeights(peer=peer, iteration=iteration, weights_D=weights_D):
                with in_phase(Phase.ENCODE):
                    payload = self._replica.encoded_weights(weights_D)
                with in_phase(Phase.SEND):
                    self.send(peer, Message(MessageKind.WEIGHTS, iteration, payload=payload))
            case AddSamples(key=key, x_B=x_B, y_B=y_B):
                self.parts.stream.extend({key: (x_B, y_B)})
            case RemindAfter(seconds=seconds):
                self._remind_after_s = seconds
                self.reminder_s = self._reporter.now_s() + seconds
                self._due(seconds)
            case RejectMessage():
                self._refuse(instruction, self.progress.iteration)
            case ReportEvent(reason=reason, text=text):
                if reason is EventReason.UNUSUAL_VALUES:
                    self.unusual = text
                self._reporter.event(
                    reason, text, iteration=self.progress.iteration, warning=reason in _WARNINGS
                )
            case _:
                with in_phase(Phase.APPLY):
                    self._change_weights(instruction)

    def _change_weights(self, instruction: Instruction) -> None:
        match instruction:
            case ApplyGradient():
                self._descend(instruction)
            case AddUpdate(update_D=update_D):
                self._replica.add(update_D)
            case ReplaceWeights(weights_D=weights_D):
                self._replica.replace(weights_D)
            case AverageWeights():
                self._mix(instruction)
            case MergeReplicas():
                self._fold(instruction)
            case WithholdUpdate(update_D=update_D):
                self._replica.withhold(update_D)

    def _descend(self, descend: ApplyGradient) -> None:
        began_cpu_s = self._cpu_s()
        self.norms.mean(descend.gradient_D, descend.samples)
        self._replica.apply_gradient(
            descend.gradient_D,
            batch_samples=descend.global_batch_size or descend.samples,
            iteration=self.progress.iteration,
            samples=self.progress.own_samples,
            on_updated=lambda: self._descended(began_cpu_s),
        )

    def _descended(self, began_cpu_s: float) -> None:
        self.update_cpu_s += self._cpu_s() - began_cpu_s
        self.handle(UpdateApplied())

    def _mix(self, mix: AverageWeights) -> None:
        self._replica.blend(mix.weights_D, mix.fraction, mix.since_D)
        self._reporter.event(
            EventReason.KNOWLEDGE_TRANSFERRED,
            f"merged {mix.fraction:g} of worker {mix.sender}'s weights",
            iteration=self.progress.iteration,
        )

    def _fold(self, fold: MergeReplicas) -> None:
        samples = fold.own_samples + fold.their_samples
        self._replica.blend(fold.weights_D, fold.their_samples / samples, fold.since_D)
        message = merge_text([fold.sender], fold.own_samples, fold.their_samples)
        self._reporter.event(
            EventReason.FOLDED_TOGETHER, message, iteration=self.progress.iteration
        )
