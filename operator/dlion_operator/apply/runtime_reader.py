"""Read the DLionRuntime that a job uses, in the operator's own namespace.

`reconcile` calls it before it decides, with one object per DLionJob. A runtime is polled by name
while a run waits to start, and not watched: the operator has no right to list runtimes. Once a run
has Jobs, these carry its runtime, and nothing is read.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Final

from dlion_api.errors import ContractError, SpecError
from dlion_api.spec import load_job
from dlion_operator.children.workload import rendered_site
from dlion_operator.kubernetes.client import (
    Document,
    Kind,
    KubernetesClient,
    RequestRefusedError,
    ServerError,
)
from dlion_operator.model.job_view import WorkerJobView, job_key
from dlion_operator.model.settings import Settings
from dlion_operator.model.site_runtime import RuntimeState, SiteRuntime, kept_runtime
from dlion_operator.plan.runs import groups_of

_LOG = logging.getLogger(__name__)

READ_INTERVAL_S: Final = 5.0
"""Shorter than the time between two passes over a job that waits."""


class RuntimeReader:
    """The runtime of one job, as last read."""

    def __init__(
        self,
        cluster: KubernetesClient,
        settings: Settings,
        namespace: str,
        monotonic_s: Callable[[], float],
    ) -> None:
        """`namespace`: the operator's own."""
        self._cluster = cluster
        self._settings = settings
        self._namespace = namespace
        self._monotonic_s = monotonic_s
        self._name: str | None = None
        self._state = RuntimeState()
        self._again_s = float("-inf")
        self._failing_since_s: float | None = None

    async def read(self, document: Document, jobs: Iterable[Document]) -> RuntimeState | None:
        """Return the state; None: the manifest is invalid, or the job does not run at this site.

        `jobs`: the DLionJob's Jobs, of any run.
        """
        run_id = job_key(document).run_id
        views = [view for view in map(WorkerJobView, jobs) if view.run_id == run_id]
        if views:
            self._name = None  # the next run reads it again, however soon that begins
            return RuntimeState(kept_runtime(views))
        try:
            job = load_job(document, unknown=[])
        except SpecError:
            return None  # reported in the job's status
        if not groups_of(job, rendered_site(job, self._settings.site)):
            return None
        name = job.spec.runtime or self._settings.default_runtime
        if not name:
            return RuntimeState()
        if name != self._name or self._monotonic_s() >= self._again_s:
            await self._read(name, is_default=not job.spec.runtime)
            self._again_s = self._monotonic_s() + READ_INTERVAL_S
        return self._state

    async def _read(self, name: str, *, is_default: bool) -> None:
        before = self._state.problem
        if name != self._name:
            self._name, self._failing_since_s = name, None
        runtime, problem = await self._found(name, is_default=is_default)
        now_s = self._monotonic_s()
        if not problem:
            self._failing_since_s = None
        elif self._failing_since_s is None:
            self._failing_since_s = now_s
        since_s = now_s if self._failing_since_s is None else self._failing_since_s
        self._state = RuntimeState(runtime, problem, now_s - since_s)
        if problem and problem != before:
            _LOG.warning("%s", problem)

    async def _found(self, name: str, *, is_default: bool) -> tuple[SiteRuntime | None, str]:
        """The runtime, or why it cannot be used."""
        what = f"DLionRuntime {self._namespace}/{name}"
        try:
            found = await self._cluster.get(Kind.DLION_RUNTIME, self._namespace, name)
            if found is None and not await self._cluster.serves(Kind.DLION_RUNTIME):
                return None, (
                    f"{what}: this cluster has no definition of that kind: apply"
                    " crds/dlionruntime.yaml, or upgrade the chart with crds.enabled"
                )
            if found is None:
                field = "runtimes.default in the values of the chart" if is_default else "runtime"
                return None, (
                    f"{what} does not exist at this site: its administrators create it, or set"
                    f" {field} to one of `kubectl -n {self._namespace} get dlionruntimes`"
                )
            return SiteRuntime.of(name, found.get("spec") or {}), ""
        except (SpecError, ContractError) as error:
            return None, f"{what} cannot be used: {error}"
        except RequestRefusedError as error:
            advice = "upgrade its chart, or grant it get on dlionruntimes there"
            return None, f"this site's operator may not read {what}: {advice} ({error})"
        except ServerError as error:
            return None, f"{what} cannot be read yet: {error}; retrying"
