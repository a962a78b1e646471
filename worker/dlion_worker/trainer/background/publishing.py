"""Publishes a site's model while training continues (`stop.continuous`).

At every checkpoint interval, a site's lead pulls its peers' weights in a separate thread and
averages them. It evaluates the average and its own replica on held-out samples, and writes the
better one. The training thread waits only while weights are copied. Called by `worker`; `shutdown`
saves the final model.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dlion_api.atomic_file import write_atomically
from dlion_api.errors import ContractError, ProgramError, UnavailableError
from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_core.links.events import StateRequest, StateSnapshot
from dlion_worker.trainer.background.dataset_watcher import EventSink
from dlion_worker.training.replica import LocalReplica
from dlion_worker.training.site_model import (
    STILL_TRAINING,
    CollectedReplica,
    ModelSummary,
    average,
    site_leads,
)
from dlion_worker.training.snapshot import TrainingState, storage_error_message, unpack

_LOG = logging.getLogger(__name__)

CLOSE_WITHIN_S = 0.5


class _ClosedError(Exception):
    """The run is over; abandon the work in progress."""


class ReplicaSource(Protocol):
    """The part of the links that publishing needs (`PeerExchange`)."""

    def link_counters(self) -> Any:
        """States by peer, each with `connected`."""
        ...

    def pull_state(self, peer: Rank, wanted: StateRequest) -> StateSnapshot:
        """Pull that peer's state; blocks."""
        ...


class Publisher:
    """Publishes at every interval from `start` to `close`, where this worker leads its site."""

    def __init__(
        self,
        job: Job,
        rank: Rank,
        *,
        replica: LocalReplica,
        peers: ReplicaSource,
        held_out: tuple[NDArray[Any], NDArray[Any]],
        results_dir: Path,
        report: EventSink,
        on_saved: Callable[[Path], None] = lambda _folder: None,
    ) -> None:
        """`report` takes events and `on_saved` each model's folder, both in the publishing
        thread."""
        self._on_saved = on_saved
        self._job, self._rank = job, rank
        self._replica = replica
        self._peers = peers
        self._x, self._y = _evaluation_subset(held_out, job)
        site = job.worker(rank).site
        self._folder = results_dir / "models" / str(site)
        self._report = report
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def start(self) -> None:
        """Publish from now on, first after one interval."""
        self._thread.start()

    def close(self) -> None:
        """Stop publishing; nothing is written after this returns."""
        self._ended.set()
        with self._writing:
            pass
        if self._thread.is_alive():
            self._thread.join(CLOSE_WITHIN_S)

    def publish(self) -> None:
        """Publish now, if this worker leads its site; report failures."""
        connected = {peer for peer, s in self._peers.link_counters().items() if s.connected}
        if self._rank not in site_leads(self._job, {*connected, self._rank}):
            return
        try:
            self._publish(self._gather(sorted(connected)))
        except _ClosedError:
            return
        except OSError as error:
            self._failed(f"{storage_error_message(error)}; the previous model is kept")
        except ProgramError as error:
            self._failed(str(error))

    def _run(self) -> None:
        every_s = self._job.spec.checkpoint.every_seconds
        while not self._ended.wait(every_s):
            self.publish()

    def _gather(self, peers: list[Rank]) -> list[CollectedReplica]:
        """Return this replica, then those of the reachable peers."""
        state = self._replica.state()
        replicas = [
            CollectedReplica(self._rank, state, self._replica.samples, self._replica.iteration)
        ]
        for peer in peers:
            self._check_open()
            try:
                snapshot = self._peers.pull_state(peer, StateRequest(weights_only=True))
                theirs = unpack(bytes(snapshot.payload), state, weights_only=True)
            except (UnavailableError, ContractError) as error:
                _LOG.warning("published without worker %d: %s", peer, error)
                continue
            replicas.append(CollectedReplica(peer, theirs, snapshot.samples, snapshot.iteration))
        return replicas

    def _publish(self, replicas: list[CollectedReplica]) -> None:
        own, averaged = replicas[0], average(replicas)
        own_accuracy, averaged_accuracy = self._accuracy(own.state), self._accuracy(averaged)
        is_alone = len(replicas) == 1  # otherwise some replicas were not evaluated
        is_averaged = not is_alone and averaged_accuracy >= own_accuracy
        ranks = tuple(sorted(replica.rank for replica in replicas))
        about = ModelSummary(
            model="averaged" if is_averaged else f"replica {own.rank}",
            accuracy=max(own_accuracy, averaged_accuracy),
            averaged_accuracy=averaged_accuracy,
            best_replica=own.rank if is_alone else None,
            best_replica_accuracy=own_accuracy if is_alone else None,
            mean_replica_accuracy=own_accuracy if is_alone else None,
            ranks=ranks,
            sites=tuple(sorted({str(self._job.worker(rank).site) for rank in ranks})),
            samples=sum(replica.samples for replica in replicas),
            stop_reason=STILL_TRAINING,
        )
        self._write(averaged if is_averaged else own.state, about)
        self._report(
            EventReason.MODEL_PUBLISHED,
            f"{about.model} of workers {', '.join(map(str, ranks))}: accuracy "
            f"{about.accuracy:.4f} on {len(self._y)} held-out samples",
        )

    def _write(self, state: TrainingState, about: ModelSummary) -> None:
        """Replace each file atomically, the model first."""
        snapshot = self._replica.snapshot_of(state)
        with self._writing:
            self._check_open()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._replica.model.save_keras(self._folder / "model.keras", snapshot=snapshot)
            text = json.dumps(asdict(about), indent=2) + "\n"
            write_atomically(self._folder / "model.json", text.encode(), mode=0o644)
        self._on_saved(self._folder)

    def _accuracy(self, state: TrainingState) -> float:
        evaluation = self._replica.model.evaluate(
            self._x,
            self._y,
            snapshot=self._replica.snapshot_of(state),
            batch_size=64,
            between_batches=self._check_open,
        )
        return evaluation.accuracy

    def _check_open(self) -> None:
        if self._ended.is_set():
            raise _ClosedError

    def _failed(self, message: str) -> None:
        self._report(EventReason.PUBLISH_FAILED, message, warning=True)


def _evaluation_subset(
    held_out: tuple[NDArray[Any], NDArray[Any]], job: Job
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Draw at max_samples `evaluation.maxSamples` held-out samples from the seed."""
    x, y = held_out
    max_samples = job.spec.trainer.evaluation.max_samples
    if len(x) <= max_samples:
        return x, y
    chosen = np.sort(
        np.random.default_rng([job.spec.trainer.seed, 7]).permutation(len(x))[:max_samples]
    )
    return x[chosen], y[chosen]
