"""Finds the pods, and the containers' logs in them, of a job's workers at this site."""

from collections.abc import Sequence
from dataclasses import dataclass

import click

from dlion_api import cluster_names
from dlion_api.bounds import GROUP_NAME_LENGTH, LABEL_FORM
from dlion_api.cluster_names import SITE_LABEL
from dlion_api.errors import SpecError, UnavailableError
from dlion_cli.cluster.client import checked_name
from dlion_cli.cluster.cluster_jobs import Document, JobClient
from dlion_cli.cluster.documents import mapping_of
from dlion_cli.pod_streams.log_lines import LogSource
from dlion_cli.terminal.formatting import printable
from dlion_cli.views.job_status import JobStatus


@dataclass(frozen=True)
class LogSelector:
    """The container, group and worker of the options."""

    container: str
    group: str | None
    worker: int | None

    def __post_init__(self) -> None:
        """Raises: UsageError for options that exclude each other; SpecError for no group's name."""
        if self.is_keeper and (self.group or self.worker is not None):
            raise click.UsageError("a site has one keeper: remove --group and --worker")
        if self.group is not None:
            checked_name(self.group, "group", "group", LABEL_FORM, GROUP_NAME_LENGTH)

    @property
    def is_keeper(self) -> bool:
        return self.container == cluster_names.KEEPER_CONTAINER

    def labels(self, run_id: str) -> dict[str, str]:
        """The labels that select these pods."""
        component = cluster_names.KEEPER if self.is_keeper else cluster_names.WORKER
        labels = {cluster_names.RUN_LABEL: run_id, cluster_names.COMPONENT_LABEL: component}
        if self.group is not None:
            labels[cluster_names.GROUP_LABEL] = self.group
        if self.worker is not None:
            labels[cluster_names.INDEX_LABEL] = str(self.worker)
        return labels


def log_sources(
    jobs: JobClient, job: JobStatus, selector: LogSelector, prefix: str = ""
) -> list[LogSource]:
    """The logs that the selector chooses. Raises: UnavailableError if there are none."""
    return [log_source(pod, selector.container, prefix) for pod in worker_pods(jobs, job, selector)]


def worker_pods(jobs: JobClient, job: JobStatus, selector: LogSelector) -> list[Document]:
    """The pods that the selector chooses. Raises: UnavailableError if there are none."""
    if pods := jobs.pods(job.name, selector.labels(job.run_id)):
        return pods
    raise no_pods_error(job, selector)


def no_pods_error(job: JobStatus, selector: LogSelector, more: str = "") -> UnavailableError:
    """The error that there are no such pods; `more` follows it."""
    what = "keeper" if selector.is_keeper else "workers"
    which = "" if selector.group is None else f" of group {selector.group}"
    which += "" if selector.worker is None else f" with index {selector.worker}"
    return UnavailableError(
        f"run {job.run_id} of {job.name} has no pods of {what}{which} at this site; its state: "
        f"{job.state}. `dlion get {job.name}` shows details{more}"
    )


def workers_without_pods(
    job: JobStatus, pods: Sequence[Document], selector: LogSelector
) -> list[str]:
    """Selected workers of the manifest that none of these pods is of, as `group-index`.

    Empty for an invalid manifest, and without pods: the site is not known then.
    """
    from dlion_api.spec import load_job  # most commands need no manifest

    sites = {str(mapping_of(pod["metadata"].get("labels")).get(SITE_LABEL)) for pod in pods}
    present = {log_source(pod, selector.container).label for pod in pods}
    try:
        workers = load_job(job.document).workers()
    except SpecError:
        return []
    return [
        label
        for worker in workers
        if worker.site in sites
        and selector.group in (None, worker.group)
        and selector.worker in (None, worker.index)
        and (label := f"{worker.group}-{worker.index}") not in present
    ]


def log_source(pod: Document, container: str, prefix: str = "") -> LogSource:
    """The log of a pod's container, labelled with the worker's name after `prefix`."""
    labels = pod["metadata"].get("labels") or {}
    group, index = labels.get(cluster_names.GROUP_LABEL), labels.get(cluster_names.INDEX_LABEL)
    label = f"{group}-{index}" if group and index else str(pod["metadata"]["name"])
    if container == cluster_names.KEEPER_CONTAINER:
        label = cluster_names.KEEPER
    return LogSource(str(pod["metadata"]["name"]), container, printable(prefix + label))
