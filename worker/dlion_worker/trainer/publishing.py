"""Models that a job publishes while it trains on (`stop.continuous`).

Owns the thread in which a site's lead worker pulls its peers' weights, averages them, judges the
average and its own replica on held-out samples and writes the better one, at every checkpoint
interval. Nothing of it is on the training thread: the replica's lock is held for a copy of the
weights alone. Called by `worker`. The model at the end of a run is `finishing`'s.
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
from dlion_worker.exchange import StateSnapshot, StateWanted
from dlion_worker.trainer.finishing import (
    STILL_TRAINING,
    Replica,
    SavedModel,
    average,
    site_leads,
)
from dlion_worker.trainer.growing import Report
from dlion_worker.trainer.replica import LocalReplica
from dlion_worker.trainer.snapshot import WorkerState, storage_words, unpack

_LOG = logging.getLogger(__name__)

CLOSE_WITHIN_S = 0.5


class _ClosedError(Exception):
    """The run is over: what is under way is left."""


class Peers(Protocol):
    """The links, as far as publishing needs them (`Exchange`)."""

    def link_states(self) -> Any:
        """By peer; each says whether it is `connected`."""
        ...

    def pull_state(self, peer: Rank, wanted: StateWanted) -> StateSnapshot:
        """That peer's state; blocks."""
        ...


class Publisher:
    """Publishes at every interval, from `start` to `close`, where this worker leads its site."""

    def __init__(
        self,
        job: Job,
        rank: Rank,
        *,
        replica: LocalReplica,
        peers: Peers,
        held_out: tuple[NDArray[Any], NDArray[Any]],
        results_dir: Path,
        report: Report,
        kept: Callable[[Path], None] = lambda _folder: None,
    ) -> None:
        """`report` takes events, in the thread; `kept` hears of each model's folder there."""
        self._kept = kept
        self._job, self._rank = job, rank
        self._replica = replica
        self._peers = peers
        self._x, self._y = _judged(held_out, job)
        site = job.worker(rank).site
        self._folder = results_dir / "models" / str(site)
        self._report = report
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def start(self) -> None:
        """Publishes from now on; the first model is there after one interval."""
        self._thread.start()

    def close(self) -> None:
        """Nothing is written any more when this returns."""
        self._ended.set()
        with self._writing:
            pass
        if self._thread.is_alive():
            self._thread.join(CLOSE_WITHIN_S)

    def publish(self) -> None:
        """Publishes now, if this worker leads its site; what goes wrong is reported."""
        connected = {peer for peer, s in self._peers.link_states().items() if s.connected}
        if self._rank not in site_leads(self._job, {*connected, self._rank}):
            return
        try:
            self._publish(self._gather(sorted(connected)))
        except _ClosedError:
            return
        except OSError as error:
            self._failed(f"{storage_words(error)}; the last model stands")
        except ProgramError as error:
            self._failed(str(error))

    def _run(self) -> None:
        every_s = self._job.spec.checkpoint.every_seconds
        while not self._ended.wait(every_s):
            self.publish()

    def _gather(self, peers: list[Rank]) -> list[Replica]:
        """This replica first, then those of the peers that can be reached."""
        state = self._replica.state()
        replicas = [Replica(self._rank, state, self._replica.samples, self._replica.iteration)]
        for peer in peers:
            self._check_open()
            try:
                snapshot = self._peers.pull_state(peer, StateWanted(weights_only=True))
                theirs = unpack(bytes(snapshot.payload), state, weights_only=True)
            except (UnavailableError, ContractError) as error:
                _LOG.warning("published without worker %d: %s", peer, error)
                continue
            replicas.append(Replica(peer, theirs, snapshot.samples, snapshot.iteration))
        return replicas

    def _publish(self, replicas: list[Replica]) -> None:
        own, averaged = replicas[0], average(replicas)
        own_accuracy, averaged_accuracy = self._accuracy(own.state), self._accuracy(averaged)
        is_alone = len(replicas) == 1  # else there are replicas that nobody has judged
        is_averaged = not is_alone and averaged_accuracy >= own_accuracy
        ranks = tuple(sorted(replica.rank for replica in replicas))
        about = SavedModel(
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

    def _write(self, state: WorkerState, about: SavedModel) -> None:
        """Each file is replaced whole, the model first."""
        snapshot = self._replica.snapshot_of(state)
        with self._writing:
            self._check_open()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._replica.model.save_keras(self._folder / "model.keras", snapshot=snapshot)
            text = json.dumps(asdict(about), indent=2) + "\n"
            write_atomically(self._folder / "model.json", text.encode(), mode=0o644)
        self._kept(self._folder)

    def _accuracy(self, state: WorkerState) -> float:
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

    def _failed(self, words: str) -> None:
        self._report(EventReason.PUBLISH_FAILED, words, warning=True)


def _judged(
    held_out: tuple[NDArray[Any], NDArray[Any]], job: Job
) -> tuple[NDArray[Any], NDArray[Any]]:
    """At most `evaluation.maxSamples` of the held-out samples, drawn from the seed."""
    x, y = held_out
    most = job.spec.trainer.evaluation.max_samples
    if len(x) <= most:
        return x, y
    chosen = np.sort(np.random.default_rng([job.spec.trainer.seed, 7]).permutation(len(x))[:most])
    return x[chosen], y[chosen]
