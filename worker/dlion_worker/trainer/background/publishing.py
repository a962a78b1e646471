"""Publishes a site's model while training continues (`stop.continuous`).

At every checkpoint interval, a site's lead pulls its peers' weights in a separate thread and
averages them. It evaluates the average and its own replica on held-out samples, and writes the
better one. The training thread waits only while weights are copied. Called by `worker`; `shutdown`
saves the final model.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dlion_api.errors import ContractError, ProgramError, UnavailableError
from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_core.links.events import StateRequest
from dlion_core.policies.claims.samples import max_run_samples
from dlion_worker.trainer.background.dataset_watcher import EventSink
from dlion_worker.training.evaluation import evaluated_subset
from dlion_worker.training.replica import LocalReplica
from dlion_worker.training.site_model import (
    STILL_TRAINING,
    CollectedReplica,
    SavedModel,
    choose_model,
    save_site_model,
    site_leads,
)
from dlion_worker.training.snapshot import TrainingState, storage_error_message, unpack
from dlion_worker.transport import PeerExchange

_LOG = logging.getLogger(__name__)

CLOSE_WITHIN_S = 0.5


class _ClosedError(Exception):
    """The run is over; abandon the work in progress."""


class Publisher:
    """Publishes at every interval from `start` to `close`, where this worker leads its site."""

    def __init__(
        self,
        job: Job,
        rank: Rank,
        *,
        replica: LocalReplica,
        exchange: PeerExchange,
        reachable: Callable[[], set[Rank]],
        held_out: tuple[NDArray[Any], NDArray[Any]],
        results_dir: Path,
        report: EventSink,
        on_saved: Callable[[SavedModel], None] = lambda _saved: None,
    ) -> None:
        """`reachable` returns the peers to pull from. `report` takes events and `on_saved` each
        model, both in the publishing thread."""
        self._on_saved = on_saved
        self._job, self._rank = job, rank
        self._replica = replica
        self._exchange, self._reachable = exchange, reachable
        subset = evaluated_subset(
            len(held_out[0]),
            seed=job.spec.trainer.seed,
            max_samples=job.spec.trainer.evaluation.max_samples,
        )
        self._x, self._y = (part[subset] for part in held_out)
        self._results_dir = results_dir
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
        peers = self._reachable()
        if self._rank not in site_leads(self._job, {*peers, self._rank}):
            return
        try:
            self._publish(self._gather(sorted(peers)))
        except _ClosedError:
            return
        except UnavailableError as error:
            _LOG.warning("not published: %s", error)
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
        state, iteration = self._replica.state(), self._replica.iteration
        replicas = [CollectedReplica(self._rank, state, self._replica.samples, iteration)]
        most = max_run_samples(self._job.spec, iteration)  # of all samples of this run, at most
        for peer in peers:
            self._check_open()
            try:
                snapshot = self._exchange.pull_state(peer, StateRequest(weights_only=True))
                theirs = unpack(bytes(snapshot.payload), state, weights_only=True)
            except (UnavailableError, ContractError) as error:
                _LOG.warning("published without worker %d: %s", peer, error)
                continue
            samples = snapshot.samples
            if samples > most and self._job.spec.exchange.trains(self._rank):
                _LOG.warning("worker %d claims %d samples; counted as %d", peer, samples, most)
                samples = most
            replicas.append(CollectedReplica(peer, theirs, samples, snapshot.iteration))
        return replicas

    def _publish(self, replicas: list[CollectedReplica]) -> None:
        about, state = choose_model(
            self._job,
            replicas,
            accuracy_of=self._accuracy,
            stop_reason=STILL_TRAINING,
            candidates=replicas[:1],
            parallel=1,  # training continues
        )
        site = self._job.worker(self._rank).site
        save, folder = self._replica.save, self._results_dir
        with self._writing:
            self._check_open()
            folder = save_site_model(about, state, save=save, results_dir=folder, site=site)
            # Before the lock is free: else the statement could be about the final model's file.
            self._on_saved(SavedModel(folder, about, tuple(replicas)))
        self._report(
            EventReason.MODEL_PUBLISHED,
            f"{about.model} of workers {', '.join(map(str, about.ranks))}: accuracy "
            f"{about.accuracy:.4f} on {len(self._y)} held-out samples",
        )

    def _accuracy(self, state: TrainingState) -> float:
        evaluation = self._replica.model.evaluate(
            self._x,
            self._y,
            snapshot=self._replica.snapshot_of(state),
            between_batches=self._check_open,
        )
        return evaluation.accuracy

    def _check_open(self) -> None:
        if self._ended.is_set():
            raise _ClosedError

    def _failed(self, message: str) -> None:
        self._report(EventReason.PUBLISH_FAILED, message, warning=True)
