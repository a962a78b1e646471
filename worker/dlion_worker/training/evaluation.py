"""Evaluation beside training, and fingerprints of weights.

The trainer submits at its interval. A separate thread evaluates a snapshot in small batches, so a
training step waits for at most one batch.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlion_core.lifecycle.reporting import EvaluatedSnapshot, EvaluationResult
from dlion_core.policies.interface import Flat
from dlion_worker.training.model import FlatModel, Snapshot

_CHUNK = 65_536

MAX_REMEMBERED = 8
"""Results that an evaluator keeps, in case other replicas have the same weights."""


class Evaluator:
    """Evaluates snapshots one at a time in its own thread; a newer one replaces a waiting one.

    Replicas in lock step have equal weights, which are evaluated once.
    `on_result` and `on_error` are called in that thread; an error does not affect the next
    snapshot. `seed` selects the samples of a partial evaluation and the sketch's projection. It
    must be equal on all workers, or results are not comparable.
    """

    def __init__(
        self,
        model: FlatModel,
        x: NDArray[Any],
        y: NDArray[Any],
        *,
        seed: int,
        max_samples: int,
        on_result: Callable[[EvaluatedSnapshot], object] = lambda _result: None,
        on_error: Callable[[Exception], None] = lambda _error: None,
        elsewhere: Callable[[Snapshot], EvaluationResult | None] = lambda _snapshot: None,
    ) -> None:
        """`elsewhere` is asked first for the result on all samples; it returns None if there is no
        other evaluator."""
        self._model = model
        self._x, self._y = x, y
        self._seed = seed
        self._on_result, self._on_error = on_result, on_error
        self._elsewhere = elsewhere
        self._subset = evaluated_subset(len(x), seed=seed, max_samples=max_samples)
        self._lock = threading.Lock()
        self._waiting: tuple[Any, Snapshot] | None = None
        self._remembered: dict[tuple[str, bool], EvaluatedSnapshot] = {}
        self._busy = False
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evaluator")

    def submit(self, tag: Any) -> None:
        """Take a snapshot now and evaluate it soon; call between steps.

        An earlier snapshot that still waits is dropped.
        """
        snapshot = self._model.snapshot()
        with self._lock:
            self._waiting = (tag, snapshot)
            if not self._busy:
                self._busy = True
                self._thread.submit(self._drain)

    def evaluate_all(
        self,
        tag: Any,
        *,
        snapshot: Snapshot | None = None,
        between_batches: Callable[[], None] = lambda: None,
    ) -> EvaluatedSnapshot:
        """Evaluate the whole held-out split in the caller's thread: the final evaluation.

        `between_batches` may raise to end it.
        """
        snapshot = snapshot or self._model.snapshot()
        return self._evaluated(tag, snapshot, is_whole=True, between_batches=between_batches)

    def evaluate_subset(self, tag: Any, *, snapshot: Snapshot) -> EvaluatedSnapshot:
        """Evaluate as many samples as between steps, in the caller's thread."""
        return self._evaluated(tag, snapshot, is_whole=False)

    def close(self) -> None:
        """Drop what is queued and end the thread after the current batch."""
        with self._lock:
            self._closed = True
            self._waiting = None
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _drain(self) -> None:
        while (waiting := self._next()) is not None:
            try:
                tag, snapshot = waiting
                self._on_result(
                    self._evaluated(tag, snapshot, is_whole=False, between_batches=self._check_open)
                )
            except CancelledError:
                return
            except Exception as error:  # noqa: BLE001 - the user's program may raise anything
                self._on_error(error)

    def _next(self) -> tuple[Any, Snapshot] | None:
        with self._lock:
            waiting, self._waiting = self._waiting, None
            self._busy = waiting is not None
            return waiting

    def _check_open(self) -> None:
        if self._closed:
            raise CancelledError

    def _evaluated(
        self,
        tag: Any,
        snapshot: Snapshot,
        *,
        is_whole: bool,
        between_batches: Callable[[], None] = lambda: None,
    ) -> EvaluatedSnapshot:
        key = snapshot_hash(snapshot), is_whole
        with self._lock:
            known = self._remembered.get(key)
        if known is not None:
            return replace(known, tag=tag)
        evaluation = self._elsewhere(snapshot) if is_whole else None
        if evaluation is None:
            subset = slice(None) if is_whole else self._subset
            evaluation = self._model.evaluate(
                self._x[subset], self._y[subset], snapshot=snapshot, between_batches=between_batches
            )
        weights_D = snapshot.weights_D
        result = EvaluatedSnapshot(
            tag=tag,
            evaluation=evaluation,
            sketch=tuple(float(v) for v in sketch(weights_D, self._seed)),
            weights_norm=float(np.linalg.norm(weights_D)),
        )
        with self._lock:
            self._remembered[key] = result
            if len(self._remembered) > MAX_REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
        return result


def evaluated_subset(count: int, *, seed: int, max_samples: int) -> slice | NDArray[np.int64]:
    """Which held-out samples are evaluated during training: all, or as many as allowed."""
    if count <= max_samples:
        return slice(None)
    return np.sort(np.random.default_rng([seed, 7]).permutation(count)[:max_samples])


def sketch(weights_D: Flat, seed: int, width: int = 256) -> NDArray[np.float64]:
    """A random projection [width] that preserves distances: |sketch(a) - sketch(b)| is near |a -
    b|.

    A count sketch: every entry is added with a random sign to a random one of `width` sums. The
    squared length has the right mean and a relative deviation of sqrt(2 / width), so a length
    deviates by about 4 % at width 256. All workers of a run use the same seed.

    Source: Charikar, Chen, Farach-Colton 2002.
    """
    rng = np.random.default_rng([seed, 11])
    sums = np.zeros(width)
    for start in range(0, len(weights_D), _CHUNK):
        part = weights_D[start : start + _CHUNK]
        bucket = rng.integers(0, width, len(part))
        sign = rng.integers(0, 2, len(part)) * 2 - 1
        sums += np.bincount(bucket, weights=part * sign, minlength=width)
    return sums


def weights_hash(weights_D: Flat) -> str:
    """BLAKE2b of the weights' bytes, 32 hex digits."""
    return _hash([np.ascontiguousarray(weights_D, np.float32)])


def snapshot_hash(snapshot: Snapshot) -> str:
    """BLAKE2b of the weights' and the state's bytes, 32 hex digits."""
    return _hash([snapshot.weights_D, *map(np.asarray, snapshot.state)])


def replica_hash(weights_D: Flat, state_S: Flat) -> str:
    """BLAKE2b of weights and moving statistics, 32 hex digits. Replicas may differ in their random
    generators and have the same hash."""
    return _hash([weights_D, state_S])


def _hash(arrays: Iterable[NDArray[Any]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)  # bfloat16 has none
    return digest.hexdigest()
