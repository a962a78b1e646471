"""What a worker puts by: checkpoints on its own disk and, where there is one, with a keeper.

Owns where the checkpoint lies, what is said of saving, and the errands to the keeper
(`dlion_worker.keeping`). Called by `worker`, between steps and at the end; what a checkpoint holds
is `checkpointing`'s. Nothing here waits for the keeper while training goes on.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from pathlib import Path

from dlion_api.errors import DataError, DLionError, UnavailableError
from dlion_api.names import JobKey, WorkerIdentity
from dlion_api.reasons import EventReason
from dlion_api.worker_config import WorkerConfig
from dlion_worker.coordination.backoff import Backoff
from dlion_worker.credentials import WorkerCredentials
from dlion_worker.exchange import StateSnapshot
from dlion_worker.keeping import Courier, KeeperClient
from dlion_worker.keeping.courier import Outcome
from dlion_worker.keeping.places import about_path, checkpoint_path, model_path
from dlion_worker.trainer.checkpointing import Checkpointer
from dlion_worker.trainer.reporting import Reporter
from dlion_worker.trainer.snapshot import DamagedCheckpointError, set_aside, storage_words
from dlion_worker.trainer.stopping import JobProgress

_LOG = logging.getLogger(__name__)

CHECKPOINT_FILE = "checkpoint.npz"
LAST_CHECKPOINT_WITHIN_S = 20.0
"""A pod that is told to end has 30 s; the step under way and the rest of the end need some."""
MODEL_WITHIN_S = 300.0
"""The run is over and the model is what it was for: a slow disk may take its time."""


class ModelLostError(DLionError):
    """The run is over, and the site's model goes with its worker: the keeper did not get it."""


