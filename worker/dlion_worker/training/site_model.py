"""The model that a site keeps at the end of a run: the choice, and the files.

The lowest live rank of each site, its *lead*, collects the replicas. It keeps the better of their
average and the best replica.
"""

import functools
import json
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dlion_api.atomic_file import write_atomically
from dlion_api.errors import UnavailableError
from dlion_api.names import Rank
from dlion_api.spec import Job
from dlion_core.policies.interface import Flat
from dlion_worker.training.snapshot import TrainingState

MAX_EVALUATIONS = 4
"""Maximum concurrent evaluations: each uses one core."""

STILL_TRAINING = "still training"
"""The stop reason in `model.json` of a model published during training."""


@dataclass(frozen=True)
class CollectedReplica:
    """One worker's weights at the end of the run."""

    rank: Rank
    state: TrainingState
    samples: int
    iteration: int


@dataclass(frozen=True)
class ModelSummary:
    """The content of `model.json`. None: not every replica was evaluated."""

    model: str
    """`averaged`, or `replica <rank>`."""
    accuracy: float
    averaged_accuracy: float
    best_replica: int | None
    best_replica_accuracy: float | None
    mean_replica_accuracy: float | None
    ranks: tuple[int, ...]
    sites: tuple[str, ...]
    samples: int
    stop_reason: str

    def __str__(self) -> str:
        mean = self.mean_replica_accuracy
        return (
            f"{self.model} of worker{'s' * (len(self.ranks) > 1)} "
            f"{', '.join(map(str, self.ranks))}: "
            f"accuracy {self.accuracy:.4f} (averaged {self.averaged_accuracy:.4f}"
            + ("" if mean is None else f", mean {mean:.4f}")
            + ")"
        )


@dataclass(frozen=True)
class SavedModel:
    """A site's model on disk, and the replicas that it was chosen from."""

    folder: Path
    about: ModelSummary
    replicas: tuple[CollectedReplica, ...]


def choose_model(
    job: Job,
    replicas: list[CollectedReplica],
    *,
    accuracy_of: Callable[[TrainingState], float],
    stop_reason: str,
    candidates: list[CollectedReplica] | None = None,
    parallel: int = MAX_EVALUATIONS,
) -> tuple[ModelSummary, TrainingState]:
    """Return the better of the average and the best replica, with its description.

    Only `candidates` are evaluated besides the average, and may be the best; None: all replicas.
    `parallel` threads call `accuracy_of`. Raises: UnavailableError if no replica was trained: a
    sensor's own has its initial weights.
    """
    collected = replicas  # features of workers that do not train are in the model, too
    replicas = [one for one in collected if job.spec.exchange.trains(one.rank)]
    if not replicas:
        ranks = ", ".join(str(replica.rank) for replica in collected)
        raise UnavailableError(f"no model is kept: of workers {ranks} none trains")
    trained = {one.rank for one in replicas}
    candidates = [one for one in candidates or () if one.rank in trained] or replicas
    averaged = average(replicas)
    states = [*(replica.state for replica in candidates), averaged]
    threads = ThreadPoolExecutor(parallel, thread_name_prefix="candidates")
    try:
        *own, averaged_accuracy = threads.map(accuracy_of, states)
    finally:  # a signal does not wait for them
        threads.shutdown(wait=False, cancel_futures=True)
    accuracies = dict(zip((replica.rank for replica in candidates), own, strict=True))
    best = max(candidates, key=lambda replica: (accuracies[replica.rank], -replica.rank))
    is_averaged = len(replicas) > 1 and averaged_accuracy >= accuracies[best.rank]
    is_complete = len(accuracies) == len(replicas)
    about = ModelSummary(
        model="averaged" if is_averaged else f"replica {best.rank}",
        accuracy=max(averaged_accuracy, accuracies[best.rank]),
        averaged_accuracy=averaged_accuracy,
        best_replica=best.rank if is_complete else None,
        best_replica_accuracy=accuracies[best.rank] if is_complete else None,
        mean_replica_accuracy=float(np.mean([*accuracies.values()])) if is_complete else None,
        ranks=tuple(sorted(replica.rank for replica in collected)),
        sites=tuple(sorted({job.worker(replica.rank).site for replica in collected})),
        samples=sum(replica.samples for replica in replicas),
        stop_reason=stop_reason,
    )
    return about, averaged if is_averaged else best.state


def save_site_model(
    about: ModelSummary,
    state: TrainingState,
    *,
    save: Callable[[Path, TrainingState], None],
    results_dir: Path,
    site: str,
) -> Path:
    """Save a site's model and its description; return the folder. Raises: OSError."""
    folder = results_dir / "models" / site
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "model.keras", state)
    text = json.dumps(asdict(about), indent=2) + "\n"
    write_atomically(folder / "model.json", text.encode(), mode=0o644)
    return folder


def start_file(path: Path) -> Path:
    """Return the `.keras` file that a path of `trainer.startFrom` means, whether or not it is
    there."""
    if path.is_dir():
        return next(iter(sorted(path.rglob("model.keras"))), path / "model.keras")
    return path


def ranks_in_saved_model(results_dir: Path, site: str, *, since_s: float) -> set[int]:
    """Ranks in a site's model saved since that Unix time; empty if there is none."""
    path = results_dir / "models" / site / "model.json"
    try:
        about = json.loads(path.read_text("utf-8")) if path.stat().st_mtime > since_s else {}
    except (OSError, ValueError):
        return set()
    is_final = about.get("stop_reason") not in (None, STILL_TRAINING)
    return set(about["ranks"]) if is_final else set()


def site_leads(job: Job, alive: set[Rank], *, saved_by: Collection[Rank] = ()) -> set[Rank]:
    """The lowest live rank of every site whose model is not saved yet."""
    done = {job.worker(rank).site for rank in saved_by}
    leads: dict[str, Rank] = {}
    for worker in map(job.worker, sorted(alive)):
        if worker.site not in done:
            leads.setdefault(worker.site, worker.rank)
    return set(leads.values())


def average(replicas: list[CollectedReplica]) -> TrainingState:
    """Mean of the replicas' weights and model states, weighted by samples."""
    total = sum(replica.samples for replica in replicas)
    shares = [replica.samples / total if total else 1 / len(replicas) for replica in replicas]
    return TrainingState(
        weights_D=_weighted(shares, [r.state.weights_D for r in replicas]),
        model_state_S=_weighted(shares, [r.state.model_state_S for r in replicas]),
        optimizer_M=replicas[0].state.optimizer_M,
    )


def _weighted(shares: list[float], vectors: list[Flat]) -> Flat:
    # All in float64, and no zeros to begin with (-0.0 + 0.0 is 0.0): the mean of equal replicas is
    # equal to them, bit for bit, and need not be evaluated again.
    products = (
        np.multiply(share, vector, dtype=np.float64)
        for share, vector in zip(shares, vectors, strict=True)
    )
    return functools.reduce(np.add, products).astype(np.float32)
