"""What a worker's checkpoint contains, and when it is saved.

With it, the next batch and step are the same as without the interruption. At a barrier a worker may
be stopped between sending a gradient and the update. The checkpoint then holds the state before
that step, including what policies withhold of gradients. The position after the step is kept, too,
in case a peer has made the update (`adopt`).
"""

import math
import time
from dataclasses import KW_ONLY, asdict, astuple, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError, DataError
from dlion_core.lifecycle.stopping import JobProgress
from dlion_core.links.events import StateSnapshot
from dlion_core.policies.interface import Value
from dlion_core.policies.iteration_guard import IterationGuard
from dlion_worker.training.datasets import BatchStream
from dlion_worker.training.replica import LocalReplica
from dlion_worker.training.snapshot import load_checkpoint, save_checkpoint

Values = dict[str, Value]

MAX_VECTORS_PER_PEER = 4
"""Maximum vectors of the model's size that a policy keeps for a link: a residual, an early message,
what a partner has read, and a rest."""

MORE_WORKERS = 8
"""Workers that may have existed when the file was written, and are not in the manifest now."""

MAX_OTHER_BYTES = 64 * 2**20
"""Maximum of other data in a checkpoint: counters, the position in the data."""


@dataclass
class Checkpointer:
    """Saves to one file, at most every `every_s` seconds."""

    path: Path
    _: KW_ONLY
    every_s: float
    replica: LocalReplica
    progress: JobProgress
    stream: BatchStream
    machine: IterationGuard
    workers: int = 0
    """Workers in the manifest."""
    key: bytes = field(default=b"", repr=False)
    """Authenticates the file (`dlion_worker.checkpoint_mac`); empty: nothing does."""

    def __post_init__(self) -> None:
        self._saved_s = self._retry_s = time.monotonic()
        self._before: Values = {}
        self._undone: Values = {}
        self._after: Values = {}

    def due(self) -> bool:
        """Whether the interval has passed since the last save, and a delay since a failed one."""
        now_s = time.monotonic()
        return now_s >= max(self._saved_s + self.every_s, self._retry_s)

    def retry_after(self, delay_s: float) -> None:
        """A save failed: the next is due after that time, at the earliest."""
        self._retry_s = time.monotonic() + delay_s

    def begin_step(self) -> None:
        """Record the state before a local step whose update follows later, at a barrier."""
        self._before = self._current()

    def end_step(self) -> None:
        """The update of that step has been made."""
        self._before = {}

    def undo_step(self) -> None:
        """Undo a step whose update was not made before the run ended."""
        if self._before:
            self._undone = self._current()
            self.progress.take(_progress(self._before))

    def policies(self) -> Values:
        """Return the policies' state, without an unfinished or undone step."""
        return _unprefixed("policies", self._before or self._current())

    def reset(self, machine: IterationGuard) -> None:
        """Prepare to rejoin: no step is in progress, and `machine` replaces the policies."""
        self._before, self._undone, self._after = {}, {}, {}
        self.machine = machine

    def save(self) -> None:
        """Write the file atomically. Raises: OSError (a full disk); the old one remains."""
        values: Values = {
            **(self._before or self._current()),
            "weights": self.replica.model.get_weights(),
            "applied_iteration": self.replica.iteration,
            **_prefixed("optimizer", self.replica.optimizer.state()),
        }
        values.update(_prefixed("after", self._undone))
        save_checkpoint(self.path, values, key=self.key)
        self._saved_s = time.monotonic()

    def load(self) -> bool:
        """Restore the file's state; return whether there is one.

        Raises: DamagedCheckpointError where it is unreadable or lacks this worker's MAC; DataError
        where it belongs to another job.
        """
        loaded = load_checkpoint(self.path, max_bytes=self._max_bytes(), key=self.key)
        if loaded is None:
            return False
        values = {name: _plain(value) for name, value in loaded.items()}
        try:
            self._restore(values)
        except (KeyError, ValueError, TypeError, OverflowError, ContractError) as error:
            msg = (
                f"checkpoint {self.path} does not fit this job ({error}); resume with the "
                "manifest that it was made with, or remove it to start from scratch"
            )
            raise DataError(msg) from error
        return True

    def _max_bytes(self) -> int:
        """The largest checkpoint of this model: policies keep some vectors for each peer, and twice
        where a step was undone."""
        model = self.replica.model
        vector_bytes = model.get_weights().nbytes + _array(model.get_state()).nbytes
        optimizer = self.replica.optimizer.state().values()
        optimizer_bytes = sum(_array(value).nbytes for value in optimizer)
        kept = 2 * MAX_VECTORS_PER_PEER * (self.workers + MORE_WORKERS) * vector_bytes
        own = 2 * (vector_bytes + optimizer_bytes + self.machine.max_kept_bytes)
        return own + kept + MAX_OTHER_BYTES

    def adopt(self, snapshot: StateSnapshot) -> None:
        """Adopt a peer's state, keeping this worker's own position in its data.

        If the peer has made the update of the unfinished step, the policies' withheld gradients
        stay. Otherwise they are void (`Horizon.take_over`), as with an older release's checkpoint,
        which lacks them. Raises: ContractError where the state is of another model.
        """
        self.replica.restore_from(snapshot)
        policies: Values = {}
        if self._after and int(_array(self._after["iteration"])) == snapshot.iteration:
            self._restore_current(self._after)
            policies = _unprefixed("policies", self._after)
        if policies:
            self.machine.restore({**policies, "iteration": snapshot.iteration})
        else:
            self.machine.take_over(snapshot.iteration)
        if self.progress.iteration != snapshot.iteration:
            self.progress.global_batch_size = 0  # that of an earlier iteration
        self.progress.iteration = snapshot.iteration
        self.replica.samples = self.progress.own_samples

    def _current(self) -> Values:
        """The state that a local step changes before any update is made."""
        return {
            **asdict(self.progress),
            **_prefixed("stream", self.stream.state()),
            **_prefixed("policies", self.machine.state()),
            "counters": self.replica.model.get_counters(),
            "model_state": self.replica.model.get_state(),
        }

    def _restore(self, values: Values) -> None:
        self._after = _unprefixed("after", values)
        self.replica.model.set_weights(_array(values["weights"]).astype(np.float32, copy=False))
        self.replica.optimizer.restore(_unprefixed("optimizer", values))
        self.machine.restore(_unprefixed("policies", values))
        for one in self.machine.collected_samples():  # the stream's position counts them
            self.stream.extend({one.key: (one.x_B, one.y_B)})
        self._restore_current(values)
        self.replica.iteration = int(_array(values["applied_iteration"]))
        self.replica.samples = self.progress.own_samples

    def _restore_current(self, values: Values) -> None:
        model = self.replica.model
        model.set_state(_array(values["model_state"]).astype(np.float32, copy=False))
        model.set_counters(_array(values["counters"]).astype(np.int64, copy=False))
        self.stream.restore(_unprefixed("stream", values))
        self.progress.take(_progress(values))


