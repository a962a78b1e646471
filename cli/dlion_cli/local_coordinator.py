"""The operator's coordinator, as `dlion run` serves it: an authority in memory, random tokens."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.progress import EvaluationRecord, ProgressRecord
from dlion_api.spec import Job
from dlion_operator.authority import Authority, Tokens
from dlion_operator.coordinator import CoordinatorServer, CoordinatorThread
from dlion_operator.issuing import LIFE
from dlion_operator.target import TargetWatch


class LocalCoordinator:
    """What `dlion_worker.local.runner` needs of a coordinator."""

    def __init__(
        self,
        job: Job,
        on_record: Callable[[ProgressRecord], None],
        *,
        certificate_life: timedelta = LIFE,
    ) -> None:
        """`on_record` is called in the coordinator's thread: it must neither block nor raise."""
        self._job = job
        self._on_record = on_record
        self._tokens = Tokens()
        self._target = TargetWatch(
            job.spec.trainer.stop.target_accuracy, [worker.rank for worker in job.workers()]
        )
        self._thread: CoordinatorThread | None = None
        self._authorities = (
            {}
            if job.spec.tls.mode == "Disabled"
            else {
                name: Authority(name, life=certificate_life)
                for name in (SiteName(site.name) for site in job.spec.sites)
            }
        )

    def start(self, host: str) -> str:
        """Serves on that host, at a free port; the address."""
        authority = next(iter(self._authorities.values()), None)
        server = CoordinatorServer(f"{host}:0", authority)
        server.open(
            self._job,
            authorities=self._authorities,
            tokens=self._tokens,
            on_record=self.take,
            feed_limit_bytes=0,  # nobody follows: the runner writes the results itself
        )
        self._thread = CoordinatorThread(server, self._job.key)
        return f"{host}:{self._thread.start()}"

    def token(self, worker: WorkerIdentity) -> str:
        """The secret by which that worker proves itself."""
        return self._tokens.issue(worker, self._job.key)

    def authority_pem(self) -> bytes | None:
        """The CA of the coordinator's certificate; None without TLS."""
        return (self._thread.authority_pem or None) if self._thread else None

    def request_stop(self, reason: str) -> None:
        """Tells every worker to finish its iteration and end the run."""
        if self._thread is not None:
            self._thread.stop(reason)

    def lost(self, rank: Rank) -> None:
        """That worker never comes back: the target is judged on the others."""
        if reason := self._target.left(rank):
            self.request_stop(reason)

    def close(self) -> None:
        """Closes the port and ends the thread; nothing is asked of it any more."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    def take(self, record: ProgressRecord) -> None:
        """Takes a record, of a worker's report or of an evaluation beside it."""
        self._on_record(record)
        if isinstance(record, EvaluationRecord) and (reason := self._target.take(record)):
            self.request_stop(reason)
