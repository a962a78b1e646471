"""Observe, decide, act, and one status write: the loop's body for one job.

Called by `loops` whenever something may have changed. Every action is idempotent, and an action
that changes nothing sends nothing: what was applied is known by a hash on the object.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Protocol

from dlion_api.cluster_names import COMPONENT_LABEL, KEEPER, keeper_name
from dlion_api.errors import DLionError
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.spec import Job
from dlion_operator.absences import missing
from dlion_operator.carrying_out import Children
from dlion_operator.cluster import (
    Cluster,
    ConflictError,
    Document,
    Kind,
    RefusedError,
    ServerError,
)
from dlion_operator.decide import LOOK_AGAIN_S, decide, is_left_alone
from dlion_operator.decisions import (
    CloseRun,
    Decision,
    FinishRun,
    Notice,
    OpenRun,
    StopRun,
)
from dlion_operator.delays import unready_keepers
from dlion_operator.exposure import Addresses
from dlion_operator.job_authority import NamedAuthority
from dlion_operator.job_memory import JobMemory
from dlion_operator.named_secret import NamedSecret
from dlion_operator.node_states import NodeStates
from dlion_operator.notices import Notices
from dlion_operator.observed import (
    NOTHING_KNOWN,
    Observed,
    RunView,
)
from dlion_operator.patching import is_telemetry, merge_patch
from dlion_operator.settings import Settings
from dlion_operator.sightings import Sightings
from dlion_operator.store import ObjectName, Store
from dlion_operator.tidying import kept_by_nodes, leaving, node_of, overdue, released

_LOG = logging.getLogger(__name__)

TELEMETRY_EVERY_S = 10.0
FAILING_AFTER_S = 60.0
"""Errors for so long are no passing matter: the job's status says so."""


class Runs(Protocol):
    """The coordinator, as reconciling needs it."""

    def open(
        self,
        job: Job,
        workers: tuple[WorkerIdentity, ...],
        *,
        spec_hash: str,
        age_s: float,
        failed: frozenset[Rank] = frozenset(),
        addresses: Addresses | None = None,
        authority: NamedAuthority | None = None,
        kept_bundles: Mapping[SiteName, bytes] = MappingProxyType({}),
    ) -> None:
        """Serves that run with these workers; other runs of the same job are closed.

        It began so long ago. `failed` are workers of this site that have failed for good.
        `addresses`: where other sites reach this one's workers, as far as that is known; None:
        where the workers say. `authority` is what there is of the one that the job names; None:
        the site's own signs. `kept_bundles`: by which its workers were known before.
        """
        ...

    def stop(self, run: JobKey, reason: str) -> None:
        """Asks its workers to end the run."""
        ...

    def finish(self, run: JobKey, reason: str, *, succeeded: bool) -> None:
        """Tells whoever follows it that it is over."""
        ...

    def close(self, namespace: str, name: str) -> None:
        """Serves no run of that job any more."""
        ...

    def view(self, run: JobKey) -> RunView | None:
        """What is known of it; None: it is not served."""
        ...

    def elsewhere(self, run: JobKey, sites: Collection[SiteName]) -> RunView:
        """What the other ones of these sites say of a run that is not served here."""
        ...

    def news(self, run: JobKey) -> tuple[Notice, ...]:
        """What its workers have told that is to be posted now; it is not given again."""
        ...

    def authority_pem(self) -> str:
        """What workers know the coordinator by."""
        ...


