"""How a run ends for one worker: its last state offered, its site's model averaged and saved.

The first worker to meet a stop condition has announced it; all have finished their iteration. The
lowest living rank of each site (its *lead*) pulls the weights of everybody it reaches, averages
them by samples, evaluates the average, the best and the mean replica, and saves the best of the
first two; the saved model says which it is, and which sites were reached. The others stay until
the leads that they see have saved; where one is lost before, the next rank of its site leads.
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
from dlion_worker.exchange import Exchange, StateWanted
from dlion_worker.policies.interface import Message
from dlion_worker.trainer.inbox import Farewell, Inbox, farewell
from dlion_worker.trainer.reporting import Reporter
from dlion_worker.trainer.snapshot import WorkerState, unpack
from dlion_worker.trainer.start_up import process_age_s

_LOG = logging.getLogger(__name__)

SLICE_S = 0.1
LEAVE_SLICE_S = 0.05
STILL_TRAINING = "still training"
"""The reason to stop that `model.json` gives of a model published meanwhile."""
LEAVE_WITHIN_S = 0.5
"""A worker that was told to end does not wait longer for slow links."""


@dataclass(frozen=True)
class Replica:
    """One worker's weights at the end of the run."""

    rank: Rank
    state: WorkerState
    samples: int
    iteration: int


@dataclass(frozen=True)
class SavedModel:
    """What `model.json` says of the model saved beside it; None: not every replica was judged."""

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


class Finale:
    """The end of the run for one worker."""

    def __init__(
        self,
        *,
        job: Job,
        rank: Rank,
        exchange: Exchange,
        inbox: Inbox,
        reporter: Reporter,
        accuracy_of: Callable[[WorkerState], float],
        save: Callable[[Path, WorkerState], None],
        interrupted: Callable[[], bool],
        missing: Callable[[set[Rank]], set[Rank]],
        kept: Callable[[Path], None] = lambda _folder: None,
    ) -> None:
        """`missing(linked)`: who is not linked, and is to be by the end. `kept(folder)`: the
        site's model lies there; returns when it is safe."""
        self._kept = kept
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
        """A model that is older is an earlier run's: in its folder this one goes on."""

    def run(self, own: Replica, *, results_dir: Path, stop_reason: str) -> tuple[Rank, ...]:
        """Returns when this worker is no longer needed; a lead that is lost is replaced. The
        replicas in the model that it has saved; none: it has saved none.

        Who has saved leaves last: whoever left before has heard of it.
        """
        inbox, held = self._inbox, tuple[Rank, ...]()
        while not self._interrupted():
            missing = self._missing(inbox.linked)
            alive = {*inbox.linked, *missing, self._rank}
            leads = site_leads(self._job, alive, saved_by=inbox.saved)
            if held:
                if inbox.linked <= inbox.saved:
                    break
            elif self._rank in leads:
                if inbox.linked <= inbox.stopped and not missing:
                    replicas = self._gather(own)
                    if not self._keep(replicas, results_dir, stop_reason):
                        break
                    self._tell(farewell(stop_reason, own.iteration, Farewell.SAVED))
                    held = tuple(replica.rank for replica in replicas)
                    continue
            elif not leads:
                break
            inbox.wait(SLICE_S)
        return held

    def _tell(self, message: Message) -> None:
        self._inbox.farewell = message
        for peer in sorted(self._inbox.linked):
            self._exchange.send(peer, message)

    def _gather(self, own: Replica) -> list[Replica]:
        replicas = [own]
        for peer in sorted(self._inbox.linked):
            try:
                snapshot = self._exchange.pull_state(peer, StateWanted(weights_only=True))
                state = unpack(bytes(snapshot.payload), own.state, weights_only=True)
            except (UnavailableError, ContractError) as error:
                self._reporter.event(
                    EventReason.REPLICA_MISSING, f"worker {peer}: {error}", warning=True
                )
                continue
            replicas.append(Replica(peer, state, snapshot.samples, snapshot.iteration))
        self._name_unlinked()
        return sorted(replicas, key=lambda replica: replica.rank)

    def _name_unlinked(self) -> None:
        here = {*self._inbox.linked, self._rank}
        if gone := sorted({worker.rank for worker in self._job.workers()} - here):
            words = f"worker{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}: no link"
            self._reporter.event(EventReason.REPLICA_MISSING, words, warning=True)

    def _keep(self, replicas: list[Replica], results_dir: Path, stop_reason: str) -> bool:
        """Whether it has saved them: not where its site's model holds more already, as others of
        the site had ended before this worker came to it."""
        site = self._job.worker(self._rank).site
        if len(replicas) < len(saved_ranks(results_dir, site, since_s=self._since_s)):
            words = (
                f"worker {self._rank}: its site's model had been saved, of more replicas; it stays"
            )
            self._reporter.event(EventReason.REPLICA_MISSING, words, warning=True)
            return False
        about, state = choose_model(
            self._job, replicas, accuracy_of=self._accuracy_of, stop_reason=stop_reason
        )
        folder = keep_model(about, state, save=self._save, results_dir=results_dir, site=site)
        self._reporter.event(
            EventReason.MODEL_SAVED,
            str(about),
            iteration=max(replica.iteration for replica in replicas),
        )
        self._kept(folder)
        return True