class Saving:
    """One incarnation's checkpoints and its site's model."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        checkpointer: Callable[[Path], Checkpointer],
        progress: JobProgress,
        reporter: Reporter,
        model_within_s: float = MODEL_WITHIN_S,
    ) -> None:
        """`checkpointer` makes the one for that file; `model_within_s`: what the keeper has to
        take the site's model in."""
        self._path = Path(config.state_dir) / CHECKPOINT_FILE
        self._keeper_address = config.keeper_address
        self._resume = config.resume
        self._progress = progress
        self._model_within_s = model_within_s
        self._reporter = reporter
        self._courier: Courier | None = None
        self._model_is_lost = False
        self.checkpointer = checkpointer(self._path)

    def open(
        self,
        job: JobKey,
        worker: WorkerIdentity,
        incarnation: int,
        credentials: WorkerCredentials,
    ) -> None:
        """Makes the way to the keeper, and fetches this worker's checkpoint where its own disk has
        none. Waits for a keeper that is away: without it a run that was suspended would begin
        anew. A signal breaks the waiting off.

        Raises: ContractError where the keeper refuses this worker; OSError.
        """
        if not self._keeper_address:
            return
        client = KeeperClient(
            self._keeper_address,
            job=job,
            worker=worker,
            incarnation=incarnation,
            credentials=credentials,
        )
        try:
            if not self._path.exists():
                self._resume = self._fetched(client, checkpoint_path(worker.rank)) or self._resume
        except BaseException:
            client.close()
            raise
        self._worker = worker
        self._courier = Courier(client, self._told)

    def take_up(self, *, came_back: bool) -> bool:
        """Goes on from what this worker has saved of itself: to resume, or what a restart has of
        its own. Whether there was anything. What cannot be read is set aside: a peer's state will
        do. Raises: DataError where it is another job's."""
        if not (self._resume or came_back):
            return False
        try:
            if not self.checkpointer.load():
                return False
        except DamagedCheckpointError as error:
            self._set_aside(error)
            return False
        except DataError as error:
            if not came_back:
                raise
            _LOG.warning("going on without a checkpoint: %s", error)  # a peer's state will do
            return False
        self._event(EventReason.RESUMED, "goes on from its checkpoint")
        return True

    def _set_aside(self, error: DamagedCheckpointError) -> None:
        try:
            where = f"it is set aside as {set_aside(self._path).name}"
        except OSError as why:
            where = f"it cannot be set aside ({why})"
        words = f"{error}: {where}, and this worker goes on from a peer's state"
        _LOG.warning("%s", words)
        self._event(EventReason.CHECKPOINT_DAMAGED, words, warning=True)

    def overtake(self, snapshot: StateSnapshot, *, batch_samples: int) -> None:
        """Goes on from a peer's state, with this worker's own place in its data. `batch_samples`:
        of all workers in an iteration. Raises: ContractError where it is another model's."""
        self.checkpointer.overtake(snapshot)
        done = self._progress
        done.job_samples = max(done.job_samples, snapshot.iteration * batch_samples)
        self._event(EventReason.WORKER_REJOINED, "took over a peer's state")

    def save(self) -> None:
        """A full disk does not end training: there may be room at the next time."""
        try:
            self.checkpointer.save()
        except OSError as error:
            words = f"{storage_words(error)}; the last checkpoint stands"
            self._event(EventReason.CHECKPOINT_FAILED, words, warning=True)
            return
        self._event(EventReason.CHECKPOINT_SAVED, "saved")
        self._bring_checkpoint()

    def save_last(self) -> None:
        """The one that this worker, told to end, leaves behind. Raises: OSError."""
        self.checkpointer.save()
        self._bring_checkpoint()

    def wait_for_last(self) -> None:
        """Returns when the keeper has it, or cannot be waited for any longer."""
        if self._courier is not None:
            path = checkpoint_path(self._worker.rank)
            if not self._courier.wait([path], within_s=LAST_CHECKPOINT_WITHIN_S):
                self._late(path, LAST_CHECKPOINT_WITHIN_S)

    def bring_model(self, folder: Path) -> None:
        """The site's model, which lies in that folder, is to go to the keeper; returns at once."""
        if self._courier is not None:
            for path in self._model_paths():
                source = folder / path.rpartition("/")[2]
                self._courier.bring(path, source, iteration=self._progress.iteration)

    def keep_model(self, folder: Path) -> None:
        """The same at the end of the run: returns when the keeper has it, or is given up."""
        self.bring_model(folder)
        if self._courier is not None:
            paths = self._model_paths()
            in_time = self._courier.wait(paths, within_s=self._model_within_s)
            if not in_time:
                self._late(" and ".join(paths), self._model_within_s)
            self._model_is_lost = not in_time or self._courier.refused(paths)

    def check_model(self) -> None:
        """Raises: ModelLostError where this worker had the site's model to bring, and could not."""
        if self._model_is_lost:
            raise ModelLostError("the site's model is lost: the keeper did not get it")

    def close(self) -> None:
        """Breaks off what is under way."""
        if self._courier is not None:
            self._courier.close()

    def _fetched(self, client: KeeperClient, path: str) -> bool:
        backoff, has_told = Backoff(random.random), False
        while True:
            try:
                found = client.get(path, self._path)
            except UnavailableError as error:
                if not has_told:
                    words = f"waits for its checkpoint: {error}"
                    _LOG.warning("%s", words)
                    self._event(EventReason.KEEPER_AWAY, words, warning=True)
                    has_told = True
                time.sleep(backoff.next_s())
            else:
                _LOG.info("the keeper has %s checkpoint of this worker", "a" if found else "no")
                return found

    def _bring_checkpoint(self) -> None:
        if self._courier is not None:
            path = checkpoint_path(self._worker.rank)
            self._courier.bring(path, self._path, iteration=self._progress.iteration)

    def _model_paths(self) -> tuple[str, str]:
        """What the model is comes last: who reads it finds the model there."""
        return model_path(self._worker.site), about_path(self._worker.site)

    def _told(self, outcome: Outcome) -> None:
        """In the courier's thread."""
        at = outcome.iteration
        if outcome.error:
            reason = EventReason.KEEP_FAILED if outcome.final else EventReason.KEEPER_AWAY
            words = outcome.error + ("" if outcome.final else "; tried again")
            self._reporter.event(reason, words, iteration=at, warning=True)
        elif outcome.path == checkpoint_path(self._worker.rank):
            words = f"the keeper has the checkpoint of iteration {at}"
            self._reporter.event(EventReason.CHECKPOINT_KEPT, words, iteration=at)
        elif outcome.path == about_path(self._worker.site):
            words = f"the keeper has the model of {self._worker.site}"
            self._reporter.event(EventReason.MODEL_KEPT, words, iteration=at)

    def _late(self, what: str, within_s: float) -> None:
        words = f"{what}: not with the keeper within {within_s:g} s; it is lost with this worker"
        self._event(EventReason.KEEP_FAILED, words, warning=True)

    def _event(self, reason: EventReason, words: str, *, warning: bool = False) -> None:
        self._reporter.event(reason, words, iteration=self._progress.iteration, warning=warning)
