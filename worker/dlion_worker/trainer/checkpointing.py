"""When and what a worker saves of itself, so that a run can be resumed.

Weights, model state, optimizer, random generators, policies, place in the data, progress: all that
makes the next batch and the next step the same as without the break.

At a barrier a local step may be under way when a worker is told to stop: its gradient is computed
and sent, its update is not made. What is saved then is the state before that step, also of what the
policies hold back of gradients; the place after it is kept beside, for the case that a peer has
made the update (`overtake`).
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError, DataError
from dlion_worker.exchange import StateSnapshot
from dlion_worker.trainer.replica import LocalReplica
from dlion_worker.trainer.snapshot import load_checkpoint, save_checkpoint
from dlion_worker.trainer.stopping import JobProgress

Value = NDArray[np.generic] | int | float | str
Values = dict[str, Value]


class Stateful(Protocol):
    """Anything with a state of flat named values: policies, optimizers, streams."""

    def state(self) -> Values: ...
    def restore(self, state: Values) -> None: ...


class Policies(Stateful, Protocol):
    """A worker's machine, as far as it matters here."""

    def overtake(self, iteration: int) -> None: ...


@dataclass(frozen=True)
class Place:
    """What a local step moves on by itself, before any update is made."""

    progress: JobProgress
    stream: Values
    policies: Values
    counters: NDArray[np.int64]
    model_state_S: NDArray[np.float32]

    def values(self) -> Values:
        """As flat named values."""
        return {
            **asdict(self.progress),
            **_prefixed("stream", self.stream),
            **_prefixed("policies", self.policies),
            "counters": self.counters,
            "model_state": self.model_state_S,
        }


class Checkpointer:
    """Saves to one file, at most every `every_s` seconds."""

    def __init__(
        self,
        path: Path,
        *,
        every_s: float,
        replica: LocalReplica,
        progress: JobProgress,
        stream: Stateful,
        machine: Policies,
    ) -> None:
        self._path = path
        self._every_s = every_s
        self._replica = replica
        self._progress = progress
        self._stream = stream
        self._machine = machine
        self._saved_s = time.monotonic()
        self._before: Place | None = None
        self._undone: Place | None = None
        self._after: Values = {}

    def due(self) -> bool:
        """Whether the interval has passed since the last one."""
        return time.monotonic() - self._saved_s >= self._every_s

    def begin_step(self) -> None:
        """Notes the place before a local step whose update will be made later, at a barrier."""
        self._before = self._place()

    def end_step(self) -> None:
        """The update of that step has been made."""
        self._before = None

    def undo_step(self) -> None:
        """The run ends before the update of a step under way was made: as if it were not begun."""
        if self._before is not None:
            self._undone = self._place()
            self._progress.take(self._before.progress)

    def begin_anew(self, machine: Policies) -> None:
        """This worker comes in once more: no step is under way, and policies are that one."""
        self._before = self._undone = None
        self._after = {}
        self._machine = machine

    def save(self) -> None:
        """Writes the file whole. Raises `OSError` where the disk is full; the old one stands."""
        values: Values = {
            **(self._before or self._place()).values(),
            "weights": self._replica.model.get_weights(),
            "applied_iteration": self._replica.iteration,
            **_prefixed("optimizer", self._replica.optimizer.state()),
        }
        if self._undone is not None:
            values.update(_prefixed("after", self._undone.values()))
        save_checkpoint(self._path, values)
        self._saved_s = time.monotonic()

    def load(self) -> bool:
        """Takes the file's state over, if there is one.

        Raises: DamagedCheckpointError where it cannot be read; DataError where it is another job's.
        """
        loaded = load_checkpoint(self._path)
        if loaded is None:
            return False
        values = {name: _plain(value) for name, value in loaded.items()}
        try:
            self._restore(values)
        except (KeyError, ValueError, ContractError) as error:
            msg = (
                f"checkpoint {self._path} does not fit this job ({error}); resume with the "
                "manifest that it was made with, or remove it to start afresh"
            )
            raise DataError(msg) from error
        return True

    def overtake(self, snapshot: StateSnapshot) -> None:
        """Goes on from a peer's state, with this worker's own place in its data. What its policies
        held back stays where the peer has made the update of the step that was under way, and else
        is void (`Horizon.overtake`); as of an earlier release's checkpoint, which lacks it.

        Raises: ContractError where the state is another model's.
        """
        self._replica.take_over(snapshot)
        policies: Values = {}
        if self._after and int(_array(self._after["iteration"])) == snapshot.iteration:
            self._restore_place(self._after)
            policies = _below("policies", self._after)
        if policies:
            self._machine.restore({**policies, "iteration": snapshot.iteration})
        else:
            self._machine.overtake(snapshot.iteration)
        self._progress.iteration = snapshot.iteration
        self._replica.samples = self._progress.own_samples

    def _place(self) -> Place:
        progress = JobProgress()
        progress.take(self._progress)
        model = self._replica.model
        return Place(
            progress,
            self._stream.state(),
            self._machine.state(),
            model.get_counters(),
            model.get_state(),
        )

    def _restore(self, values: Values) -> None:
        self._after = _below("after", values)
        self._replica.model.set_weights(_array(values["weights"]).astype(np.float32, copy=False))
        self._replica.optimizer.restore(_below("optimizer", values))
        self._restore_place(values)
        self._machine.restore(_below("policies", values))
        self._replica.iteration = int(_array(values["applied_iteration"]))
        self._replica.samples = self._progress.own_samples

    def _restore_place(self, values: Values) -> None:
        model = self._replica.model
        model.set_state(_array(values["model_state"]).astype(np.float32, copy=False))
        model.set_counters(_array(values["counters"]).astype(np.int64, copy=False))
        self._stream.restore(_below("stream", values))
        self._progress.take(
            JobProgress(
                iteration=int(_array(values["iteration"])),
                own_samples=int(_array(values["own_samples"])),
                job_samples=int(_array(values["job_samples"])),
                trained_s=float(_array(values["trained_s"])),
            )
        )


def _prefixed(prefix: str, values: Values) -> Values:
    return {f"{prefix}.{name}": value for name, value in values.items()}


def _below(prefix: str, values: Values) -> Values:
    start = f"{prefix}."
    return {
        name.removeprefix(start): value for name, value in values.items() if name.startswith(start)
    }


def _array(value: Value) -> NDArray[np.generic]:
    return np.asarray(value)


def _plain(value: NDArray[np.generic]) -> Value:
    """An array as it is; a single value as Python's own."""
    if value.ndim:
        return value
    item: Value = value.item()
    return item
