"""This worker's copy of the model: weights, optimizer, and the lock between its two readers.

The training thread changes weights in place; the exchange's thread copies them for peers that ask.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from dlion_api.names import Rank
from dlion_api.spec import Job
from dlion_worker.codecs import Coding, ValueCodec, encode_weights
from dlion_worker.exchange import StateSnapshot, StateWanted
from dlion_worker.policies.interface import Flat, Layout
from dlion_worker.trainer.snapshot import WorkerState, pack, unpack
from dlion_worker.training.model import FlatModel, Snapshot
from dlion_worker.training.optimizer import FlatOptimizer, learning_rate_for

PATIENCE_S = 60.0
"""Longest wait for an update that a peer's state is to hold."""


class LocalReplica:
    """One model with its optimizer; every method may be called from any thread."""

    def __init__(self, job: Job, rank: Rank, model: FlatModel, optimizer: FlatOptimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self._job = job
        self._rank = rank
        self._lock = threading.Lock()
        self._updated = threading.Condition(self._lock)
        self.iteration = 0
        """The last iteration whose update these weights hold."""
        self.samples = 0
        self.learning_rate = 0.0
        self._is_settled = True
        """Not between an update and what the policies make of it."""
        self._withheld_D: Flat | None = None
        """Part of the weights that peers have still to get from this worker's policy."""

    @property
    def layout(self) -> Layout:
        """Of the weights."""
        return self.model.layout

    @property
    def weights_D(self) -> Flat:  # noqa: N802 - the shape's suffix
        """As they are now; they change."""
        return self.model.weights_D

    @property
    def resting_D(self) -> Flat:  # noqa: N802 - the shape's suffix
        """Where the optimizer's moments carry the weights with no further gradient."""
        with self._lock:
            return self.optimizer.resting_D(self.model.weights_D)

    def descend(
        self,
        gradient_D: Flat,
        *,
        batch_samples: int,
        iteration: int,
        samples: int,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """One update, with the learning rate for a gradient that stands for `batch_samples`.

        `samples` counts this worker's own since the run began. `then`: what follows from it at
        once; no peer is given a state in between.
        """
        spec = self._job.spec
        self.learning_rate = learning_rate_for(
            spec.trainer.optimizer,
            batch_samples,
            initial_batch_samples=spec.batching.global_batch_size.initial,
        )
        with self._lock:
            self.optimizer.apply(self.model.weights_D, gradient_D, self.learning_rate)
            self.iteration, self.samples = iteration, samples
            self._is_settled = False
        try:
            then()
        finally:
            with self._lock:
                self._is_settled = True
                self._updated.notify_all()

    def mix(self, other_D: Flat, fraction: float, since_D: Flat | None = None) -> None:
        """w <- (1 - fraction) w + fraction other; or, where these weights were `since_D` when the
        other's were as given, w <- w + fraction (other - since)."""
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
        """w <- weights, whose moments the optimizer keeps."""
        with self._lock:
            self.model.set_weights(weights_D)

    def withhold(self, update_D: Flat) -> None:
        """Who goes on from this state from now on gets it without that."""
        with self._lock:
            self._withheld_D = update_D

    def coded_weights(self, weights_D: Flat | None = None) -> bytes:
        """The weights in the exchange's codec, for a knowledge transfer: those given, or now's."""
        exchange = self._job.spec.exchange
        coding = Coding(ValueCodec(exchange.codec), decimals=exchange.codec_decimals)
        with self._lock:
            now_D = self.model.weights_D
            return bytes(encode_weights(now_D if weights_D is None else weights_D, coding))

    def provide(self, wanted: StateWanted) -> StateSnapshot:
        """The state as a peer asks for it. One that never comes to hold the update it is to hold is
        given after a while as it is: who asked looks at its iteration."""
        with self._updated:
            self._updated.wait_for(
                lambda: self._is_settled and self.iteration >= wanted.at_least, timeout=PATIENCE_S
            )
            state = self._state()
            if self._withheld_D is not None and not wanted.weights_only:
                np.subtract(state.weights_D, self._withheld_D, out=state.weights_D)
            payload = pack(state, weights_only=wanted.weights_only)
            return StateSnapshot(self.iteration, self.samples, payload)

    def take_over(self, snapshot: StateSnapshot) -> None:
        """Goes on from a peer's state. Raises `ContractError` where it does not fit."""
        state = unpack(bytes(snapshot.payload), self._state(), weights_only=False)
        with self._lock:
            self.model.set_weights(state.weights_D)
            self._withheld_D = None
            self.model.set_state(state.model_state_S)
            self.optimizer.restore_flat(state.optimizer_M)
            self.iteration = snapshot.iteration

    def state(self) -> WorkerState:
        """A copy of everything."""
        with self._lock:
            return self._state()

    def snapshot_of(self, state: WorkerState) -> Snapshot:
        """Another state of this model, to be evaluated or saved."""
        return self.model.snapshot_of(state.weights_D, state.model_state_S)

    def _state(self) -> WorkerState:
        return WorkerState(
            weights_D=self.model.weights_D.copy(),
            model_state_S=self.model.get_state(),
            optimizer_M=self.optimizer.flat_state(),
        )
