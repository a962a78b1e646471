"""Saves a worker's checkpoints and its site's model, on disk and at the keeper.

Owns the checkpoint's path, the events about saving and the uploads (`artifact_client`).
`worker` calls it between steps and at the end; `checkpointing` defines a checkpoint's content.
Uploads never block training.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from dlion_api.errors import DataError, DLionError, UnavailableError
from dlion_api.exit_codes import ExitCode
from dlion_api.names import JobKey, WorkerIdentity
from dlion_api.protocol.provenance import PROVENANCE_FILE
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.reasons import EventReason
from dlion_core.lifecycle.reporting import Reporter
from dlion_core.lifecycle.stopping import JobProgress
from dlion_core.links.events import StateSnapshot
from dlion_worker.artifact_client import ArtifactClient, UploadQueue
from dlion_worker.artifact_client.paths import (
    checkpoint_path,
    metadata_path,
    model_path,
    provenance_path,
)
from dlion_worker.artifact_client.upload_queue import UploadResult
from dlion_worker.coordination.backoff import Backoff
from dlion_worker.security.credentials import WorkerCredentials
from dlion_worker.training.checkpointing import Checkpointer
from dlion_worker.training.snapshot import (
    DamagedCheckpointError,
    UntrustedCheckpointError,
    set_aside,
    storage_error_message,
)

_LOG = logging.getLogger(__name__)

CHECKPOINT_FILE = "checkpoint.npz"
FINAL_UPLOAD_TIMEOUT_S = 20.0
"""A pod gets 30 s to end; the last step and the other shutdown work need some of it."""
MODEL_UPLOAD_TIMEOUT_S = 300.0
"""Generous, because the model is the run's result and the keeper's disk may be slow."""


class ModelLostError(DLionError):
    """The run is over, but the keeper did not receive the site's model."""

    exit_code = ExitCode.MODEL_LOST


CHECKPOINT_RETRY_S, MAX_CHECKPOINT_RETRY_S = 10.0, 300.0
"""First and longest delay after a checkpoint that could not be written: a full disk stays full."""


