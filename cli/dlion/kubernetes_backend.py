"""Jobs of one namespace of a cluster, by the code of `submit`, `watch`, `logs` and `fetch`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dlion.job import JobSnapshot, JobWorker
from dlion.manifests import ManifestInput
from dlion_api import cluster_names
from dlion_api.errors import (
    AbsentError,
    DeniedError,
    DLionError,
    Problem,
    SpecError,
    UnavailableError,
)  # fmt: skip
from dlion_api.names import Rank
from dlion_api.protocol.progress import ProgressRecord
from dlion_api.spec import load_job
from dlion_api.status_names import ACCURACY, ConditionType, State
from dlion_cli.cluster.client import connect
from dlion_cli.cluster.cluster_jobs import JobClient
from dlion_cli.cluster.connection_settings import ConnectionSettings
from dlion_cli.cluster.documents import mapping_of
from dlion_cli.cluster.submission import submit_manifest, valid_manifest
from dlion_cli.local_runs.kept_logs import kept_logs
from dlion_cli.pod_streams.keeper_files import find_keeper, site_of
from dlion_cli.pod_streams.kept_records import kept_records
from dlion_cli.pod_streams.log_lines import LogSource, follow_lines, read_lines
from dlion_cli.pod_streams.log_sources import (
    LogSelector,
    log_source,
    no_pods_error,
    worker_pods,
)
from dlion_cli.views.job_status import JobStatus
from dlion_cli.views.job_updates import WaitTimeoutError, follow

if TYPE_CHECKING:
    from dlion.model_project import ModelProject
    from dlion_api.spec import Job

_POLL_S: Final = 2.0


@dataclass(frozen=True)
class _ChosenWorker:
    """A worker whose log is wanted. `site`: None if this version cannot read the manifest."""

    rank: Rank
    site: str | None
    selector: LogSelector


class KubernetesBackend:
    """The jobs of a namespace. Thread-safe."""

    def __init__(self, settings: ConnectionSettings) -> None:
        """Sends no request. Raises: as `dlion_cli.cluster.client.connect`."""
        self._namespace = settings.namespace
        self._jobs = JobClient(connect(settings))

    def train(
        self,
        manifest: ManifestInput,
        assignments: Sequence[str],
        *,
        project: ModelProject | None,  # noqa: ARG002 - the client refuses data in memory
        environment: str | None,
        data_root: Path,  # noqa: ARG002 - data are at the sites
        detach: bool,  # noqa: ARG002 - a job of a cluster always is
    ) -> JobSnapshot:
        """Submit the job, as `dlion submit`.

        Raises: SpecError, also if this run of the job has ended already; ProgramError for a wrong
        program file; and as `submit_manifest`.
        """
        if environment is not None:
            problem = Problem(
                "environment", "is for runs on this machine: a cluster has its own links",
                value=environment, advice="Omit it",
            )  # fmt: skip
            raise SpecError([problem], source=manifest.source)
        given = valid_manifest(
            manifest.document, manifest.source, manifest.file, assignments, self._namespace
        )
        jobs = self._jobs.in_namespace(given.namespace or self._jobs.cluster.namespace)
        before = jobs.find(given.job.metadata.name)
        status = None if before is None else JobStatus(before)
        if status is not None and status.outcome and status.run_id == given.job.spec.run_id:
            problem = Problem(
                "spec.runId",
                f"this run has ended already ({status.outcome.type})",
                value=status.run_id,
                advice="For a new run give another ID, as in set={'runId': '2'}",
            )
            raise SpecError([problem], source=manifest.source)
        return _snapshot(JobStatus(submit_manifest(jobs, given).after))

    def get(self, name: str) -> JobSnapshot:
        """The job of that name. Raises: AbsentError, and as `ClusterClient.request`."""
        return _snapshot(JobStatus(self._jobs.get(name)))

    def list(self) -> list[JobSnapshot]:
        """All jobs of the namespace, by name. Raises: as `ClusterClient.request`."""
        return [_snapshot(JobStatus(each)) for each in self._jobs.list_jobs()["items"]]

    def wait(
        self,
        name: str,
        is_wanted: Callable[[JobSnapshot], bool],
        timeout_s: float | None,
    ) -> JobSnapshot:
        """The job once it is as wanted, or else after the time.

        Raises: AbsentError if it is deleted; and as `dlion_cli.views.job_updates.follow`.
        """
        job: JobSnapshot | None = None
        try:
            for status in follow(self._jobs, name, timeout_s=timeout_s):
                job = _snapshot(status)
                if is_wanted(job):
                    return job
        except WaitTimeoutError:
            return job or self.get(name)
        raise AbsentError(f"DLionJob {name!r} was deleted meanwhile")

    def logs(self, name: str, worker: int | None, follow: bool) -> Iterator[str]:
        """Lines of a trainer of this site; of one whose pod is gone those that the keeper has.

        Raises: at once, as `get`; UnavailableError if there are none.
        """
        status = JobStatus(self._jobs.get(name))
        chosen = self._chosen(status, 0 if worker is None else worker)
        if not self._jobs.pods(name, chosen.selector.labels(status.run_id)) and (
            status.outcome is not None or not follow  # else its pod may come
        ):
            return self._kept_lines(status, chosen)
        source = self._log_source(status, chosen)
        # A log that has ended is read at once: nothing can come after it.
        if not follow or status.outcome is not None:
            return (line.text for line in read_lines(self._jobs.cluster, source, tail=None))
        return self._followed(name, source)

    def records(self, name: str) -> tuple[Job | None, Iterator[ProgressRecord]]:
        """The manifest and the records that the keeper of this site has.

        Raises: UnavailableError if there is no keeper, or it has none; and as `get`.
        """
        status = JobStatus(self._jobs.get(name))
        with kept_records(self._jobs, status, status.run_id) as (manifest, records):
            return manifest or _job(status), iter([*records])

    def end(self, name: str) -> None:
        """Suspend the job. Raises: as `ClusterClient.request`."""
        self._jobs.suspend(name, True)

    def delete(self, name: str) -> None:
        """Delete the job after its children, without waiting. Raises: as `get`."""
        self._jobs.delete(name, uid=JobStatus(self._jobs.get(name)).uid)

    def close(self) -> None:
        """Close the connections."""
        self._jobs.cluster.close()

    @staticmethod
    def _chosen(status: JobStatus, rank: int) -> _ChosenWorker:
        job = _job(status)
        try:
            worker = None if job is None else job.worker(Rank(rank))
        except LookupError as error:
            problem = Problem("worker", f"is not a rank: {error}", str(rank))
            raise SpecError([problem], source=status.name) from None
        group, index = (None, rank) if worker is None else (worker.group, worker.index)
        selector = LogSelector(cluster_names.TRAINER_CONTAINER, group, index)
        return _ChosenWorker(Rank(rank), None if worker is None else worker.site, selector)

    def _log_source(self, status: JobStatus, chosen: _ChosenWorker) -> LogSource:
        pods = worker_pods(self._jobs, status, chosen.selector)
        if chosen.site is not None:
            label = cluster_names.SITE_LABEL
            pods = [pod for pod in pods if pod["metadata"]["labels"].get(label) == chosen.site]
            if not pods:
                raise self._elsewhere(status, chosen)
        return log_source(pods[-1], chosen.selector.container)

    def _kept_lines(self, status: JobStatus, chosen: _ChosenWorker) -> Iterator[str]:
        """What the keeper has of a worker without a pod. Raises: UnavailableError if nothing."""
        try:
            site = site_of(find_keeper(self._jobs, status, status.run_id))
            if site and chosen.site not in (None, site):
                raise self._elsewhere(status, chosen)
            with kept_logs(self._jobs, status, status.run_id, chosen.selector) as kept:
                return iter(kept.lines_of(chosen.rank))
        except AbsentError:
            raise
        except (DeniedError, UnavailableError) as error:
            more = f". Of what is kept: {error}"
            raise no_pods_error(status, chosen.selector, more) from error

    def _elsewhere(self, status: JobStatus, chosen: _ChosenWorker) -> AbsentError:
        return AbsentError(
            f"worker {chosen.rank} of {status.name} is at site {chosen.site}, not at the site of "
            f"this cluster (context {self._jobs.cluster.context!r}). Use a Client of it"
        )

    def _followed(self, name: str, source: LogSource) -> Iterator[str]:
        """New lines too, until the run has ended or the job is gone."""
        stop = threading.Event()

        def stop_at_the_end() -> None:
            while not stop.wait(_POLL_S):
                try:
                    if JobStatus(self._jobs.get(name)).outcome is not None:
                        stop.set()
                except AbsentError:
                    stop.set()
                except DLionError:  # away for a moment: the log is followed on
                    pass

        threading.Thread(target=stop_at_the_end, daemon=True, name=f"end of {name}").start()
        try:
            for line in follow_lines(self._jobs.cluster, source, tail=None, stop=stop, to_end=True):
                yield line.text
        finally:
            stop.set()


def _job(status: JobStatus) -> Job | None:
    """The job with the ranks of a cluster; None if this version cannot read it."""
    try:
        return load_job(status.document).with_group_ranks()
    except SpecError:
        return None


def _snapshot(status: JobStatus) -> JobSnapshot:
    outcome = status.outcome
    shown = outcome or status.condition(ConditionType.READY)
    state = str(mapping_of(status.document.get("status")).get("state") or State.PENDING)
    has_ended = state in (State.SUCCEEDED, State.FAILED)
    if outcome is not None:
        state = outcome.type
    elif has_ended:  # the status still describes the previous run
        state, shown = State.PENDING, None
    is_current = outcome is not None or not has_ended
    progress = status.progress_percentage if is_current else None
    metrics = status.metrics if is_current else {}
    created = mapping_of(status.document.get("metadata")).get("creationTimestamp")
    return JobSnapshot(
        name=status.name,
        backend="kubernetes",
        state=state,
        reason="" if shown is None else shown.reason,
        message="" if shown is None else shown.message,
        progress=None if progress is None else progress / 100,
        eta_s=None if outcome or not is_current else _seconds(status.remaining_s),
        accuracy=_number(metrics.get("accuracy")),
        accuracy_name=status.accuracy_name if is_current else ACCURACY,
        loss=_number(metrics.get("loss")),
        metrics=_numbers(status.program_metrics) if is_current else {},
        workers=_workers(status, outcome is not None),
        created=_time(created),
    )


def _workers(status: JobStatus, has_ended: bool) -> tuple[JobWorker, ...]:
    """Workers by rank. A status has numbers of ready workers, so some states are not known."""
    job = _job(status)
    ready = {name: workers.split("/") for name, _, workers, _ in status.sites}
    states = {}
    for name, counts in ready.items():
        all_ready, none_ready = len(set(counts)) == 1, counts[0] == "0"
        states[name] = "training" if all_ready else "starting" if none_ready else ""
    return tuple(
        JobWorker(each.rank, each.site, each.name,
                  "finished" if has_ended else states.get(each.site, ""))
        for each in (() if job is None else job.workers())
    )  # fmt: skip


def _numbers(values: Mapping[str, str]) -> dict[str, float]:
    known = {name: _number(value) for name, value in values.items()}
    return {name: value for name, value in known.items() if value is not None}


def _number(value: str | None) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


def _seconds(value: int | None) -> float | None:
    return None if value is None else float(value)


def _time(value: object) -> datetime | None:
    try:
        time = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)
