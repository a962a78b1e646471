"""What policies ask for, done to a replica and told to peers: one way for trainer and simulator.

Called by `loop` and by `simulation.worker`, which say how a message leaves and what a refusal
leads to. Knows no clock and no link.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from dlion_api.errors import DivergedError
from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_worker.codecs import NotFiniteError
from dlion_worker.policies.interface import (
    Add,
    Descend,
    Descended,
    Event,
    Fold,
    Instruction,
    Machine,
    Message,
    MessageKind,
    Mix,
    Refuse,
    Replace,
    Send,
    SendWeights,
    Withhold,
)
from dlion_worker.trainer.gradient_norms import NormMeter
from dlion_worker.trainer.replica import LocalReplica
from dlion_worker.trainer.reporting import Reporter
from dlion_worker.trainer.stopping import JobProgress


class Instructions:
    """Carries out one worker's, in the order in which they come."""

    def __init__(
        self,
        machine: Machine,
        replica: LocalReplica,
        reporter: Reporter,
        progress: JobProgress,
        *,
        send: Callable[[Rank, Message], None],
        refuse: Callable[[Rank, str, int], None],
        norms: NormMeter,
    ) -> None:
        """`refuse(peer, reason, iteration)`: a peer's message made no sense."""
        self._machine, self._replica = machine, replica
        self._reporter, self._progress = reporter, progress
        self._send, self._refuse, self._norms = send, refuse, norms
        self.update_cpu_s = 0.0
        """CPU seconds of the optimizer so far, on the calling thread."""

    def begin_anew(self, machine: Machine) -> None:
        """From now on it is told to that one."""
        self._machine = machine

    def handle(self, event: Event) -> None:
        """Tells the policy what has happened, and does what follows from it.

        Raises: DivergedError where weights or updates that it would send are not finite.
        """
        try:
            self.carry_out(self._machine.handle(event))
        except NotFiniteError as error:
            raise DivergedError(f"iteration {self._progress.iteration}: {error}") from error

    def carry_out(self, instructions: Iterable[Instruction]) -> None:
        """Does these, in order."""
        for instruction in instructions:
            self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Descend():
                self._descend(instruction)
            case Add(update_D=update_D):
                self._replica.add(update_D)
            case Replace(weights_D=weights_D):
                self._replica.replace(weights_D)
            case Mix():
                self._mix(instruction)
            case Fold():
                self._fold(instruction)
            case Send(peer=peer, message=message):
                self._send(peer, message)
            case SendWeights(peer=peer, iteration=iteration, weights_D=weights_D):
                payload = self._replica.coded_weights(weights_D)
                self._send(peer, Message(MessageKind.WEIGHTS, iteration, payload=payload))
            case Withhold(update_D=update_D):
                self._replica.withhold(update_D)
            case Refuse(peer=peer, reason=reason):
                self._refuse(peer, reason, self._progress.iteration)

    def _descend(self, descend: Descend) -> None:
        began_cpu_s = time.thread_time()
        self._norms.mean(descend.gradient_D, descend.samples)
        self._replica.descend(
            descend.gradient_D,
            batch_samples=descend.global_batch_size or descend.samples,
            iteration=self._progress.iteration,
            samples=self._progress.own_samples,
            then=lambda: self._descended(began_cpu_s),
        )

    def _descended(self, began_cpu_s: float) -> None:
        self.update_cpu_s += time.thread_time() - began_cpu_s
        self.handle(Descended())

    def _mix(self, mix: Mix) -> None:
        self._replica.mix(mix.weights_D, mix.fraction, mix.since_D)
        self._reporter.event(
            EventReason.KNOWLEDGE_TRANSFERRED,
            f"merged {mix.fraction:g} of worker {mix.sender}'s weights",
            iteration=self._progress.iteration,
        )

    def _fold(self, fold: Fold) -> None:
        samples = fold.own_samples + fold.their_samples
        self._replica.mix(fold.weights_D, fold.their_samples / samples, fold.since_D)
        told = (
            f"met worker {fold.sender} at the mean of what both trained on apart: "
            f"{fold.own_samples:,} samples here, {fold.their_samples:,} there"
        )
        if not fold.own_samples:
            told = (
                f"took over worker {fold.sender}'s weights, which hold all that these hold and "
                f"{fold.their_samples:,} samples more"
            )
        self._reporter.event(
            EventReason.FOLDED_TOGETHER,
            told,
            iteration=self._progress.iteration,
        )
