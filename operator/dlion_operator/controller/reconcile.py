"""Reconcile one job: observe, decide, act, and write the status once.

Every action is idempotent. An action that changes nothing sends no request: a hash on each object
records what was applied.
"""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

from dlion_api.cluster_names import COMPONENT_LABEL, KEEPER, keeper_name
from dlion_api.errors import DLionError
from dlion_api.names import SiteName
from dlion_operator.apply.admission_policy import AdmissionPolicy
from dlion_operator.apply.event_recorder import EventRecorder
from dlion_operator.apply.object_applier import ObjectApplier
from dlion_operator.apply.queue_classes import QueueClasses
from dlion_operator.apply.runtime_reader import RuntimeReader
from dlion_operator.apply.status_patch import is_telemetry, merge_patch, telemetry_interval_s
from dlion_operator.apply.workload_reader import WorkloadReader
from dlion_operator.controller.reconcile_state import ReconcileState
from dlion_operator.kubernetes.client import (
    ConflictError,
    Document,
    Kind,
    KubernetesClient,
    RequestRefusedError,
    ServerError,
)
from dlion_operator.kubernetes.store import ClusterStore, ObjectName, name_of, owner_uids
from dlion_operator.model.durations import DurationTracker
from dlion_operator.model.job_view import job_key
from dlion_operator.model.settings import Settings
from dlion_operator.pki.named_secret import NamedSecret
from dlion_operator.plan.decide import decide, is_unmanaged
from dlion_operator.plan.decisions import (
    CloseRun,
    Decision,
    FinishRun,
    JobEvent,
    OpenRun,
    StopRun,
)
from dlion_operator.plan.missing_pods import missing_pods
from dlion_operator.plan.node_states import read_node_state
from dlion_operator.plan.objects.garbage_collection import (
    disrupted_pods,
    overdue_pods,
    pods_on_ready_nodes,
    release_lost_pods,
    terminating_pods,
)
from dlion_operator.plan.observed import EMPTY_RUN_VIEW, Observed, TerminatingPods
from dlion_operator.plan.queues.dispatching import is_dispatched
from dlion_operator.plan.startup_delays import unready_keepers
from dlion_operator.plan.status_decision import REQUEUE_S
from dlion_operator.served_runs.site_runs import SiteRuns

_LOG = logging.getLogger(__name__)

FAILING_AFTER_S = 60.0
"""Errors that last this long are reported in the job's status."""