class StateSaver:
    """One incarnation's checkpoints and its site's model."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        checkpointer: Callable[[Path], Checkpointer],
        progress: JobProgress,
        reporter: Reporter,
        model_upload_timeout_s: float = MODEL_UPLOAD_TIMEOUT_S,
    ) -> None:
        """`checkpointer` makes the checkpointer for a file. `model_upload_timeout_s`: time limit
        for uploading the site's model."""
        self._path = Path(config.state_dir) / CHECKPOINT_FILE
        self._keeper_address = config.keeper_address
        self._resume = config.resume
        self._progress = progress
        self._model_within_s = model_upload_timeout_s
        self._reporter = reporter
        self._uploads: UploadQueue | None = None
        self._model_is_lost = False
        self._untrusted: UntrustedCheckpointError | None = None
        """Why this worker's checkpoint was refused; None once a peer's state was adopted."""
        self._is_wait_reported = False
        self._failed = Backoff(initial_s=CHECKPOINT_RETRY_S, max_s=MAX_CHECKPOINT_RETRY_S)
        self.checkpointer = checkpointer(self._path)

    def connect(
        self,
        job: JobKey,
        worker: WorkerIdentity,
        incarnation: int,
        credentials: WorkerCredentials,
    ) -> None:
        """Connect to the keeper, and download this worker's checkpoint if its disk has none.

        From then on checkpoints have MACs, if there is a key. Waits while the keeper is
        unavailable: otherwise a suspended run would start from scratch. A signal interrupts it.

        Raises: ContractError where the keeper rejects this worker; OSError.
        """
        self.checkpointer.key = credentials.checkpoint_key
        if not self._keeper_address:
            return
        client = ArtifactClient(
            self._keeper_address,
            job=job,
            worker=worker,
            incarnation=incarnation,
            credentials=credentials,
        )
        try:
            if not self._path.exists():
                self._resume = self._download(client, checkpoint_path(worker.rank)) or self._resume
        except BaseException:
            client.close()
            raise
        self._worker = worker
        self._uploads = UploadQueue(client, self._on_outcome)

    def resume(self, *, is_restart: bool) -> bool:
        """Restore this worker's checkpoint, to resume or after a restart. Return whether it did.

        An unreadable file is set aside, and a peer's state is used instead. Raises: DataError where
        the file belongs to another job.
        """
        if not (self._resume or is_restart):
            return False
        try:
            if not self.checkpointer.load():
                return False
        except DamagedCheckpointError as error:
            if isinstance(error, UntrustedCheckpointError):
                self._untrusted = error
            self._set_aside(error)
            return False
        except DataError as error:
            if not is_restart:
                raise
            _LOG.warning("continuing without a checkpoint: %s", error)  # a peer's state is used
            return False
        self._event(EventReason.RESUMED, "continues from its checkpoint")
        return True

    def _set_aside(self, error: DamagedCheckpointError) -> None:
        try:
            where = f"it is set aside as {set_aside(self._path).name}"
        except OSError as why:
            where = f"it cannot be set aside ({why})"
        message = f"{error}: {where}, and this worker continues from a peer's state if one has any"
        _LOG.warning("%s", message)
        self._event(EventReason.CHECKPOINT_DAMAGED, message, warning=True)

    def adopt(self, snapshot: StateSnapshot, *, batch_samples: int) -> None:
        """Adopt a peer's state, keeping this worker's own position in its data.

        `batch_samples`: samples of all workers per iteration. Raises: ContractError where the state
        is of another model.
        """
        self.checkpointer.adopt(snapshot)
        self._untrusted = None
        done = self._progress
        done.job_samples = max(done.job_samples, snapshot.iteration * batch_samples)
        self._event(EventReason.WORKER_REJOINED, "took over a peer's state")

    def may_keep_own(self) -> bool:
        """Whether the worker may begin with its own state. Otherwise report once what to do.

        With a new key of the authority all workers refuse their checkpoints at once, and none has a
        state. To train from the start would replace good checkpoints at the keeper.
        """
        if self._untrusted is not None and not self._is_wait_reported:
            self._is_wait_reported = True
            message = (
                "waits for a peer with a state, and does not train from the start, which would"
                " replace its checkpoint at the keeper: suspend the run, restore the key of the"
                " site's authority, and resume it; or start a run with another runId"
            )
            _LOG.warning("%s", message)
            self._event(EventReason.CHECKPOINT_DAMAGED, message, warning=True)
        return self._untrusted is None

    def check_start(self) -> None:
        """Check that the end of this worker does not replace a good checkpoint.

        Raises: DataError where its checkpoint was refused, and no peer gave a state until the run
        was over.
        """
        if self._untrusted is not None:
            raise DataError(f"no peer gave a state before the run was over: {self._untrusted}")

    def save(self) -> None:
        """Save a checkpoint. A full disk does not end training: a later attempt may succeed."""
        try:
            self.checkpointer.save()
        except OSError as error:
            retry_s = self._failed.next_s()
            self.checkpointer.retry_after(retry_s)
            message = (
                f"{storage_error_message(error)}; the previous checkpoint is kept, and the next"
                f" attempt follows in {retry_s:.0f} s"
            )
            self._event(EventReason.CHECKPOINT_FAILED, message, warning=True)
            return
        self._failed.reset()
        self._event(EventReason.CHECKPOINT_SAVED, "saved")
        self._upload_checkpoint()

    def save_final(self) -> None:
        """Save the last checkpoint of a worker that was asked to end. Raises: OSError."""
        self.checkpointer.save()
        self._upload_checkpoint()

    def wait_for_upload(self) -> None:
        """Wait until the keeper has the last checkpoint, or until the timeout."""
        if self._uploads is not None:
            path = checkpoint_path(self._worker.rank)
            if not self._uploads.wait([path], within_s=FINAL_UPLOAD_TIMEOUT_S):
                self._report_timeout(path, FINAL_UPLOAD_TIMEOUT_S)

    def upload_model(self, folder: Path) -> None:
        """Upload the site's model from that folder in the background."""
        if self._uploads is not None:
            at, paths = self._progress.iteration, self._model_paths()
            for path in paths:
                self._uploads.upload(path, folder / Path(path).name, iteration=at)
            if (statement := folder / PROVENANCE_FILE).exists():
                path = provenance_path(self._worker.site)
                self._uploads.upload(path, statement, iteration=at, after=paths)

    def upload_model_and_wait(self, folder: Path) -> None:
        """Upload the site's model and wait until the keeper has it, or until the timeout."""
        self.upload_model(folder)
        if self._uploads is not None:
            paths = self._model_paths()
            in_time = self._uploads.wait(paths, within_s=self._model_within_s)
            if not in_time:
                self._report_timeout(" and ".join(paths), self._model_within_s)
            self._model_is_lost = not in_time or self._uploads.is_refused(paths)
            if not self._model_is_lost:
                self._wait_for_statement(folder, self._uploads)

    def _wait_for_statement(self, folder: Path, uploads: UploadQueue) -> None:
        """Without its statement the model is not lost, but `dlion fetch` refuses it."""
        path = provenance_path(self._worker.site)
        if not uploads.wait([path], within_s=FINAL_UPLOAD_TIMEOUT_S):
            self._report_timeout(path, FINAL_UPLOAD_TIMEOUT_S)
        elif uploads.is_refused([path]) or not (folder / PROVENANCE_FILE).exists():
            message = f"the keeper has the model of {self._worker.site} without a signed statement"
            advice = "`dlion fetch` refuses it without --allow-unsigned"
            self._event(EventReason.KEEP_FAILED, f"{message}: {advice}", warning=True)

    def check_model_uploaded(self) -> None:
        """Raises: ModelLostError where this worker could not upload the site's model."""
        if self._model_is_lost:
            raise ModelLostError("the site's model is lost: the keeper did not get it")

    def close(self) -> None:
        """Abort uploads in progress."""
        if self._uploads is not None:
            self._uploads.close()

    def _download(self, client: ArtifactClient, path: str) -> bool:
        backoff, is_reported = Backoff(), False
        while True:
            try:
                has_checkpoint = client.get(path, self._path)
            except UnavailableError as error:
                if not is_reported:
                    message = f"waits for its checkpoint: {error}"
                    _LOG.warning("%s", message)
                    self._event(EventReason.KEEPER_AWAY, message, warning=True)
                    is_reported = True
                time.sleep(backoff.next_s())
            else:
                _LOG.info(
                    "the keeper has %s checkpoint of this worker", "a" if has_checkpoint else "no"
                )
                return has_checkpoint

    def _upload_checkpoint(self) -> None:
        if self._uploads is not None:
            path = checkpoint_path(self._worker.rank)
            self._uploads.upload(path, self._path, iteration=self._progress.iteration)

    def _model_paths(self) -> tuple[str, str]:
        """The description comes last: a reader that finds it also finds the model."""
        return model_path(self._worker.site), metadata_path(self._worker.site)

    def _on_outcome(self, outcome: UploadResult) -> None:
        """Report an upload's outcome; called in the upload thread."""
        at = outcome.iteration
        if outcome.error:
            reason = EventReason.KEEP_FAILED if outcome.final else EventReason.KEEPER_AWAY
            message = outcome.error + ("" if outcome.final else "; retrying")
            self._reporter.event(reason, message, iteration=at, warning=True)
        elif outcome.path == checkpoint_path(self._worker.rank):
            message = f"the keeper has the checkpoint of iteration {at}"
            self._reporter.event(EventReason.CHECKPOINT_KEPT, message, iteration=at)
        elif outcome.path == metadata_path(self._worker.site):
            message = f"the keeper has the model of {self._worker.site}"
            self._reporter.event(EventReason.MODEL_KEPT, message, iteration=at)

    def _report_timeout(self, what: str, within_s: float) -> None:
        message = (
            f"{what}: not uploaded to the keeper within {within_s:g} s; it is lost with this worker"
        )
        self._event(EventReason.KEEP_FAILED, message, warning=True)

    def _event(self, reason: EventReason, message: str, *, warning: bool = False) -> None:
        self._reporter.event(reason, message, iteration=self._progress.iteration, warning=warning)
