"""The end of the run for one worker: final state, averaged model, departure.

All have finished the iteration at which a worker met a stop condition. The lowest live rank of each
site, its *lead*, averages the weights of all reachable workers. It saves the better of the average
and the best replica. The others stay until the leads that they see have saved; the next rank
replaces a lost lead.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dlion_api.atomic_file import write_atomically
from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_worker.exchange import PeerExchange, StateRequest
from dlion_worker.policies.interface import Message
from dlion_worker.trainer.inbox import EventInbox, StopKind, stop_message
from dlion_worker.trainer.reporting import Reporter
from dlion_worker.trainer.snapshot import TrainingState, unpack
from dlion_worker.trainer.start_up_times import process_age_s

_LOG = logging.getLogger(__name__)

SLICE_S = 0.1
LEAVE_SLICE_S = 0.05
STILL_TRAINING = "still training"
"""The stop reason in `model.json` of a model published during training."""
LEAVE_WITHIN_S = 0.5
"""A worker that was asked to end waits no longer than this for slow links."""


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


class Shutdown:
    """The end of the run for one worker."""

    def __init__(
        self,
        *,
        job: Job,
        rank: Rank,
        exchange: PeerExchange,
        inbox: EventInbox,
        reporter: Reporter,
        accuracy_of: Callable[[TrainingState], float],
        save: Callable[[Path, TrainingState], None],
        interrupted: Callable[[], bool],
        missing: Callable[[set[Rank]], set[Rank]],
        on_saved: Callable[[Path], None] = lambda _folder: None,
    ) -> None:
        """`missing(linked)`: unlinked workers that must be awaited. `on_saved(folder)`: called with
        the folder of the site's model; returns when it is stored safely."""
        self._on_saved = on_saved
        self._missing = missing
        self._job = job
        self._rank = rank
        self._exchange = exchange
        self._inbox = inbox
        self._reporter = reporter
        self._accuracy_of = accuracy_of
        self._save = save
        self._interrupted = interrupted
        self._since_s = time.time() - process_age_s()
        """A model file older than this belongs to an earlier run in the same folder."""

    def run(
        self, own: CollectedReplica, *, results_dir: Path, stop_reason: str
    ) -> tuple[Rank, ...]:
        """Take part in the end of the run until this worker is no longer needed.

        Returns the ranks in the model that it saved; empty: it saved none. A worker that has saved
        leaves last, so that the others learn of it.
        """
        inbox, ranks_in_saved_model = self._inbox, tuple[Rank, ...]()
        while not self._interrupted():
            missing = self._missing(inbox.linked)
            alive = {*inbox.linked, *missing, self._rank}
            leads = site_leads(self._job, alive, saved_by=inbox.saved)
            if ranks_in_saved_model:
                if inbox.linked <= inbox.saved:
                    break
            elif self._rank in leads:
                if inbox.linked <= inbox.stopped and not missing:
                    replicas = self._gather(own)
                    if not self._save_model(replicas, results_dir, stop_reason):
                        break
                    self._broadcast(stop_message(stop_reason, own.iteration, StopKind.SAVED))
                    ranks_in_saved_model = tuple(replica.rank for replica in replicas)
                    continue
            elif not leads:
                break
            inbox.wait(SLICE_S)
        return ranks_in_saved_model

    def _broadcast(self, message: Message) -> None:
        self._inbox.stop_message = message
        for peer in sorted(self._inbox.linked):
            self._exchange.send(peer, message)

    def _gather(self, own: CollectedReplica) -> list[CollectedReplica]:
        replicas = [own]
        for peer in sorted(self._inbox.linked):
            try:
                snapshot = self._exchange.pull_state(peer, StateRequest(weights_only=True))
                state = unpack(bytes(snapshot.payload), own.state, weights_only=True)
            except (UnavailableError, ContractError) as error:
                self._reporter.event(
                    EventReason.REPLICA_MISSING, f"worker {peer}: {error}", warning=True
                )
                continue
            replicas.append(CollectedReplica(peer, state, snapshot.samples, snapshot.iteration))
        self._report_unlinked()
        return sorted(replicas, key=lambda replica: replica.rank)

    def _report_unlinked(self) -> None:
        here = {*self._inbox.linked, self._rank}
        if unlinked := sorted({worker.rank for worker in self._job.workers()} - here):
            message = f"worker{'s' * (len(unlinked) > 1)} {', '.join(map(str, unlinked))}: no link"
            self._reporter.event(EventReason.REPLICA_MISSING, message, warning=True)

    def _save_model(
        self, replicas: list[CollectedReplica], results_dir: Path, stop_reason: str
    ) -> bool:
        """Save the site's model. Return False if the saved one holds more replicas.

        That happens if others of the site ended before this worker became its lead.
        """
        site = self._job.worker(self._rank).site
        if len(replicas) < len(ranks_in_saved_model(results_dir, site, since_s=self._since_s)):
            message = f"worker {self._rank}: the site's saved model has more replicas and is kept"
            self._reporter.event(EventReason.REPLICA_MISSING, message, warning=True)
            return False
        about, state = choose_model(
            self._job, replicas, accuracy_of=self._accuracy_of, stop_reason=stop_reason
        )
        folder = save_site_model(about, state, save=self._save, results_dir=results_dir, site=site)
        self._reporter.event(
            EventReason.MODEL_SAVED,
            str(about),
            iteration=max(replica.iteration for replica in replicas),
        )
        self._on_saved(folder)
        return True


