"""This worker's copy of the model: weights, optimizer, and the lock for its two readers.

The training thread changes weights in place; the exchange's thread copies them for peers.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.spec import Job
from dlion_core.codecs import Coding, ValueCodec, encode_weights
from dlion_core.links.events import StateRequest, StateSnapshot
from dlion_core.policies.interface import Flat, Layout
from dlion_core.policies.iteration_guard import MAX_ITERATION
from dlion_core.policies.weights.local_rounds import LastRound
from dlion_worker.training.evaluation import replica_hash
from dlion_worker.training.keras_optimizer import ModelOptimizer
from dlion_worker.training.model import FlatModel, Snapshot, StepResult
from dlion_worker.training.optimizer import learning_rate_for
from dlion_worker.training.site_model import CollectedReplica
from dlion_worker.training.snapshot import TrainingState, pack, unpack

UPDATE_WAIT_S = 60.0
"""Longest wait for an update that a requested state must contain."""


MAX_MEASURED_SAMPLES = 256
"""Held-out samples on which a peer's weights are measured: a batch, so that it costs a step."""


class LocalReplica:
    """One model with its optimizer. Every method may be called from any thread."""

    def __init__(self, job: Job, rank: Rank, model: FlatModel, optimizer: ModelOptimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self._job = job
        self._rank = rank
        self._lock = threading.Lock()
        self._updated = threading.Condition(self._lock)
        self.iteration = 0
        """The last iteration whose update is in these weights."""
        self.samples = 0
        self.learning_rate = 0.0
        self._is_settled = True
        """False between an update and the policies' reaction to it."""
        self.untrained_loss: float | None = None
        self._measured_on: tuple[NDArray[Any], NDArray[Any]] | None = None
        self._withheld_D: Flat | None = None
        """Part of the weights that peers still receive from this worker's policy."""
        self._last_round: LastRound | None = None
        """What this replica is at the end of the run, if that is within a round."""

    @property
    def layout(self) -> Layout:
        return self.model.layout

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.model.input_shape

    @property
    def class_count(self) -> int:
        return self.model.class_count

    def step(self, x_B: NDArray[Any], y_B: NDArray[Any]) -> StepResult:
        """Loss and gradient of a batch of this worker's stream."""
        return self.model.step(x_B, y_B)

    @property
    def weights_D(self) -> Flat:  # noqa: N802 - the shape's suffix
        """The live weights, changed in place."""
        return self.model.weights_D

    @property
    def resting_D(self) -> Flat:  # noqa: N802 - the shape's suffix
        """Where the optimizer's moments would carry the weights without further gradients."""
        with self._lock:
            return self.optimizer.resting_D(self.model.weights_D)

    def measure_on(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        """Use the first of these held-out samples for `loss_of`."""
        self._measured_on = x[:MAX_MEASURED_SAMPLES], y[:MAX_MEASURED_SAMPLES]

    def loss_of(self, weights_D: Flat | None) -> float | None:
        """Mean loss of these weights, of the current ones for None, on held-out samples; None:
        there are none."""
        if self._measured_on is None or not len(self._measured_on[0]):
            return None
        now_D = self.model.weights_D if weights_D is None else weights_D
        snapshot = self.model.snapshot_of(now_D, self.model.get_state())
        return self.model.evaluate(*self._measured_on, snapshot=snapshot).loss

    def apply_gradient(
        self,
        gradient_D: Flat,
        *,
        batch_samples: int,
        iteration: int,
        samples: int,
        on_updated: Callable[[], None] = lambda: None,
    ) -> None:
        """Make one update, with the learning rate for a gradient of `batch_samples`.

        `samples` counts this worker's own since the run began. `on_updated` runs directly
        afterwards; no peer gets a state in between.
        """
        spec = self._job.spec
        learning_rate = learning_rate_for(
            spec.trainer.optimizer,
            batch_samples,
            initial_batch_samples=spec.batching.global_batch_size.initial,
        )
        with self._lock:
            self.learning_rate = self.optimizer.apply(
                self.model.weights_D, gradient_D, learning_rate
            )
            self.iteration, self.samples = iteration, samples
            self._is_settled = False
        try:
            on_updated()
        finally:
            with self._lock:
                self._is_settled = True
                self._updated.notify_all()

    def blend(self, other_D: Flat, fraction: float, since_D: Flat | None = None) -> None:
        """w <- (1 - fraction) w + fraction other.

        With `since_D`, these weights at the time of the other's: w <- w + fraction (other - since).
        """
        weights_D = self.model.weights_D
        with self._lock:
            if since_D is None:
                weights_D *= np.float32(1.0 - fraction)
                weights_D += np.float32(fraction) * other_D
            else:
                weights_D += np.float32(fraction) * (other_D - since_D)

    def add(self, update_D: Flat) -> None:
        """w <- w + update."""
        with self._lock:
            self.model.weights_D += update_D

    def replace(self, weights_D: Flat) -> None:
        """w <- weights; the optimizer keeps its moments."""
        with self._lock:
            self.model.set_weights(weights_D)

    def withhold(self, update_D: Flat) -> None:
        """Subtract this update from states that peers pull from now on."""
        with self._lock:
            self._withheld_D = update_D

    def end_with(self, last: LastRound) -> None:
        """At the end of the run, let peers and the saved model have the weights of that round.

        The others have them, too, so no replica is sent to be averaged. The weights of training
        stay: a checkpoint has them.
        """
        with self._lock:
            self._last_round = last

    def collected(self, *, iteration: int, samples: int) -> CollectedReplica:
        """The replica at the end of the run. `iteration`, `samples`: of this worker's last step."""
        with self._lock:
            iteration, samples = self._place(iteration, samples)
            return CollectedReplica(self._rank, self._state(), samples, iteration)

    def encoded_weights(self, weights_D: Flat | None = None) -> bytes:
        """The given or current weights in the exchange's codec, for a knowledge transfer."""
        exchange = self._job.spec.exchange
        coding = Coding(ValueCodec(exchange.codec), decimals=exchange.codec_decimals)
        with self._lock:
            now_D = self.model.weights_D
            return bytes(encode_weights(now_D if weights_D is None else weights_D, coding))

    def snapshot_for(self, wanted: StateRequest) -> StateSnapshot:
        """Return the state that a peer asks for.

        Waits a limited time for the required update, then returns the state as it is; the caller
        checks its iteration.
        """
        with self._updated:
            self._updated.wait_for(
                lambda: self._is_settled and self.iteration >= wanted.at_least,
                timeout=UPDATE_WAIT_S,
            )
            state, place = self._state(), self._place(self.iteration, self.samples)
            if self._withheld_D is not None and not wanted.weights_only:
                np.subtract(state.weights_D, self._withheld_D, out=state.weights_D)
            if wanted.weights_only and wanted.unless_hash:
                own_hash = replica_hash(state.weights_D, state.model_state_S)
                if own_hash == wanted.unless_hash:
                    return StateSnapshot(*place, b"", is_equal=True)
            payload = pack(state, weights_only=wanted.weights_only)
            return StateSnapshot(*place, payload)

    def check_state(self, snapshot: StateSnapshot) -> None:
        """Raise ContractError if a peer's state does not fit, or is of an absurd iteration."""
        if snapshot.iteration > MAX_ITERATION:
            raise ContractError(
                f"a peer's state of iteration {snapshot.iteration}; allowed: up to {MAX_ITERATION}"
            )
        unpack(bytes(snapshot.payload), self._state(), weights_only=False)

    def restore_from(self, snapshot: StateSnapshot) -> None:
        """Adopt a peer's state. Raises: ContractError where it does not fit."""
        state = unpack(bytes(snapshot.payload), self._state(), weights_only=False)
        if not self.iteration and self._job.spec.knowledge_transfer.policy != "none":
            self.untrained_loss = self.loss_of(None)
        with self._lock:
            self.model.set_weights(state.weights_D)
            self._withheld_D = None
            self.model.set_state(state.model_state_S)
            self.optimizer.restore_flat(state.optimizer_M)
            self.iteration = snapshot.iteration
            self._updated.notify_all()

    def state(self) -> TrainingState:
        """A copy of the whole state."""
        with self._lock:
            return self._state()

    def snapshot_of(self, state: TrainingState) -> Snapshot:
        """Another state of this model, to be evaluated or saved."""
        return self.model.snapshot_of(state.weights_D, state.model_state_S)

    def save(self, path: Path, state: TrainingState) -> None:
        """Save another state of this model as a Keras file. Raises: OSError."""
        self.model.save_keras(path, snapshot=self.snapshot_of(state))

    def _place(self, iteration: int, samples: int) -> tuple[int, int]:
        """Iteration and own samples of the weights that peers get."""
        if (last := self._last_round) is None:
            return iteration, samples
        return last.iteration, samples - last.samples_since

    def _state(self) -> TrainingState:
        last = self._last_round
        return TrainingState(
            weights_D=(self.model.weights_D if last is None else last.anchor_D).copy(),
            model_state_S=self.model.get_state(),
            optimizer_M=self.optimizer.flat_state(),
        )
