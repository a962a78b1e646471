"""A whole operator: what runs between kopf's start and its end, put together.

Owns the order in which parts start and end. Called by `__main__` and `handlers`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from dlion_api.errors import DLionError
from dlion_api.names import SiteName
from dlion_operator.authority import Authority
from dlion_operator.authority_secret import keep_renewing, kept_authority, show_bundle
from dlion_operator.cluster import Document, Kind
from dlion_operator.coordinator import CoordinatorServer
from dlion_operator.decide import MANAGED_BY
from dlion_operator.federation.node import FederationNode
from dlion_operator.health import Health, serve_health, serve_metrics
from dlion_operator.kubernetes_api import KubernetesApi, connect
from dlion_operator.lease import Leases
from dlion_operator.leased_cluster import LeasedCluster
from dlion_operator.loops import Loops
from dlion_operator.metrics import FederationMetrics, JobMetrics, LeaseMetrics, OperatorMetrics
from dlion_operator.notices import Notices
from dlion_operator.pod_tokens import FoundPod, Keys, Owner, PodTokens
from dlion_operator.reconcile import Reconciler
from dlion_operator.resync import Resync
from dlion_operator.settings import Settings
from dlion_operator.site_runs import SiteRuns
from dlion_operator.store import ObjectName, Store, job_of
from dlion_operator.tidying import leaving

_LOG = logging.getLogger(__name__)


class StoredPods:
    """The pods that the watches brought, as tokens are held against them."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def find(self, namespace: str, name: str, uid: str) -> FoundPod | None:
        """That very pod; None: there is none, or it has ended."""
        pod = self._store.get(Kind.POD, ObjectName(namespace, name))
        if pod is None or pod["metadata"].get("uid") != uid:
            return None
        if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            return None
        return FoundPod(pod["metadata"].get("labels") or {}, self._owner(pod))

    def _owner(self, pod: Document) -> Owner | None:
        """Its controller, which has to be the very Job of that name where it says that it is one.
        ReplicaSets are not read here."""
        references = pod["metadata"].get("ownerReferences") or ()
        found = next((each for each in references if each.get("controller")), None)
        if found is None:
            return None
        owner = Owner(str(found.get("kind")), str(found.get("name")))
        if owner.kind == "Job":
            job = self._store.get(Kind.JOB, ObjectName(pod["metadata"]["namespace"], owner.name))
            if job is None or job["metadata"].get("uid") != found.get("uid"):
                return None
        return owner