class Reconciler:
    def __init__(
        self,
        *,
        cluster: KubernetesClient,
        store: ClusterStore,
        runs: SiteRuns,
        settings: Settings,
        events: EventRecorder,
        namespace: str,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`namespace`: the operator's own, in which the site's runtimes lie."""
        self._namespace = namespace
        self._cluster = cluster
        self._store = store
        self._runs = runs
        self._settings = settings
        self._events = events
        self._now = now
        self._monotonic_s = monotonic_s
        self._policy = AdmissionPolicy(cluster, settings.tenancy.admission_policy, monotonic_s)
        self._classes = QueueClasses(cluster, monotonic_s)
        self._states: dict[ObjectName, ReconcileState] = {}
        self._terminating: dict[ObjectName, DurationTracker[str]] = {}
        """How long each pod has been terminating, also for jobs that are gone."""

    async def reconcile(self, name: ObjectName) -> float | None:
        """Reconcile that job once. Return the seconds until the next pass if nothing happens.

        Raises: DLionError if an action failed; a retry may succeed.
        """
        document = self._store.get(Kind.DLION_JOB, name)
        if document is None:
            self._runs.close(*name)
            self._states.pop(name, None)
            return await self._release_pods(name)
        state = self._state_of(name, document)
        if not is_unmanaged(document):
            state.authority = await state.secret.read(document)
            await self._read_limits(state)
            await state.applier.restore_labels(name)
        elif is_dispatched(document):
            await self._read_limits(state)
        self._report_disruptions(name, state)
        await self._check_nodes(name, state)
        decision = self._decide(state)
        failed_objects = state.applier.failed_objects
        is_due = state.rejection.is_due(self._monotonic_s())
        try:
            await self._execute(decision, state, create=is_due)
            if is_due and state.rejection.reset():
                decision = self._decide(state)
        except RequestRefusedError as error:
            _LOG.warning("%s", error)
            state.rejection.record(document, error, self._monotonic_s())
            decision = self._decide(state)
            await self._execute(decision, state, create=False)
        except (ConflictError, ServerError) as error:
            await self._report_error(error, state)
            raise
        state.failing_since_s = None
        if state.last_error or state.applier.failed_objects != failed_objects:
            state.last_error = ""
            decision = self._decide(state)
        requeue_s = await self._write_status(decision, state)
        await self._post_events(self._runs.events(job_key(document)), state)
        if state.unposted_events:
            requeue_s = _sooner(requeue_s, REQUEUE_S)
        if state.rejection.rejected is not None:
            retry_s = max(0.0, state.rejection.retry_at_s - self._monotonic_s())
            return _sooner(requeue_s, retry_s)
        return requeue_s

    async def _read_limits(self, state: ReconcileState) -> None:
        """Read what decides which pods the job may have, and when."""
        await self._read_runtime(state)
        await self._read_queue(state)
        state.policy_since = await self._policy.since(state.document)

    async def _read_runtime(self, state: ReconcileState) -> None:
        before = state.runtime
        state.runtime = now = await state.runtimes.read(state.document, self._jobs_of(state))
        if before is not None and now is not None and now.runtime != before.runtime:
            state.rejection.reset()  # the objects may be others now: they are tried at once

    def _jobs_of(self, state: ReconcileState) -> list[Document]:
        jobs = self._store.of_job(Kind.JOB, name_of(state.document))
        return [job for job in jobs if state.uid in owner_uids(job)]

    async def _read_queue(self, state: ReconcileState) -> None:
        runtime = state.runtime.runtime if state.runtime else None
        state.queue = await state.workload.read(state.document, runtime)

    async def _release_pods(self, name: ObjectName) -> float | None:
        """Release pods of a deleted job on lost nodes. Return when to check again."""
        terminating = await self._with_nodes(self._terminating_pods(name))
        if not terminating.documents:
            self._terminating.pop(name, None)
            return None
        applier = ObjectApplier(self._cluster, self._store, self._monotonic_s)
        actions = tuple(release_lost_pods(terminating, self._now()))
        await applier.execute(actions, name.namespace, create=False)
        return REQUEUE_S

    def _report_disruptions(self, name: ObjectName, state: ReconcileState) -> None:
        """Warn once about each pod that Kubernetes ends: its own documents go with the pod."""
        disrupted = disrupted_pods(self._store.of_job(Kind.POD, name))
        for pod in disrupted:
            if pod.uid not in state.disrupted_pods:
                message = f"pod {pod.name} was evicted: {pod.disruption}"
                state.unposted_events.append(JobEvent("PodEvicted", message, "Warning"))
        state.disrupted_pods = frozenset(pod.uid for pod in disrupted)

    async def _check_nodes(self, name: ObjectName, state: ReconcileState) -> None:
        """Check the nodes of overdue pods. Warn once about pods that stay on a working node."""
        terminating = await self._with_nodes(self._terminating_pods(name))
        state.nodes = terminating.nodes
        blocked_pods = {pod.name: pod.node for pod in pods_on_ready_nodes(terminating)}
        for pod in sorted(blocked_pods.keys() - state.blocked_pods):
            message = (
                f"pod {pod} does not terminate, and its node {blocked_pods[pod]} is ready: "
                "it may still run"
            )
            state.unposted_events.append(JobEvent("PodNotReleased", message, "Warning"))
        state.blocked_pods = frozenset(blocked_pods)

    def _terminating_pods(self, name: ObjectName) -> TerminatingPods:
        pods = terminating_pods(self._store.of_job(Kind.POD, name))
        tracker = self._terminating.setdefault(name, DurationTracker())
        uids = [str(pod["metadata"]["uid"]) for pod in pods]
        return TerminatingPods(pods, tracker.of(uids, self._monotonic_s()))

    async def _with_nodes(self, terminating: TerminatingPods) -> TerminatingPods:
        """Read the states of nodes with overdue pods, which needs cluster-wide rights."""
        if self._settings.namespaces:
            return terminating
        names = {pod.node for pod in overdue_pods(terminating)} - {""}
        nodes = {name: await read_node_state(self._cluster, name) for name in sorted(names)}
        return replace(terminating, nodes=nodes)

    def _state_of(self, name: ObjectName, document: Document) -> ReconcileState:
        uid = str(document["metadata"]["uid"])
        state = self._states.get(name)
        if state is not None and state.uid != uid:
            self._runs.close(*name)  # the served run belongs to an earlier job of that name
        if state is None or state.uid != uid:
            state = self._states[name] = self._new_state(document)
        state.document = document
        state.rejection.reset_if_changed(document)
        return state

    def _new_state(self, document: Document) -> ReconcileState:
        uid = str(document["metadata"]["uid"])
        applier = ObjectApplier(self._cluster, self._store, self._monotonic_s, owner_uid=uid)
        secret = NamedSecret(
            self._cluster, self._settings, now=self._now, monotonic_s=self._monotonic_s
        )
        workload = WorkloadReader(
            self._cluster, self._store, self._classes, self._settings, self._monotonic_s
        )
        runtimes = RuntimeReader(self._cluster, self._settings, self._namespace, self._monotonic_s)
        return ReconcileState(document, applier, secret, workload, runtimes)

    def reset(self) -> None:
        """Forget all objects, but not which jobs exist. Needed when the cluster's state has gone
        back, as after a restore of etcd."""
        states = self._states.items()
        self._states = {name: self._new_state(state.document) for name, state in states}
        self._terminating.clear()

    async def _report_error(self, error: DLionError, state: ReconcileState) -> None:
        """Report a lasting error in the status, if at least that can be written."""
        now_s = self._monotonic_s()
        if state.failing_since_s is None:
            state.failing_since_s = now_s
        if now_s - state.failing_since_s >= FAILING_AFTER_S:
            state.last_error = str(error)
            with suppress(DLionError):
                await self._write_status(self._decide(state), state)

    def _decide(self, state: ReconcileState) -> Decision:
        return decide(self._observed(state), self._settings)

    def _observed(self, state: ReconcileState) -> Observed:
        document, name = state.document, name_of(state.document)
        jobs = self._jobs_of(state)
        key = job_key(document)
        run = self._runs.view(key)
        all_pods = self._store.of_job(Kind.POD, name)
        job_uids = {job["metadata"].get("uid") for job in jobs}
        pods = [pod for pod in all_pods if job_uids & owner_uids(pod) or _is_keeper(pod)]
        services = self._store.of_job(Kind.SERVICE, name)
        return Observed(
            document=document,
            jobs=jobs,
            pods=pods,
            services=[each for each in services if state.uid in owner_uids(each)],
            now=self._now(),
            authority_pem=self._runs.authority_pem(),
            run=run,
            remote_view=EMPTY_RUN_VIEW if run else self._runs.remote_view(key, _sites(document)),
            rejected=state.rejection.rejected,
            failed_objects=state.applier.failed_objects,
            authority=state.authority,
            queue=state.queue,
            runtime=state.runtime,
            policy_since=state.policy_since,
            last_error=state.last_error,
            missing_s=state.missing.of(missing_pods(key, jobs, pods), self._monotonic_s()),
            terminating=replace(self._terminating_pods(name), nodes=state.nodes),
            unready_s=state.unready.of(unready_keepers(pods), self._monotonic_s()),
            keeper=self._store.get(Kind.DEPLOYMENT, ObjectName(name.namespace, keeper_name(key))),
        )

    async def _execute(self, decision: Decision, state: ReconcileState, *, create: bool) -> None:
        """Carry out a decision. `create` is False directly after a rejection: then no objects are
        created."""
        key = job_key(state.document)
        # Serve training workers even if the API server rejects their objects.
        for action in decision.actions:
            match action:
                case OpenRun():
                    self._runs.open(action)
                case StopRun(reason):
                    self._runs.stop(key, reason)
                case FinishRun(reason, succeeded):
                    self._runs.note(key, decision.events)  # the keeper reads no more after it
                    self._runs.finish(key, reason, succeeded=succeeded)
                case CloseRun():
                    self._runs.close(key.namespace, key.name)
                case _:
                    pass
        made = await state.applier.execute(decision.actions, key.namespace, create=create)
        self._runs.note(key, [*made, *decision.events])
        await self._post_events(made, state)

    async def _write_status(self, decision: Decision, state: ReconcileState) -> float | None:
        """Write the status, if it has changed. This is the only status write."""
        if decision.status is None:
            return decision.requeue_after_s
        before, metadata = state.document.get("status") or {}, state.document["metadata"]
        patch = merge_patch(before, decision.status)
        if not patch:
            return decision.requeue_after_s
        now_s = self._monotonic_s()
        if now_s < state.telemetry_at_s and is_telemetry(before, patch):
            return _sooner(decision.requeue_after_s, state.telemetry_at_s - now_s)
        written = await self._cluster.patch(
            Kind.DLION_JOB,
            metadata["namespace"],
            metadata["name"],
            {"metadata": {"uid": metadata["uid"]}, "status": patch},
            subresource="status",
        )
        state.status_written_s = now_s = self._monotonic_s()
        written_s = (each.status_written_s for each in self._states.values())
        state.telemetry_at_s = now_s + telemetry_interval_s(written_s, now_s)
        if written is not None:
            self._store.put(Kind.DLION_JOB, written)
            await self._post_events(decision.events, state)
        return decision.requeue_after_s

    async def _post_events(self, events: Iterable[JobEvent], state: ReconcileState) -> None:
        """Post these events, after earlier unposted ones."""
        pending = [*state.unposted_events, *events]
        state.unposted_events = await self._events.post_all(state.document, pending)


def _sooner(requeue_s: float | None, other_s: float) -> float:
    return other_s if requeue_s is None else min(requeue_s, other_s)


def _sites(document: Document) -> list[SiteName]:
    """The site names in a manifest that may be invalid in any way."""
    sites = (document.get("spec") or {}).get("sites")
    named = sites if isinstance(sites, list) else []
    return [SiteName(str(each.get("name"))) for each in named if isinstance(each, dict)]


def _is_keeper(pod: Document) -> bool:
    """A keeper's pod belongs to a ReplicaSet, which is not watched."""
    return (pod["metadata"].get("labels") or {}).get(COMPONENT_LABEL) == KEEPER
