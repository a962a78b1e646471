"""A job of several sites and a replica without TensorFlow, for `quorum_cluster`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dlion_api.spec import Job, load_job
from dlion_core.links.events import StateSnapshot
from dlion_core.policies.interface import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LAYOUT = Layout(("a", "b"), (4, 2))


def job(workers: Sequence[int], min_sites: int, mode: str = "asynchronous") -> Job:
    """A job with sites of these worker counts and whole gradients."""
    sites = [
        {"name": f"site-{number}", "groups": [{"name": "g", "workers": count}]}
        for number, count in enumerate(workers)
    ]
    return load_job(
        {
            "apiVersion": "dlion.dev/v1alpha1",
            "kind": "DLionJob",
            "metadata": {"name": "quorum"},
            "spec": {
                "sites": sites,
                "minSites": min_sites,
                "trainer": {
                    "program": {"builtin": "digits"},
                    "dataset": {"name": "digits"},
                    "stop": {"maxSteps": 10_000_000},
                },
                "exchange": {"policy": "full", "codec": "float32"},
                "synchronization": {
                    "mode": mode,
                    "maxStaleness": 3,
                    "backupWorkers": int(mode == "backup"),
                },
                "knowledgeTransfer": {"policy": "none"},
                "batching": {"globalBatchSize": {"initial": sum(workers)}},
            },
        }
    )


class Replica:
    """The part of `LocalReplica` that instructions, admission and checkpointer use."""

    learning_rate = np.float32(0.01)

    def __init__(self) -> None:
        self.weights_D = np.ones(LAYOUT.size, np.float32)
        self.iteration = self.samples = 0
        self.model: Any = self
        self.taken: list[tuple[int, bytes]] = []
        """The states taken over."""
        self.folds = 0

    def apply_gradient(
        self,
        gradient_D: np.ndarray,
        *,
        iteration: int,
        samples: int,
        on_updated: Callable[[], None],
        **_: Any,
    ) -> None:
        self.weights_D -= self.learning_rate * gradient_D
        self.iteration, self.samples = iteration, samples
        on_updated()

    @property
    def resting_D(self) -> np.ndarray:  # noqa: N802 - the shape's suffix
        """The weights; without momentum they are at rest."""
        return self.weights_D.copy()

    def blend(self, other_D: np.ndarray, fraction: float, since_D: np.ndarray) -> None:
        self.weights_D += np.float32(fraction) * (other_D - since_D)
        self.folds += 1

    def snapshot_for(self) -> StateSnapshot:
        return StateSnapshot(self.iteration, self.samples, self.weights_D.tobytes())

    def restore_from(self, snapshot: StateSnapshot) -> None:
        self.weights_D[:] = np.frombuffer(bytes(snapshot.payload), np.float32)
        self.iteration = snapshot.iteration
        self.taken.append((snapshot.iteration, bytes(snapshot.payload)))