def _progress(values: Values) -> JobProgress:
    """The worker's counts. Raises: ValueError for a negative or infinite one, and NaN; KeyError,
    TypeError and OverflowError where a value is no number."""
    progress = JobProgress(
        iteration=int(_array(values["iteration"])),
        own_samples=int(_array(values["own_samples"])),
        job_samples=int(_array(values["job_samples"])),
        trained_s=float(_array(values["trained_s"])),
        # Older checkpoints lack it.
        global_batch_size=int(_array(values.get("global_batch_size", 0))),
    )
    if not all(0 <= count < math.inf for count in astuple(progress)):
        raise ValueError(f"{progress}; allowed: finite counts of at least 0")
    return progress


def _prefixed(prefix: str, values: Values) -> Values:
    return {f"{prefix}.{name}": value for name, value in values.items()}


def _unprefixed(prefix: str, values: Values) -> Values:
    start = f"{prefix}."
    return {
        name.removeprefix(start): value for name, value in values.items() if name.startswith(start)
    }


def _array(value: Value) -> NDArray[np.generic]:
    return np.asarray(value)


def _plain(value: NDArray[np.generic]) -> Value:
    """Return an array unchanged, a single value as a Python value."""
    if value.ndim:
        return value
    item: Value = value.item()
    return item
