"""A complete operator: everything that runs between kopf's start and its end, in order."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from dlion_operator.apply.event_recorder import EventRecorder
from dlion_operator.controller.health import HealthMonitor, serve_health, serve_metrics
from dlion_operator.controller.metrics import (
    FederationMetrics,
    JobMetrics,
    OperatorMetrics,
)
from dlion_operator.controller.reconcile import Reconciler
from dlion_operator.controller.work_queue import WorkQueue
from dlion_operator.coordinator import CoordinatorServer
from dlion_operator.federation.node import FederationNode
from dlion_operator.kubernetes.api import KubernetesApi, connect
from dlion_operator.kubernetes.client import Kind
from dlion_operator.kubernetes.lease import LeasedCluster, Leases
from dlion_operator.kubernetes.resync import Resync, watched_kinds
from dlion_operator.kubernetes.store import ClusterStore, ObjectName, job_of
from dlion_operator.model.settings import Settings
from dlion_operator.pki.authority import CertificateAuthority
from dlion_operator.pki.authority_secret import AuthoritySecret
from dlion_operator.pki.pod_tokens import PodTokens
from dlion_operator.plan.decide import is_managed_here
from dlion_operator.plan.objects.garbage_collection import terminating_pods
from dlion_operator.plan.queues.dispatching import is_dispatched
from dlion_operator.served_runs.site_runs import SiteRuns

_LOG = logging.getLogger(__name__)


class SiteOperator:
    """One site's operator. It runs entirely in kopf's event loop."""

    def __init__(
        self, settings: Settings, *, namespace: str, identity: str, kubeconfig: Path | None
    ) -> None:
        """`namespace` is the operator's own, `identity` its name among operators (`lease`).
        `kubeconfig` None: the cluster that it runs in."""
        self.store = ClusterStore()
        self.watched = watched_kinds(queues_jobs=settings.kueue)
        self._settings = settings
        self._namespace = namespace
        self._identity = identity
        self._kubeconfig = kubeconfig
        self._metrics = OperatorMetrics()
        self._queue: WorkQueue | None = None
        self._parts = AsyncExitStack()
        self.failure: Exception | None = None
        """Why it could not start."""

    def trigger(self, name: ObjectName) -> None:
        if self._queue is not None:
            self._queue.trigger(name)

    async def start(self) -> None:
        """Start every part. Raises: DLionError, OSError; `stop` ends the parts that have
        started."""
        try:
            await self._start()
        except Exception as error:
            self.failure = error
            raise

    async def _start(self) -> None:
        settings = self._settings
        cluster = KubernetesApi(
            await connect(None if self._kubeconfig is None else str(self._kubeconfig)),
            self._metrics.api_error,
        )
        self._parts.push_async_callback(cluster.close)
        secret = AuthoritySecret(cluster, settings, self._namespace)
        authority = await secret.load()
        await secret.publish(authority)
        server = CoordinatorServer(f"[::]:{settings.coordinator.port}", authority)
        await server.start()
        self._parts.push_async_callback(server.shut_down)
        tokens = PodTokens(self.store, cluster.signing_keys, now=cluster.now)
        runs = SiteRuns(server, authority=authority, tokens=tokens, trigger=self.trigger)
        leases = Leases(
            cluster,
            self._identity,
            wanted=self._namespaces_of_jobs,
            on_held=self._trigger_namespace,
            on_older=lambda: resync.suspect_restore(),
            now=cluster.now,
        )
        self._parts.push_async_callback(leases.release)
        reconciler = self._reconcile(cluster, runs, leases)

        resync = await self._load_objects(cluster, reconciler)
        node = await self._federate(authority, server, runs)

        def replace_authority(successor: CertificateAuthority) -> None:
            runs.replace_authority(successor)
            if node is not None:
                node.credentials.replace_authority(successor)

        renewing = secret.maintain(authority, replace_authority)
        self._metrics.registry.register(
            JobMetrics(
                self.store,
                server,
                site=authority.site,
                leases_held=leases.held,
                watch_age_s=lambda: time.monotonic() - resync.confirmed_s,
            )
        )
        tasks = (resync.run(), resync.list_missing(), renewing, leases.run())
        await self._serve(resync, node, tasks)
        _LOG.info("site %s: serving workers on port %d", settings.site, settings.coordinator.port)

    def _reconcile(self, cluster: KubernetesApi, runs: SiteRuns, leases: Leases) -> Reconciler:
        """Start to reconcile jobs, where their Leases are held."""
        leased = LeasedCluster(cluster, leases)
        reconciler = Reconciler(
            cluster=leased,
            store=self.store,
            runs=runs,
            settings=self._settings,
            events=EventRecorder(leased, cluster.now),
            namespace=self._namespace,
            now=cluster.now,
        )

        async def reconcile(name: ObjectName) -> float | None:
            # Otherwise the job only has to be forgotten, and nothing is written.
            pods = terminating_pods(self.store.of_job(Kind.POD, name))
            if (self._is_ours(name) or pods) and not leases.holds(name.namespace):
                return None  # a pass follows once the Lease is held
            return await reconciler.reconcile(name)

        def is_known(name: ObjectName) -> bool:
            return self.store.get(Kind.DLION_JOB, name) is not None

        self._queue = WorkQueue(reconcile, is_known, self._metrics.reconciled)
        self._parts.push_async_callback(self._queue.close)
        return reconciler

    async def _load_objects(self, cluster: KubernetesApi, reconciler: Reconciler) -> Resync:
        """Load the store, and return what compares it with lists from then on."""

        def restored() -> None:
            self._metrics.restores.inc()
            reconciler.reset()

        namespaces, kinds = self._settings.namespaces, self.watched
        resync = Resync(cluster, self.store, namespaces, self.trigger, restored, kinds=kinds)
        await resync.load()
        return resync

    async def _federate(
        self, authority: CertificateAuthority, server: CoordinatorServer, runs: SiteRuns
    ) -> FederationNode | None:
        """Start the federation with the other sites. None: no other site is configured."""
        federation, sites = self._settings.federation, self._settings.remote_sites
        if federation is None or not sites:
            return None
        node = FederationNode(
            authority,
            sites,
            certificate_life=timedelta(seconds=federation.certificate_life_seconds),
            reports=runs.reports,
            on_run_changed=runs.update_remote,
            on_bundles=server.trust,
        )
        runs.federate(node)
        node.service.on_refused = runs.refused_callers.at_federation
        self._parts.push_async_callback(node.close)
        await node.start(f"[::]:{federation.port}")
        self._metrics.registry.register(FederationMetrics(node))
        _LOG.info(
            "site %s: federated on port %d with %s",
            authority.site,
            federation.port,
            ", ".join(site.name for site in sites),
        )
        return node

    async def _serve(
        self,
        resync: Resync,
        node: FederationNode | None,
        tasks: Sequence[Coroutine[Any, Any, None]],
    ) -> None:
        federation = self._settings.federation
        may_measure = federation is not None and federation.measure_on_demand
        measure = node.meter.bandwidth if node is not None and may_measure else None
        health = HealthMonitor(self._metrics, resync)
        for runner in (
            await serve_metrics(self._metrics.registry, self._settings.metrics_port, measure),
            await serve_health(health, self._settings.health_port),
        ):
            self._parts.push_async_callback(runner.cleanup)
        for part in (*tasks, health.tick()):
            task = asyncio.create_task(part)
            self._parts.push_async_callback(_cancel, task)
        health.ready = True

    async def stop(self) -> None:
        """End every part, in reverse order of starting. Workers continue training."""
        await self._parts.aclose()

    def _namespaces_of_jobs(self) -> set[str]:
        pods = terminating_pods(self.store.all(Kind.POD))
        of_pods = {str(pod["metadata"]["namespace"]) for pod in pods}
        return of_pods | {name.namespace for name in self.store.jobs() if self._is_ours(name)}

    def _trigger_namespace(self, namespace: str) -> None:
        pods = terminating_pods(self.store.all(Kind.POD))
        for name in {*self.store.jobs(), *(job_of(Kind.POD, pod) for pod in pods)}:
            if name.namespace == namespace:
                self.trigger(name)

    def _is_ours(self, name: ObjectName) -> bool:
        """Whether the job exists and this operator writes objects or status of it."""
        job = self.store.get(Kind.DLION_JOB, name)
        return job is not None and (is_managed_here(job) or is_dispatched(job))


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
