"""What Kueue reports of a queued job: its Workload, the assigned flavors, the priority class.

`reconcile` calls it before it decides, with one object per DLionJob. The Workload is watched, also
one that MultiKueue has made: it has our labels. Flavors and classes have no namespace, and are read
by name.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from dlion_api import cluster_names as names
from dlion_api.errors import DLionError, SpecError
from dlion_api.spec import Job, load_job
from dlion_operator.apply.queue_classes import QueueClasses
from dlion_operator.children.workload import pod_priority_class, rendered_site, workload_name
from dlion_operator.kubernetes.client import (
    Document,
    Kind,
    KubernetesClient,
    RequestRefusedError,
    ServerError,
)
from dlion_operator.kubernetes.resync import NOT_FOUND
from dlion_operator.kubernetes.store import ClusterStore, ObjectName, owner_uids
from dlion_operator.model.job_view import job_key
from dlion_operator.model.settings import Settings
from dlion_operator.model.site_runtime import SiteRuntime
from dlion_operator.model.workload_view import PriorityOfQueue, QueueState, WorkloadView
from dlion_operator.plan.queues.dispatching import is_dispatched
from dlion_operator.plan.queues.queueing import is_copy
from dlion_operator.plan.runs import groups_of

_LOG = logging.getLogger(__name__)

UNANSWERED_S: Final = 60.0
"""After this time without an answer a run is served anyway: Kueue's webhook, which converts
Workloads, may be down for long."""
NOT_SERVED = (
    f"this cluster serves no {Kind.WORKLOAD.value[0]} Workload: install Kueue 0.15 or newer, or"
    f" remove the job's label {names.QUEUE_LABEL}"
)
NOT_ENABLED = (
    "this site's operator may not queue jobs: set kueue.enabled in the values of its chart, or"
    f" remove the job's label {names.QUEUE_LABEL}"
)


class _MissingError(DLionError):
    """An object that the Workload needs does not exist."""


class WorkloadReader:
    """The queue state of one job."""

    def __init__(
        self,
        cluster: KubernetesClient,
        store: ClusterStore,
        classes: QueueClasses,
        settings: Settings,
        monotonic_s: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._classes = classes
        self._settings = self._rendering = settings
        self._monotonic_s = monotonic_s
        self._problem = ""
        self._unanswered_since_s: float | None = None
        self._flavors: dict[str, Document] = {}
        self._flavors_for: object = None

    async def read(self, document: Document, runtime: SiteRuntime | None) -> QueueState | None:
        """Return the state; None: the job has no queue, or it is this site's own and cannot be read
        or does not run here. `runtime`: what the run's pods are made with.

        Raises: ServerError if the API server has not answered for a short time.
        """
        metadata = document["metadata"]
        labels = metadata.get("labels") or {}
        if not labels.get(names.QUEUE_LABEL):
            return None
        if not self._settings.kueue:
            return QueueState(problem=NOT_ENABLED)
        job, key = self._job_here(document), job_key(document)
        if job is None and not (is_dispatched(document) or is_copy(document)):
            return None
        name = workload_name(key, labels, str(document["spec"].get("managedBy")))
        site = rendered_site(job, self._settings.site) if job else self._settings.site
        self._rendering = replace(self._settings, site=site, runtime=runtime)
        found = self._store.get(Kind.WORKLOAD, ObjectName(metadata["namespace"], name))
        state = await self._answered(document, job, name, found)
        if state.problem and state.problem != self._problem:
            _LOG.warning("run %s: %s", key, state.problem)
        self._problem = state.problem
        return state

    def _job_here(self, document: Document) -> Job | None:
        """None: it cannot be read, or does not run here, which its status reports."""
        try:
            job = load_job(document, unknown=[])
        except SpecError:
            return None
        return job if groups_of(job, rendered_site(job, self._settings.site)) else None

    async def _answered(
        self, document: Document, job: Job | None, name: str, found: Document | None
    ) -> QueueState:
        """The state, or after a while that it cannot be read: the run itself must continue."""
        try:
            self._check_listed()
            state = await self._read(document, job, found)
        except ServerError as error:
            now_s = self._monotonic_s()
            if self._unanswered_since_s is None:
                self._unanswered_since_s = now_s
            if now_s - self._unanswered_since_s < UNANSWERED_S:
                raise
            problem = f"Workload {name} cannot be read, see whether Kueue runs: {error}"
            return QueueState(found, is_copy(document), problem)
        except RequestRefusedError as error:
            self._unanswered_since_s = None
            advice = "set kueue.enabled in the values of this site's chart"
            problem = f"this site's operator may not queue jobs: {advice} ({error})"
            problem = NOT_SERVED if error.code == NOT_FOUND else problem
            return QueueState(found, is_copy(document), problem)
        self._unanswered_since_s = None
        return state

    def _check_listed(self) -> None:
        """Raises: RequestRefusedError, ServerError where Workloads cannot be listed."""
        match self._store.unlisted.get(Kind.WORKLOAD):
            case RequestRefusedError(code=code) as error:
                raise RequestRefusedError(str(error), code)
            case DLionError() as error:
                raise ServerError(str(error))

    async def _read(
        self, document: Document, job: Job | None, found: Document | None
    ) -> QueueState:
        is_prebuilt = is_copy(document)
        view = None if found is None else WorkloadView(found)
        if view is not None and (problem := _foreign(view, document, is_prebuilt=is_prebuilt)):
            return QueueState(problem=problem, is_prebuilt=is_prebuilt)
        if job is None:
            return QueueState(found, is_prebuilt)
        try:
            if view is not None and view.may_run and not is_dispatched(document):
                flavors = await self._assigned_flavors(view)
                return QueueState(found, is_prebuilt, flavors=flavors)
            if is_prebuilt or (view is not None and (view.has_quota or view.is_finished)):
                return QueueState(found, is_prebuilt)
            return QueueState(found, priority=await self._priority(job))
        except _MissingError as error:
            return QueueState(found, is_prebuilt, str(error))

    async def _assigned_flavors(self, view: WorkloadView) -> Mapping[str, Document]:
        """Read them once per admission: a change of a flavor moves no running pods.

        Raises: _MissingError if one does not exist.
        """
        admission = (view.uid, view.admitted_since, tuple(view.all_flavors))
        if admission != self._flavors_for:
            self._flavors = {
                name: _existing(
                    Kind.RESOURCE_FLAVOR,
                    name,
                    await self._cluster.get(Kind.RESOURCE_FLAVOR, "", name),
                )
                for name in view.all_flavors
            }
            self._flavors_for = admission
        return self._flavors

    async def _priority(self, job: Job) -> PriorityOfQueue | None:
        """The priority of the class that the job's label names, else of its pods' class.

        Raises: _MissingError if that does not exist.
        """
        kind, name = (
            Kind.WORKLOAD_PRIORITY_CLASS,
            job.metadata.labels.get(names.QUEUE_PRIORITY_LABEL, ""),
        )
        if not name:
            kind, name = Kind.PRIORITY_CLASS, self._pod_priority_class(job)
        if not name:
            return None
        value = _existing(kind, name, await self._classes.get(kind, name)).get("value")
        api_version, kind_name, _ = kind.value
        number = value if isinstance(value, int) and not isinstance(value, bool) else 0
        return PriorityOfQueue(api_version.partition("/")[0], kind_name, name, number)

    def _pod_priority_class(self, job: Job) -> str:
        try:
            return pod_priority_class(job, groups_of(job, self._rendering.site), self._rendering)
        except (AttributeError, TypeError, ValueError, KeyError):
            return ""  # the podTemplate is malformed, which the job's status reports


def _existing(kind: Kind, name: str, found: Document | None) -> Document:
    """Return the object that was found. Raises: _MissingError if there is none."""
    if found is None:
        label = names.QUEUE_PRIORITY_LABEL
        hint = f", or change label {label}" if kind is Kind.WORKLOAD_PRIORITY_CLASS else ""
        raise _MissingError(f"{kind.value[1]} {name} does not exist: create it{hint}")
    return found


def _foreign(view: WorkloadView, document: Document, *, is_prebuilt: bool) -> str:
    """Why the job must not use that Workload. Empty: it may."""
    owners, owner_uid = owner_uids(view.document), str(document["metadata"]["uid"])
    key = job_key(document)
    if not is_prebuilt:
        is_own = owner_uid in owners
        advice = "already exists and has another owner: delete or rename it"
        return "" if is_own else f"Workload {view.name} {advice}"
    # MultiKueue copies the Workload with its labels, and without its owner.
    is_of_run = (view.labels.get(names.JOB_LABEL), view.run_id) == (key.name, key.run_id)
    if is_of_run and (not owners or owner_uid in owners):
        return ""
    return (
        f"Workload {view.name}, which label {names.QUEUE_PREBUILT_LABEL} names, is of another job"
        " or run: remove the label; MultiKueue sets it on jobs that it dispatches"
    )
