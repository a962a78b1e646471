"""Tasks in threads beside a worker's steps: dataset watching and model publishing.

Also reports membership and training set size to the sidecar. Called by `worker`.
"""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from dlion_api.names import Rank
from dlion_api.protocol.measurements import Peers
from dlion_api.protocol.membership import Membership, MemberState
from dlion_api.protocol.trust import trust_fingerprint
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.reasons import EventReason
from dlion_core.lifecycle.stopping import JobProgress
from dlion_worker.coordination import CoordinationClient
from dlion_worker.security.credentials import WorkerCredentials
from dlion_worker.trainer.background.dataset_watcher import DatasetWatcher
from dlion_worker.trainer.background.publishing import Publisher
from dlion_worker.trainer.loop import TrainerComponents
from dlion_worker.trainer.peer_selection import PeerSelection
from dlion_worker.training.datasets import DataSet, FolderWatch, training_set_size_is_known
from dlion_worker.training.site_model import SavedModel

MAX_TOTAL_WAIT_S = 60.0
"""How long after its first step a worker waits for the size of the training set, if it sees only a
part. Then it assumes that all workers have as many samples as itself."""


class BackgroundTasks:
    """One worker's tasks. Call `start` when training begins, `close` (repeatable) at the end."""

    def __init__(
        self,
        parts: TrainerComponents,
        config: WorkerConfig,
        *,
        data: DataSet,
        progress: JobProgress,
        peer_selection: PeerSelection,
        coordination: CoordinationClient,
        credentials: WorkerCredentials,
        on_saved: Callable[[SavedModel], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_saved` gets each published model."""
        self._on_saved = on_saved
        self._parts, self._job, self._config = parts, parts.job, config
        self._data, self._progress = data, progress
        self._peer_selection = peer_selection
        self._coordination = coordination
        self._credentials = credentials
        self._now_s = now_s
        self._first_step_s: float | None = None
        self._sending = threading.Lock()
        self._closing = ExitStack()
        parts.inbox.on_link_change = self._link_changed

    def training_set_samples(self, has_stepped: bool) -> int:
        """Samples of all workers together; 0: not known yet.

        Where workers see different data, the sidecars exchange their counts. `has_stepped`: this
        incarnation has made a step.
        """
        if training_set_size_is_known(self._job):
            return self._estimated_total()
        directive = self._parts.sidecar.latest_directive()
        if directive is not None and directive.training_set_samples:
            return directive.training_set_samples
        if has_stepped and self._first_step_s is None:
            self._first_step_s = self._now_s()
        is_late = (
            self._first_step_s is not None and self._now_s() - self._first_step_s > MAX_TOTAL_WAIT_S
        )
        return self._estimated_total() if is_late else 0

    def _estimated_total(self) -> int:
        if self._job.spec.trainer.dataset.watch:
            return self._parts.stream.samples * len(self._job.workers())
        return self._data.training_set_samples

    def send_peers(self) -> None:
        """Send membership, training set and position to the sidecar; from any thread, the latest
        last."""
        with self._sending:
            membership = self._coordination.membership()
            if membership is not None:
                self._parts.sidecar.send(
                    Peers(
                        membership,
                        self._estimated_total(),
                        self._parts.stream.samples,
                        trust_fingerprint(self._credentials.site_bundles_pem),
                        self._progress.iteration,
                        self._progress.global_batch_size,
                        self._linked_lost(membership),
                    )
                )

    def _link_changed(self, peer: Rank) -> None:
        membership = self._coordination.membership()
        member = None if membership is None else membership.member(peer)
        if member is not None and member.state is MemberState.LOST:
            self.send_peers()

    def _linked_lost(self, membership: Membership) -> tuple[Rank, ...]:
        lost = {m.identity.rank for m in membership.members if m.state is MemberState.LOST}
        if not lost:
            return ()
        links = self._parts.exchange.link_counters()
        return tuple(sorted(rank for rank in lost & links.keys() if links[rank].connected))

    def start(self) -> None:
        """Start dataset watching and model publishing, as the manifest asks."""
        self.send_peers()  # this worker may have adopted a peer's state
        trainer = self._job.spec.trainer
        if trainer.dataset.watch:
            watch = FolderWatch(
                self._job,
                self._job.worker(self._parts.rank),
                data_root=Path(self._config.data_root),
                data=self._data,
                stream=self._parts.stream,
            )
            self._start(DatasetWatcher(watch, report=self._report, on_samples=self.send_peers))
        if trainer.stop.continuous:
            publisher = Publisher(
                self._job,
                self._parts.rank,
                replica=self._parts.replica,
                exchange=self._parts.exchange,
                reachable=self._peer_selection.reachable,
                held_out=(self._data.held_out_x, self._data.held_out_y),
                results_dir=Path(self._config.results_dir),
                report=self._report,
                on_saved=self._on_saved,
            )
            self._start(publisher)

    def close(self) -> None:
        """Stop both tasks; afterwards nothing is written to the result folder."""
        self._closing.close()

    def _start(self, task: DatasetWatcher | Publisher) -> None:
        self._closing.callback(task.close)
        task.start()

    def _report(self, reason: EventReason, message: str, *, warning: bool = False) -> None:
        iteration = self._parts.replica.iteration
        self._parts.reporter.event(reason, message, iteration=iteration, warning=warning)