class SiteOperator:
    """One site's operator. All of it runs in kopf's event loop."""

    def __init__(
        self, settings: Settings, *, namespace: str, identity: str, kubeconfig: Path | None
    ) -> None:
        """`namespace` is the operator's own, `identity` its name among operators (`lease`);
        `kubeconfig` None: the cluster that it runs in."""
        self.store = Store()
        self._settings = settings
        self._namespace = namespace
        self._identity = identity
        self._kubeconfig = kubeconfig
        self._metrics = OperatorMetrics()
        self._loops: Loops | None = None
        self._parts = AsyncExitStack()
        self.failure: DLionError | OSError | None = None
        """Why it could not start."""

    def trigger(self, name: ObjectName) -> None:
        """Something may have changed for that job."""
        if self._loops is not None:
            self._loops.trigger(name)

    async def start(self) -> None:
        """Starts every part. Raises: DLionError, OSError; what has started is ended by `stop`."""
        try:
            await self._start()
        except (DLionError, OSError) as error:
            self.failure = error
            raise

    async def _start(self) -> None:
        settings = self._settings
        cluster = KubernetesApi(
            await connect(None if self._kubeconfig is None else str(self._kubeconfig)),
            self._metrics.api_error,
        )
        self._parts.push_async_callback(cluster.close)
        authority = await kept_authority(cluster, settings, self._namespace)
        await show_bundle(cluster, settings, self._namespace, authority)
        server = CoordinatorServer(f"[::]:{settings.coordinator.port}", authority)
        await server.start()
        self._parts.push_async_callback(server.shut_down)

        async def keys() -> Keys:
            return Keys(await cluster.signing_keys(), await cluster.issuer())

        tokens = PodTokens(StoredPods(self.store), keys, now=cluster.now)
        runs = SiteRuns(server, authority=authority, tokens=tokens, trigger=self.trigger)
        leases = Leases(
            cluster,
            self._identity,
            wanted=self._namespaces_of_jobs,
            on_held=self._look_at_all_in,
            now=cluster.now,
        )
        self._parts.push_async_callback(leases.release)
        reconciler = self._reconcile(cluster, runs, leases)

        def restored() -> None:
            self._metrics.restored()
            reconciler.forget()

        resync = Resync(cluster, self.store, settings.namespaces, self.trigger, restored)
        await resync.first()
        node = await self._federate(authority, server, runs)

        def replace_authority(successor: Authority) -> None:
            runs.replace_authority(successor)
            if node is not None:
                node.replace_authority(successor)

        renewing = keep_renewing(cluster, settings, self._namespace, authority, replace_authority)
        self._metrics.registry.register(LeaseMetrics(leases.held))
        await self._serve(runs, resync, node, (resync.run(), renewing, leases.run()))
        _LOG.info("site %s: serving workers on port %d", settings.site, settings.coordinator.port)

    def _reconcile(self, cluster: KubernetesApi, runs: SiteRuns, leases: Leases) -> Reconciler:
        """Begins to look at jobs, where their Leases are held."""
        leased = LeasedCluster(cluster, leases)
        reconciler = Reconciler(
            cluster=leased,
            store=self.store,
            runs=runs,
            settings=self._settings,
            notices=Notices(leased, cluster.now),
            now=cluster.now,
        )

        async def look(name: ObjectName) -> float | None:
            if self._has_work(name) and not leases.holds(name.namespace):
                return None  # it is looked at once the Lease is held
            return await reconciler.reconcile(name)

        self._loops = Loops(look, self._is_known, self._metrics.reconciled)
        self._parts.push_async_callback(self._loops.close)
        return reconciler

    async def _federate(
        self, authority: Authority, server: CoordinatorServer, runs: SiteRuns
    ) -> FederationNode | None:
        """The federation with the other sites; None: this site knows no other."""
        federation, sites = self._settings.federation, self._settings.remote_sites
        if federation is None or not sites:
            return None
        node = FederationNode(
            authority,
            sites,
            certificate_life=timedelta(seconds=federation.certificate_life_seconds),
            reports=runs.reports,
            on_news=runs.hear,
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
        runs: SiteRuns,
        resync: Resync,
        node: FederationNode | None,
        tasks: Sequence[Coroutine[Any, Any, None]],
    ) -> None:
        self._metrics.registry.register(
            JobMetrics(
                self.store,
                site=SiteName(self._settings.site),
                refusals=runs.refusals,
                calls=runs.calls,
                keeper_refusals=runs.keeper_refusals,
                watch_age_s=lambda: time.monotonic() - resync.confirmed_s,
            )
        )
        federation = self._settings.federation
        may_measure = federation is not None and federation.measure_on_demand
        measure = node.bandwidth if node is not None and may_measure else None
        health = Health(self._metrics, lambda: resync.stale_rounds, lambda: resync.has_gone_back)
        for runner in (
            await serve_metrics(self._metrics.registry, self._settings.metrics_port, measure),
            await serve_health(health, self._settings.health_port),
        ):
            self._parts.push_async_callback(runner.cleanup)
        for part in (*tasks, health.tick()):
            task = asyncio.create_task(part)
            self._parts.push_async_callback(_ended, task)
        health.ready = True

    async def stop(self) -> None:
        """Ends every part, the last that was started first. Workers train on."""
        await self._parts.aclose()

    def _namespaces_of_jobs(self) -> set[str]:
        """Those in which there is something to act on."""
        pods = leaving(self.store.all(Kind.POD))
        of_pods = {str(pod["metadata"]["namespace"]) for pod in pods}
        return of_pods | {name.namespace for name in self.store.jobs() if self._is_ours(name)}

    def _look_at_all_in(self, namespace: str) -> None:
        pods = leaving(self.store.all(Kind.POD))
        for name in {*self.store.jobs(), *(job_of(Kind.POD, pod) for pod in pods)}:
            if name.namespace == namespace:
                self.trigger(name)

    def _has_work(self, name: ObjectName) -> bool:
        """Whether a look may lead to writes; else nothing is left but to forget the job."""
        return self._is_ours(name) or bool(leaving(self.store.of_job(Kind.POD, name)))

    def _is_ours(self, name: ObjectName) -> bool:
        """Whether there is such a job, and no other controller is to act on it."""
        job = self.store.get(Kind.DLION_JOB, name)
        if job is None:
            return False
        return str((job.get("spec") or {}).get("managedBy", MANAGED_BY)) == MANAGED_BY

    def _is_known(self, name: ObjectName) -> bool:
        return self.store.get(Kind.DLION_JOB, name) is not None


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
