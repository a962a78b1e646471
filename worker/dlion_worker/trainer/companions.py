"""What goes on beside a worker's steps, in threads of its own, and what changes with its data.

Owns the watch over growing data and the publishing of models, where the manifest asks for them,
and what the sidecar is told of membership, training set and, before the first step, speed. Called
by `worker`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from dlion_api.measurements import Peers
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_api.trust import trust_print
from dlion_api.worker_config import WorkerConfig
from dlion_worker.coordination import CoordinationClient
from dlion_worker.credentials import WorkerCredentials
from dlion_worker.exchange import Exchange
from dlion_worker.sidecar_client import SidecarClient
from dlion_worker.trainer.growing import GrowingData
from dlion_worker.trainer.inbox import Inbox
from dlion_worker.trainer.neighbourhood import Neighbourhood
from dlion_worker.trainer.probing import begin_with_known_speeds
from dlion_worker.trainer.publishing import Publisher
from dlion_worker.trainer.replica import LocalReplica
from dlion_worker.trainer.reporting import Reporter
from dlion_worker.training.datasets import BatchStream, DataSet, FolderWatch, whole_is_known

UNTOLD_S = 60.0
"""For so long from its first step a worker that does not see all data waits to be told how many
they are; then it counts as if all had as many as itself."""


class Companions:
    """One worker's; `start` when training begins, `close` when it has ended, twice if need be."""

    def __init__(
        self,
        job: Job,
        config: WorkerConfig,
        *,
        data: DataSet,
        stream: BatchStream,
        replica: LocalReplica,
        exchange: Exchange,
        neighbourhood: Neighbourhood,
        sidecar: SidecarClient,
        coordination: CoordinationClient,
        credentials: WorkerCredentials,
        reporter: Reporter,
        kept: Callable[[Path], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`kept` hears of the folder of each model that is published."""
        self._kept = kept
        self._job, self._config = job, config
        self._data, self._stream = data, stream
        self._replica = replica
        self._exchange = exchange
        self._neighbourhood = neighbourhood
        self._sidecar = sidecar
        self._coordination = coordination
        self._credentials = credentials
        self._reporter = reporter
        self._now_s = now_s
        self._stepped_s: float | None = None
        self._telling = threading.Lock()
        self._closing = ExitStack()

    def training_set_samples(self, has_stepped: bool) -> int:
        """Of all workers together, where not all see the same by what each has told its sidecar;
        0: not known yet. `has_stepped`: this incarnation has made a step of its own."""
        if whole_is_known(self._job):
            return self._as_if_all_had_as_many()
        directive = self._sidecar.latest_directive()
        if directive is not None and directive.training_set_samples:
            return directive.training_set_samples
        if has_stepped and self._stepped_s is None:
            self._stepped_s = self._now_s()
        is_late = self._stepped_s is not None and self._now_s() - self._stepped_s > UNTOLD_S
        return self._as_if_all_had_as_many() if is_late else 0

    def _as_if_all_had_as_many(self) -> int:
        if self._job.spec.trainer.dataset.watch:
            return self._stream.samples * len(self._job.workers())
        return self._data.training_set_samples

    def tell_sidecar(self) -> None:
        """Membership and training set as they are now; from any thread, the newest comes last."""
        with self._telling:
            membership = self._coordination.membership()
            if membership is not None:
                self._sidecar.send(
                    Peers(
                        membership,
                        self._as_if_all_had_as_many(),
                        self._stream.samples,
                        trust_print(self._credentials.site_bundles_pem),
                    )
                )

    def tell_speed(self, inbox: Inbox, stopped: Callable[[], str | None]) -> None:
        """Measures this worker's speed and waits, not for ever, until the sidecar knows all."""
        begin_with_known_speeds(
            self._job,
            self._reporter.rank,
            model=self._replica.model,
            stream=self._stream,
            exchange=self._exchange,
            sidecar=self._sidecar,
            inbox=inbox,
            stopped=lambda: bool(inbox.stop_reason or stopped()),
        )

    def start(self) -> None:
        """Begins to take new data in and to publish models, as the manifest asks."""
        trainer = self._job.spec.trainer
        if trainer.dataset.watch:
            self._start(
                GrowingData(self._watch(), report=self._report, on_samples=self.tell_sidecar)
            )
        if trainer.stop.continuous:
            self._start(self._publisher())

    def close(self) -> None:
        """Ends both; nothing is written to the result folder any more when this returns."""
        self._closing.close()

    def _start(self, companion: GrowingData | Publisher) -> None:
        self._closing.callback(companion.close)
        companion.start()

    def _watch(self) -> FolderWatch:
        return FolderWatch(
            self._job,
            self._job.worker(self._config.rank),
            data_root=Path(self._config.data_root),
            data=self._data,
            stream=self._stream,
        )

    def _publisher(self) -> Publisher:
        return Publisher(
            self._job,
            self._reporter.rank,
            replica=self._replica,
            peers=self._neighbourhood,
            held_out=(self._data.held_out_x, self._data.held_out_y),
            results_dir=Path(self._config.results_dir),
            report=self._report,
            kept=self._kept,
        )

    def _report(self, reason: EventReason, message: str, *, warning: bool = False) -> None:
        iteration = self._replica.iteration
        self._reporter.event(reason, message, iteration=iteration, warning=warning)
