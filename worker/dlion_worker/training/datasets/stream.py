"""Batches of one worker's samples: shuffled by epoch, resumable, extensible.

`next` and `state` run on the training thread; `extend` and `remove` may run on another. All
randomness follows (seed, rank, epoch).
"""

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError, DataError
from dlion_core.policies.interface import Value
from dlion_worker.training.datasets.dataset import DataSet, Samples

_LOG = logging.getLogger(__name__)

_GROWTH = 1.25


class BatchStream:
    """An endless stream of batches that yields every sample once per epoch.

    A batch may span epochs and exceed the size of the data. New samples are mixed into the rest of
    the current epoch, so that they are used soon.

    Raises: DataError where there is no sample.
    """

    def __init__(self, data: DataSet, *, seed: int, rank: int) -> None:
        if not data.samples:
            raise DataError(
                f"worker {rank}: no sample to train on. Put data there before the start, or give "
                "this worker a share of it"
            )
        self._seed, self._rank, self._augment = seed, rank, data.augment
        self._lock = threading.Lock()
        self._x, self._y, self._rows = _joined(data.parts)
        self._used = len(self._y)
        """Rows before this one have been written."""
        self._epoch = 0
        self._position = 0
        self._set_order(self._shuffled())

    @property
    def samples(self) -> int:
        with self._lock:
            return len(self._order)

    @property
    def passes(self) -> int | None:
        """Passes that training has begun since the last `restore`; None: not counted."""
        return None

    @property
    def earlier_passes(self) -> int | None:
        """Passes that earlier starts of this worker may have begun; None: not kept."""
        return None

    def keys(self) -> frozenset[str]:
        """Keys of the parts in the stream."""
        with self._lock:
            return frozenset(self._rows)

    def next(self, batch_size: int) -> Samples:
        """The next batch: x [batch_size, ...] and y, copies; augmented if the program does so."""
        with self._lock:
            seed = (self._seed, self._rank, self._epoch, self._position)
            pieces: list[NDArray[np.int64]] = []
            missing = batch_size
            while missing > 0:
                if self._position >= len(self._order):
                    self._epoch += 1
                    self._position = 0
                    self._set_order(self._next_order(pieces))
                piece = self._order[self._position : self._position + missing]
                pieces.append(piece)
                self._position += len(piece)
                missing -= len(piece)
            rows = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            x_B, y_B = self._x[rows], self._y[rows]
        return (x_B, y_B) if self._augment is None else self._augment(x_B, y_B, seed)

    def extend(self, parts: Mapping[str, Samples]) -> None:
        """Add samples under their keys; an existing key is replaced.

        `FileIntake` has checked that their shape and type are those of the data set. Raises:
        MemoryError where their arrays find no room; the stream is unchanged then.
        """
        if not parts:
            return  # keep the order of the rest of the epoch
        with self._lock:
            replaced = parts.keys() & self._rows.keys()
            larger = self._larger_arrays(parts, replaced)
            self._drop(replaced)
            if larger is not None:
                self._move_into(*larger)
            self._mix_in(self._append(parts))

    def remove(self, keys: frozenset[str] | set[str]) -> None:
        """Remove parts from the next batch on; unknown keys are ignored.

        Raises: DataError where nothing would be left to train on; nothing is removed then.
        """
        with self._lock:
            known = keys & self._rows.keys()
            if known == self._rows.keys():
                raise DataError(
                    "all of this worker's samples are gone from the data; training continues "
                    "with the last ones until others appear"
                )
            self._drop(known)

    def state(self) -> dict[str, Value]:
        """The position, for a checkpoint."""
        with self._lock:
            return {
                "epoch": self._epoch,
                "position": self._position,
                "samples": len(self._order),
            }

    def restore(self, state: Mapping[str, Value]) -> None:
        """Restore a position: the same data then gives the same next batch.

        If the data has changed, the current epoch starts again.
        """
        try:
            epoch, position, samples = (
                int(np.asarray(state[k])) for k in ("epoch", "position", "samples")
            )
        except (KeyError, ValueError, TypeError) as error:
            raise ContractError(
                f"stream position: unreadable ({error}); allowed: epoch, position, samples"
            ) from error
        with self._lock:
            self._epoch = epoch
            self._set_order(self._shuffled())
            if samples != len(self._order):
                _LOG.warning(
                    "the data has changed since the checkpoint (%d samples then, %d now): the "
                    "epoch starts again",
                    samples,
                    len(self._order),
                )
            self._position = position if samples == len(self._order) else 0

    # ---- under the lock

    def _shuffled(self) -> NDArray[np.int64]:
        live = np.sort(np.concatenate(list(self._rows.values())))
        return np.random.default_rng([self._seed, self._rank, self._epoch]).permutation(live)

    def _next_order(self, drawn: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:  # noqa: ARG002
        """The order of an epoch that begins after these rows of the same batch."""
        return self._shuffled()

    def _set_order(self, order_N: NDArray[np.int64]) -> None:
        self._order = self._order_room = order_N
        """All rows, in the order of the epoch: the start of an array with room for more."""

    def _mix_in(self, added_N: NDArray[np.int64]) -> None:
        """Mix new rows into the rest of the epoch, in time for the new ones alone.

        Source: Durstenfeld's shuffle (1964), inside out. Each new row changes places with
        one of the rest, or with none. So the rest is as random as if it had been shuffled again.
        """
        old, count, position = len(self._order), len(self._order) + len(added_N), self._position
        if count > len(self._order_room):
            self._order_room = np.empty(int(count * _GROWTH), np.int64)
            self._order_room[:old] = self._order
        self._order = order_N = self._order_room[:count]
        order_N[old:] = added_N
        seed = [self._seed, self._rank, self._epoch, count - position]
        places = np.random.default_rng(seed).integers(position, np.arange(old, count) + 1)
        for place, other in enumerate(places.tolist(), start=old):
            order_N[place], order_N[other] = order_N[other], order_N[place]

    def _drop(self, keys: set[str] | frozenset[str]) -> None:
        if not keys:
            return
        gone = np.zeros(len(self._y), bool)
        for key in keys:
            gone[self._rows.pop(key)] = True
        passed = self._order[: self._position]
        left = self._order[self._position :]
        passed = passed[~gone[passed]]
        self._set_order(np.concatenate([passed, left[~gone[left]]]))
        self._position = len(passed)

    def _append(self, parts: Mapping[str, Samples]) -> NDArray[np.int64]:
        """Rows of the new samples, for which there is room."""
        first = used = self._used
        for key, (x, y) in parts.items():
            self._x[used : used + len(y)] = x
            self._y[used : used + len(y)] = y
            self._rows[key] = np.arange(used, used + len(y))
            used += len(y)
        self._used = used
        return np.arange(first, used)

    def _larger_arrays(
        self, parts: Mapping[str, Samples], replaced: Collection[str]
    ) -> Samples | None:
        """Empty arrays for these parts and all but the replaced ones; None: the present ones do."""
        extra = sum(len(y) for _, y in parts.values())
        if self._used + extra <= len(self._y):
            return None
        kept = sum(len(rows) for key, rows in self._rows.items() if key not in replaced)
        capacity = int((kept + extra) * _GROWTH)
        x = np.empty((capacity, *self._x.shape[1:]), self._x.dtype)
        return x, np.empty((capacity, *self._y.shape[1:]), self._y.dtype)

    def _move_into(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        """Move the live rows into these arrays."""
        keys = list(self._rows)
        live = np.concatenate([np.zeros(0, np.int64), *(self._rows[k] for k in keys)])
        x[: len(live)], y[: len(live)] = self._x[live], self._y[live]
        new_row = np.zeros(len(self._y), np.int64)
        new_row[live] = np.arange(len(live))
        self._set_order(new_row[self._order])
        self._rows = {k: new_row[self._rows[k]] for k in keys}
        self._x, self._y, self._used = x, y, len(live)


def _joined(
    parts: Mapping[str, Samples],
) -> tuple[NDArray[Any], NDArray[Any], dict[str, NDArray[np.int64]]]:
    """All parts as one pair of arrays, and the rows of each part."""
    ends = np.cumsum([len(y) for _, y in parts.values()])
    rows = {
        key: np.arange(end - len(y), end)
        for end, (key, (_, y)) in zip(ends, parts.items(), strict=True)
    }
    samples = [pair for pair in parts.values() if len(pair[1])]
    if len(samples) == 1:
        x, y = samples[0]
        return x, y, rows
    x = np.concatenate([x for x, _ in samples])
    return x, np.concatenate([y for _, y in samples]), rows