def ranks_in_saved_model(results_dir: Path, site: str, *, since_s: float) -> set[int]:
    """Ranks in a site's model saved since that Unix time; empty if there is none."""
    path = results_dir / "models" / site / "model.json"
    try:
        about = json.loads(path.read_text("utf-8")) if path.stat().st_mtime > since_s else {}
    except (OSError, ValueError):
        return set()
    is_final = about.get("stop_reason") not in (None, STILL_TRAINING)
    return set(about["ranks"]) if is_final else set()


def choose_model(
    job: Job,
    replicas: list[CollectedReplica],
    *,
    accuracy_of: Callable[[TrainingState], float],
    stop_reason: str,
) -> tuple[ModelSummary, TrainingState]:
    """Return the better of the average and the best replica, with its description."""
    averaged = average(replicas)
    accuracies = {replica.rank: accuracy_of(replica.state) for replica in replicas}
    averaged_accuracy = accuracy_of(averaged)
    best = max(replicas, key=lambda replica: (accuracies[replica.rank], -replica.rank))
    is_averaged = len(replicas) > 1 and averaged_accuracy >= accuracies[best.rank]
    about = ModelSummary(
        model="averaged" if is_averaged else f"replica {best.rank}",
        accuracy=max(averaged_accuracy, accuracies[best.rank]),
        averaged_accuracy=averaged_accuracy,
        best_replica=best.rank,
        best_replica_accuracy=accuracies[best.rank],
        mean_replica_accuracy=float(np.mean(list(accuracies.values()))),
        ranks=tuple(replica.rank for replica in replicas),
        sites=tuple(sorted({job.worker(replica.rank).site for replica in replicas})),
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


def announce_departure(
    exchange: PeerExchange, inbox: EventInbox, reason: str, iteration: int
) -> None:
    """Announce to all peers that this worker was asked to end, and let the message drain."""
    for peer in sorted(inbox.linked):
        exchange.send(peer, stop_message(reason, iteration, StopKind.LEAVING))
    end_s = time.monotonic() + LEAVE_WITHIN_S
    is_quiet = False
    while not is_quiet and time.monotonic() < end_s:
        time.sleep(LEAVE_SLICE_S)  # the exchange sends in its own thread
        is_quiet = not any(
            state.connected and (state.queued_bytes or state.unacknowledged_bytes)
            for state in exchange.link_counters().values()
        )


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


def _weighted(
    shares: list[float], vectors: list[np.ndarray[tuple[int], np.dtype[np.float32]]]
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    total = np.zeros(vectors[0].shape, dtype=np.float64)
    for share, vector in zip(shares, vectors, strict=True):
        total += share * vector
    return total.astype(np.float32)
