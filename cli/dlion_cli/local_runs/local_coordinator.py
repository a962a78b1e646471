"""Runs the operator's coordinator in `dlion run`, with an in-memory authority and random tokens."""

from collections.abc import Callable
from datetime import timedelta

from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.protocol.accusations import Accusations, quarantine_message, quarantine_reason
from dlion_api.protocol.progress import EvaluationRecord, EventRecord, ProgressRecord
from dlion_api.protocol.revocation import Revocation
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_operator.coordinator import CoordinatorServer, CoordinatorThread
from dlion_operator.pki.authority import CertificateAuthority, Tokens
from dlion_operator.pki.certificate_issuer import LIFE
from dlion_operator.served_runs.target_accuracy import TargetAccuracyMonitor


class LocalCoordinator:
    """The coordinator interface that `dlion_local.runner.runner` requires."""

    def __init__(
        self,
        job: Job,
        on_record: Callable[[ProgressRecord], None],
        *,
        certificate_life: timedelta = LIFE,
    ) -> None:
        """`on_record` is called in the coordinator's thread and must neither block nor raise."""
        self._job = job
        self._on_record = on_record
        self._tokens = Tokens()
        self._target = TargetAccuracyMonitor.of(job, job.workers())
        self._accusations = Accusations()
        self._quarantined: dict[Rank, Revocation] = {}
        self._server: CoordinatorServer | None = None
        self._thread: CoordinatorThread | None = None
        sites = () if job.spec.tls.mode == "Disabled" else job.spec.sites
        self._authorities = {
            name: CertificateAuthority(name, life=certificate_life)
            for name in (SiteName(site.name) for site in sites)
        }

    def start(self, host: str, start_time_monotonic_s: float) -> str:
        """Serve on that host at a free port a run that began then; return the address."""
        authority = next(iter(self._authorities.values()), None)
        server = self._server = CoordinatorServer(f"{host}:0", authority)
        server.open(
            self._job,
            authorities=self._authorities,
            tokens=self._tokens,
            on_record=self.take,
            start_time_monotonic_s=start_time_monotonic_s,
            feed_limit_bytes=0,  # no followers: the runner writes the results
        )
        self._thread = CoordinatorThread(server, self._job.key)
        return f"{host}:{self._thread.start()}"

    def token(self, worker: WorkerIdentity) -> str:
        """The secret with which that worker authenticates."""
        return self._tokens.issue(worker, self._job.key)

    def authority_pem(self) -> bytes | None:
        """The CA of the coordinator's certificate; None without TLS."""
        return (self._thread.authority_pem or None) if self._thread else None

    def request_stop(self, reason: str) -> None:
        """Ask every worker to finish its iteration and end the run."""
        if self._thread is not None:
            self._thread.stop(reason)

    def lost(self, rank: Rank) -> None:
        """A worker is lost for good, or quarantined: the target is evaluated on the others."""
        if reason := self._target.remove(rank):
            self.request_stop(reason)

    def close(self) -> None:
        """Close the port and end the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    def take(self, record: ProgressRecord) -> None:
        """Process a record from a worker or an evaluator."""
        self._on_record(record)
        if isinstance(record, EvaluationRecord) and (reason := self._target.take(record)):
            self.request_stop(reason)
        if isinstance(record, EventRecord) and self._job.spec.exchange.quarantine != "off":
            self._take_accusation(record)

    def _take_accusation(self, record: EventRecord) -> None:
        """Quarantine a worker once most of the others, of all sites, have named it."""
        server, thread = self._server, self._thread
        if server is None or thread is None:
            return
        workers = {worker.rank: worker for worker in self._job.workers()}
        trusted = workers.keys() - self._quarantined.keys()
        here = [member.identity.rank for member in server.membership(self._job.key).ready()]
        accused = self._accusations.take(record, here=trusted & {*here}, known=trusted)
        if accused is None:
            return
        reason = quarantine_reason(record)
        name = workers[accused].name
        self._quarantined[accused] = Revocation(name, reason)
        thread.revoke([*self._quarantined.values()], self._job.workers())
        self._on_record(
            EventRecord(
                record.time_s, accused, 0, EventReason.WORKER_QUARANTINED,
                quarantine_message(name, reason), warning=True,
            )
        )  # fmt: skip
        self.lost(accused)
