"""The runs that this site's coordinator serves, as reconciling sees them.

Joins the coordinator, the progress that comes in through it, and the stop condition that only the
whole job can judge. Its methods are called in the operator's event loop.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from dlion_api.names import JobKey, WorkerIdentity
from dlion_api.progress import EvaluationRecord, EventRecord, ProgressRecord
from dlion_api.spec import Job
from dlion_operator.authority import Authority
from dlion_operator.coordinator import CoordinatorServer
from dlion_operator.coordinator.served_run import TokenVerifier
from dlion_operator.decisions import Notice
from dlion_operator.observed import RunView
from dlion_operator.progress import RunProgress
from dlion_operator.statuses import as_kubernetes
from dlion_operator.store import ObjectName
from dlion_operator.target import TargetWatch
from dlion_operator.worker_news import WorkerNews

_LOG = logging.getLogger(__name__)


@dataclass
class _Served:
    """One run that is served."""

    workers: tuple[WorkerIdentity, ...]
    progress: RunProgress
    target: TargetWatch
    news: WorkerNews
    opened_s: float
    stop_reason: str = ""
    seen_s: dict[str, float] = field(default_factory=dict)
    """When each worker was there last."""


class SiteRuns:
    """A `dlion_operator.reconcile.Runs`."""

    def __init__(
        self,
        server: CoordinatorServer,
        *,
        authority: Authority,
        tokens: TokenVerifier,
        trigger: Callable[[ObjectName], None],
    ) -> None:
        """`trigger` is called where a job's situation may have changed."""
        self._server = server
        self._authority = authority
        self._tokens = tokens
        self._trigger = trigger
        self._served: dict[JobKey, _Served] = {}

    def open(
        self, job: Job, workers: tuple[WorkerIdentity, ...], *, spec_hash: str, age_s: float
    ) -> None:
        key = job.key
        if key in self._served:
            self._rescale(key, workers)
            return
        self._close_but(key, key.namespace, key.name)
        ranks = [worker.rank for worker in workers]
        target = TargetWatch(job.spec.trainer.stop.target_accuracy, ranks)
        self._served[key] = _Served(
            workers, RunProgress(job), target, WorkerNews(workers), time.monotonic()
        )
        self._served[key].progress.expect(workers)
        is_open = job.spec.tls.mode == "Disabled"
        self._server.open(
            job,
            workers=workers,
            spec_hash=spec_hash,
            authorities={} if is_open else {self._authority.site: self._authority},
            tokens=self._tokens,
            on_record=lambda record: self._take(key, record),
            start_time_monotonic_s=time.monotonic() - age_s,
        )
        _LOG.info("run %s is served", key)

    def replace_authority(self, authority: Authority) -> None:
        """Signs with that one from now on.

        It has the key of the one before, by whose certificate pods of older runs know it still.
        """
        self._authority = authority
        self._server.replace_authority(authority)

    def _rescale(self, run: JobKey, workers: tuple[WorkerIdentity, ...]) -> None:
        """Takes over another count of workers in mid-run."""
        served = self._served[run]
        if served.workers == workers:
            return
        served.workers = workers
        self._server.expect(run, workers)
        served.progress.expect(workers)
        served.news.expect(workers)
        if reason := served.target.expect([worker.rank for worker in workers]):
            self.stop(run, reason)

    def stop(self, run: JobKey, reason: str) -> None:
        served = self._served.get(run)
        if served is not None and not served.stop_reason:
            served.stop_reason = reason
            self._server.stop(run, reason)

    def finish(self, run: JobKey, reason: str, *, succeeded: bool) -> None:
        if run in self._served:
            self._server.finish(run, reason, succeeded=succeeded)

    def close(self, namespace: str, name: str) -> None:
        self._close_but(None, namespace, name)

    def view(self, run: JobKey) -> RunView | None:
        served = self._served.get(run)
        if served is None:
            return None
        membership = self._server.membership(run)
        ready = Counter(member.identity.site for member in membership.ready())
        now_s = time.monotonic()
        served.seen_s |= {member.identity.name: now_s for member in membership.ready()}
        return RunView(
            open_s=now_s - served.opened_s,
            ready=ready,
            away_s={name: now_s - seen_s for name, seen_s in served.seen_s.items()},
            training=served.progress.training,
            stop_reason=served.progress.stop_reason or served.stop_reason,
            trainer_status=served.progress.trainer_status(as_kubernetes(datetime.now(UTC))),
            steps_per_second=served.progress.steps_per_second(),
            links=served.progress.links(membership),
        )

    def news(self, run: JobKey) -> tuple[Notice, ...]:
        served = self._served.get(run)
        return () if served is None else served.news.due(time.monotonic())

    def authority_pem(self) -> str:
        return self._server.authority_pem.decode()

    def refusals(self) -> Mapping[str, int]:
        """Refused calls by reason since the start."""
        return {str(reason): count for reason, count in self._server.refusals().items()}

    def _close_but(self, kept: JobKey | None, namespace: str, name: str) -> None:
        for key in [k for k in self._served if (k.namespace, k.name) == (namespace, name)]:
            if key != kept:
                del self._served[key]
                self._server.close(key)
                _LOG.info("run %s is served no more", key)

    def _take(self, key: JobKey, record: ProgressRecord) -> None:
        served = self._served.get(key)
        if served is None:
            return
        served.progress.take(record)
        served.news.take(record)
        if isinstance(record, EvaluationRecord) and (reason := served.target.take(record)):
            self.stop(key, reason)
        if isinstance(record, EventRecord):
            self._trigger(ObjectName(key.namespace, key.name))