class Reconciler:
    """Brings jobs to where their manifests want them."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        store: Store,
        runs: Runs,
        settings: Settings,
        notices: Notices,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._runs = runs
        self._settings = settings
        self._notices = notices
        self._now = now
        self._monotonic_s = monotonic_s
        self._nodes = NodeStates(cluster, may_ask=not settings.namespaces)
        self._memories: dict[ObjectName, JobMemory] = {}
        self._leaving: dict[ObjectName, Sightings[str]] = {}
        """Pods that are to go, of jobs that are there and of those that are gone."""

    async def reconcile(self, name: ObjectName) -> float | None:
        """One look at that job; in how many seconds to look again, where nothing happens.

        Raises: DLionError where something could not be done; a later look helps.
        """
        document = self._store.get(Kind.DLION_JOB, name)
        if document is None:
            self._runs.close(*name)
            self._memories.pop(name, None)
            return await self._release(name)
        memory = self._memory(name, document)
        if not is_left_alone(document):
            memory.authority = await memory.secret.look(document)
            await memory.children.keep_labels(name)
        await self._look_at_nodes(name, memory)
        decision = decide(self._observed(document, memory), self._settings)
        unmade = memory.children.unmade
        is_due = memory.refusal.is_due(self._monotonic_s())
        try:
            await self._carry_out(decision, document, memory, making=is_due)
            if is_due and memory.refusal.forget():
                decision = decide(self._observed(document, memory), self._settings)
        except RefusedError as error:
            _LOG.warning("%s", error)
            memory.refusal.note(document, error, self._monotonic_s())
            decision = decide(self._observed(document, memory), self._settings)
            await self._carry_out(decision, document, memory, making=False)
        except (ConflictError, ServerError) as error:
            await self._tell_hindrance(error, document, memory)
            raise
        memory.failing_since_s = None
        if memory.hindrance or memory.children.unmade != unmade:
            memory.hindrance = ""
            decision = decide(self._observed(document, memory), self._settings)
        again_s = await self._tell(decision, document, memory)
        await self._post(self._runs.news(_key(document)), document, memory)
        if memory.untold:
            again_s = LOOK_AGAIN_S if again_s is None else min(again_s, LOOK_AGAIN_S)
        if memory.refusal.found is not None:
            retry_s = max(0.0, memory.refusal.retry_at_s - self._monotonic_s())
            return retry_s if again_s is None else min(again_s, retry_s)
        return again_s

    async def _release(self, name: ObjectName) -> float | None:
        """Pods of a job that is gone, on nodes that do not answer; when to look again."""
        pods = leaving(self._store.of_job(Kind.POD, name))
        if not pods:
            self._leaving.pop(name, None)
            return None
        children = Children(self._cluster, self._store, self._monotonic_s)
        terminating_s = self._terminating_s(name, pods)
        nodes = await self._nodes.of({node_of(pod) for pod in overdue(pods, terminating_s)} - {""})
        actions = tuple(released(pods, terminating_s, self._now(), nodes))
        await children.carry_out(actions, name.namespace, making=False)
        return LOOK_AGAIN_S

    async def _look_at_nodes(self, name: ObjectName, memory: JobMemory) -> None:
        """Whether the nodes work whose pods should be gone; what they keep is told of once."""
        pods = leaving(self._store.of_job(Kind.POD, name))
        terminating_s = self._terminating_s(name, pods)
        nodes = {node_of(pod) for pod in overdue(pods, terminating_s)} - {""}
        memory.nodes = await self._nodes.of(nodes)
        kept = {pod.name: node_of(pod) for pod in kept_by_nodes(pods, terminating_s, memory.nodes)}
        for pod in sorted(kept.keys() - memory.kept):
            words = f"pod {pod} does not go, and its node {kept[pod]} is ready: it may still run"
            memory.untold.append(Notice("PodNotReleased", words, "Warning"))
        memory.kept = frozenset(kept)

    def _terminating_s(self, name: ObjectName, pods: list[Document]) -> Mapping[str, float]:
        sightings = self._leaving.setdefault(name, Sightings())
        return sightings.of([str(pod["metadata"]["uid"]) for pod in pods], self._monotonic_s())

    def _memory(self, name: ObjectName, document: Document) -> JobMemory:
        uid = str(document["metadata"]["uid"])
        memory = self._memories.get(name)
        if memory is not None and memory.uid != uid:
            self._runs.close(*name)  # what was served was of another job of that name
        if memory is None or memory.uid != uid:
            memory = self._memories[name] = self._new_memory(uid)
        memory.refusal.hold_against(document)
        return memory

    def _new_memory(self, uid: str) -> JobMemory:
        children = Children(self._cluster, self._store, self._monotonic_s, owner_uid=uid)
        secret = NamedSecret(
            self._cluster, self._settings, now=self._now, monotonic_s=self._monotonic_s
        )
        return JobMemory(uid, children, secret)

    def forget(self) -> None:
        """Remembers of each job that it was there, and nothing of its objects: what the cluster
        holds is another than before, as after a restore of etcd."""
        self._memories = {name: self._new_memory(m.uid) for name, m in self._memories.items()}
        self._leaving.clear()

    async def _tell_hindrance(
        self, error: DLionError, document: Document, memory: JobMemory
    ) -> None:
        """Says in the status what goes on failing, if that at least can be written."""
        now_s = self._monotonic_s()
        if memory.failing_since_s is None:
            memory.failing_since_s = now_s
        if now_s - memory.failing_since_s >= FAILING_AFTER_S:
            memory.hindrance = str(error)
            with suppress(DLionError):
                decision = decide(self._observed(document, memory), self._settings)
                await self._tell(decision, document, memory)

    def _observed(self, document: Document, memory: JobMemory) -> Observed:
        metadata = document["metadata"]
        name = ObjectName(metadata["namespace"], metadata["name"])
        jobs = [job for job in self._store.of_job(Kind.JOB, name) if memory.uid in _owners(job)]
        key = _key(document)
        run = self._runs.view(key)
        all_pods = self._store.of_job(Kind.POD, name)
        going = leaving(all_pods)
        job_uids = {job["metadata"].get("uid") for job in jobs}
        pods = [pod for pod in all_pods if job_uids & set(_owners(pod)) or _is_keeper(pod)]
        services = [
            each for each in self._store.of_job(Kind.SERVICE, name) if memory.uid in _owners(each)
        ]
        return Observed(
            document=document,
            jobs=jobs,
            pods=pods,
            services=services,
            now=self._now(),
            authority_pem=self._runs.authority_pem(),
            run=run,
            elsewhere=NOTHING_KNOWN if run else self._runs.elsewhere(key, _sites(document)),
            refused=memory.refusal.found,
            unmade=memory.children.unmade,
            authority=memory.authority,
            hindrance=memory.hindrance,
            missing_s=memory.missing.of(missing(key, jobs, pods), self._monotonic_s()),
            leaving=going,
            terminating_s=self._terminating_s(name, going),
            nodes=memory.nodes,
            unready_s=memory.unready.of(unready_keepers(pods), self._monotonic_s()),
            keeper=self._store.get(Kind.DEPLOYMENT, ObjectName(name.namespace, keeper_name(key))),
        )

    async def _carry_out(
        self, decision: Decision, document: Document, memory: JobMemory, *, making: bool = True
    ) -> None:
        """`making`: whether objects are made, too; what is refused once is not tried at once."""
        key = _key(document)
        # Workers that train are served whatever the API server says of their objects.
        for action in decision.actions:
            match action:
                case OpenRun(job, workers):
                    self._runs.open(
                        job,
                        workers,
                        spec_hash=action.spec_hash,
                        age_s=action.age_s,
                        failed=action.failed,
                        addresses=action.addresses,
                        authority=action.authority,
                        kept_bundles=action.kept_bundles,
                    )
                case StopRun(reason):
                    self._runs.stop(key, reason)
                case FinishRun(reason, succeeded):
                    self._runs.finish(key, reason, succeeded=succeeded)
                case CloseRun():
                    self._runs.close(key.namespace, key.name)
                case _:
                    pass
        made = await memory.children.carry_out(decision.actions, key.namespace, making=making)
        await self._post(made, document, memory)

    async def _tell(
        self, decision: Decision, document: Document, memory: JobMemory
    ) -> float | None:
        """The one status write, where there is something new to say."""
        if decision.status is None:
            return decision.look_again_s
        patch = merge_patch(document.get("status") or {}, decision.status)
        if not patch:
            return decision.look_again_s
        wait_s = memory.status_written_s + TELEMETRY_EVERY_S - self._monotonic_s()
        if is_telemetry(document.get("status") or {}, patch) and wait_s > 0:
            return wait_s if decision.look_again_s is None else min(wait_s, decision.look_again_s)
        metadata = document["metadata"]
        written = await self._cluster.patch(
            Kind.DLION_JOB,
            metadata["namespace"],
            metadata["name"],
            {"metadata": {"uid": metadata["uid"]}, "status": patch},
            subresource="status",
        )
        memory.status_written_s = self._monotonic_s()
        if written is not None:
            self._store.put(Kind.DLION_JOB, written)
            await self._post(decision.notices, document, memory)
        return decision.look_again_s

    async def _post(self, notices: Iterable[Notice], document: Document, memory: JobMemory) -> None:
        """These, after what could not be told before."""
        memory.untold = await self._notices.post_all(document, [*memory.untold, *notices])


def _key(document: Document) -> JobKey:
    metadata, spec = document["metadata"], document.get("spec") or {}
    return JobKey(metadata["namespace"], metadata["name"], str(spec.get("runId", "")))


def _sites(document: Document) -> list[SiteName]:
    """The names of the manifest's sites, which may be wrong in any way."""
    sites = (document.get("spec") or {}).get("sites")
    named = sites if isinstance(sites, list) else []
    return [SiteName(str(each.get("name"))) for each in named if isinstance(each, dict)]


def _is_keeper(pod: Document) -> bool:
    """A keeper's pod belongs to a ReplicaSet, which is not watched."""
    return (pod["metadata"].get("labels") or {}).get(COMPONENT_LABEL) == KEEPER


def _owners(document: Document) -> list[str]:
    references = document["metadata"].get("ownerReferences") or ()
    return [str(reference.get("uid")) for reference in references]