def saved_ranks(results_dir: Path, site: str, *, since_s: float) -> set[int]:
    """Replicas in the model that a site has saved since that moment (Unix time); none: it has
    not."""
    path = results_dir / "models" / site / "model.json"
    try:
        about = json.loads(path.read_text("utf-8")) if path.stat().st_mtime > since_s else {}
    except (OSError, ValueError):
        return set()
    is_final = about.get("stop_reason") not in (None, STILL_TRAINING)
    return set(about["ranks"]) if is_final else set()


def choose_model(
    job: Job,
    replicas: list[Replica],
    *,
    accuracy_of: Callable[[WorkerState], float],
    stop_reason: str,
) -> tuple[SavedModel, WorkerState]:
    """The average of the replicas or the best of them, whichever is better, and what it is."""
    averaged = average(replicas)
    accuracies = {replica.rank: accuracy_of(replica.state) for replica in replicas}
    averaged_accuracy = accuracy_of(averaged)
    best = max(replicas, key=lambda replica: (accuracies[replica.rank], -replica.rank))
    is_averaged = len(replicas) > 1 and averaged_accuracy >= accuracies[best.rank]
    about = SavedModel(
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


def keep_model(
    about: SavedModel,
    state: WorkerState,
    *,
    save: Callable[[Path, WorkerState], None],
    results_dir: Path,
    site: str,
) -> Path:
    """Saves a site's model and what it is; the folder. Raises: OSError."""
    folder = results_dir / "models" / site
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "model.keras", state)
    text = json.dumps(asdict(about), indent=2) + "\n"
    write_atomically(folder / "model.json", text.encode(), mode=0o644)
    return folder


def take_leave(exchange: Exchange, inbox: Inbox, reason: str, iteration: int) -> None:
    """Tells the others that this worker was told to end, and waits a moment: they are to hear."""
    for peer in sorted(inbox.linked):
        exchange.send(peer, farewell(reason, iteration, Farewell.LEAVING))
    end_s = time.monotonic() + LEAVE_WITHIN_S
    is_quiet = False
    while not is_quiet and time.monotonic() < end_s:
        time.sleep(LEAVE_SLICE_S)  # the exchange takes messages up in a thread of its own
        is_quiet = not any(
            state.connected and (state.queued_bytes or state.unacknowledged_bytes)
            for state in exchange.link_states().values()
        )


def site_leads(job: Job, alive: set[Rank], *, saved_by: Collection[Rank] = ()) -> set[Rank]:
    """The lowest living rank of every site whose model has not been saved yet."""
    done = {job.worker(rank).site for rank in saved_by}
    leads: dict[str, Rank] = {}
    for worker in map(job.worker, sorted(alive)):
        if worker.site not in done:
            leads.setdefault(worker.site, worker.rank)
    return set(leads.values())


def average(replicas: list[Replica]) -> WorkerState:
    """The mean of the replicas' weights and model states, weighted by samples."""
    total = sum(replica.samples for replica in replicas)
    shares = [replica.samples / total if total else 1 / len(replicas) for replica in replicas]
    return WorkerState(
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
