"""How other sites reach this one's workers (`spec.network.exposure`), by what came of the Services
that are made for it (`children.exposing`). Pure.

Called by `decide` and `findings`. Workers of one site dial each other's pods all the same: these
addresses are for other sites alone, which hear of them from this site's operator (`site_runs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.addresses import joined
from dlion_api.membership import Member, MemberState
from dlion_api.names import WorkerIdentity
from dlion_api.spec import Job
from dlion_operator import children
from dlion_operator.attempts import Unmade
from dlion_operator.children.pods import owner_of
from dlion_operator.observed import Document, Observed, PodView
from dlion_operator.runs import Run
from dlion_operator.settings import Settings

EXPOSED_WITHIN = timedelta(minutes=5)
"""From the start of a run's Jobs, also after a break: clouds take minutes for a load balancer."""
NO_GATEWAY = (
    "exposure Gateway: this site's operator knows of no gateway; name it in the chart's values"
    " (gateway.address, gateway.route)"
)
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class WorkerAddresses:
    """Where other sites reach one worker, each as `host:port`."""

    exchange: str
    measuring: str


Addresses = Mapping[WorkerIdentity, WorkerAddresses]
"""Those that are known; who is missing cannot be reached yet."""


class WorkerService:
    """One Service of ours that leads to one worker."""

    def __init__(self, document: Document) -> None:
        self.document = document
        metadata = document["metadata"]
        self.name = str(metadata["name"])
        self.uid = str(metadata.get("uid", ""))
        self.labels: Mapping[str, str] = metadata.get("labels") or {}
        self._spec: Document = document.get("spec") or {}
        self._status: Document = document.get("status") or {}

    @property
    def run_id(self) -> str:
        return self.labels.get(names.RUN_LABEL, "")

    @property
    def node_ports(self) -> Mapping[str, int]:
        """By the worker's ports' names; empty unless it has one for each."""
        ports = {each.get("name"): each.get("nodePort") for each in self._spec.get("ports") or ()}
        return ports if all(ports.get(each) for each in (names.EXCHANGE, names.MEASURING)) else {}

    @property
    def load_balancer(self) -> str:
        """Its address or name; empty: it has none yet."""
        for each in (self._status.get("loadBalancer") or {}).get("ingress") or ():
            return str(each.get("ip") or each.get("hostname") or "")
        return ""

    def addresses(self, host: str) -> WorkerAddresses | None:
        """With nodes or a load balancer of that name or address; None: it has no ports there."""
        ports = self.node_ports  # a load balancer's are the same
        if not ports:
            return None
        exchange, measuring = ports[names.EXCHANGE], ports[names.MEASURING]
        return WorkerAddresses(joined(host, exchange), joined(host, measuring))


def is_exposed(job: Job) -> bool:
    """Whether its workers need more than their pods' addresses."""
    return job.spec.network.exposure != "PodNetwork" and len(job.spec.sites) > 1


def worker_services(seen: Observed) -> dict[str, WorkerService]:
    """The Services of workers that there are and that stay, of any run, by name."""
    views = [
        WorkerService(document)
        for document in seen.services
        if document["metadata"]["labels"].get(names.COMPONENT_LABEL) == names.WORKER
        and not document["metadata"].get("deletionTimestamp")
    ]
    return {view.name: view for view in views}


def service_name(run: Run, worker: WorkerIdentity) -> str:
    """Of the Service that leads to that worker."""
    return names.worker_service_name(run.job.key, worker.group, worker.index)


def own_workers(run: Run) -> list[WorkerIdentity]:
    """Those of this site that there should be now; none of a group that waits in a queue, as ports
    and load balancers are dear."""
    waiting = {group.name for group in run.groups if run.waits_in_queue(group.name)}
    here = (worker for worker in run.workers if worker.site == run.site)
    return [worker for worker in here if worker.group not in waiting]


def exposing_objects(
    run: Run, seen: Observed, settings: Settings
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Services of workers that there should be, and what tells a gateway of those there are, each
    with that Service's name."""
    if not is_exposed(run.job):
        return
    there, owner = worker_services(seen), owner_of(seen.document)
    by_gateway = run.job.spec.network.exposure == "Gateway"
    for worker in own_workers(run):
        name = service_name(run, worker)
        service = there.get(name)
        ports = service.node_ports if service else {}
        yield name, children.worker_service(run.job, worker, ports, settings, owner)
        if service and by_gateway and settings.gateway:
            routes = children.worker_routes(run.job, worker, settings.gateway, service.document)
            yield from ((name, route) for route in routes)


def addresses(run: Run, seen: Observed, settings: Settings) -> Addresses | None:
    """Where other sites reach this one's workers; None: at their pods' addresses."""
    if not is_exposed(run.job):
        return None
    services, nodes = worker_services(seen), _nodes(run)
    found = {}
    for worker in own_workers(run):
        name, node = service_name(run, worker), nodes.get(_short_name(worker), "")
        service, unmade = services.get(name), seen.unmade.get(name)
        known = _addresses_of(service, run.job, node, settings) if service else None
        if known is not None and (unmade is None or unmade.is_there):
            found[worker] = known
    return found


def _addresses_of(
    service: WorkerService, job: Job, node: str, settings: Settings
) -> WorkerAddresses | None:
    """Of the worker that it leads to; `node`: the address of its node, empty: it is on none."""
    if job.spec.network.exposure == "Gateway":
        gateway = settings.gateway
        return WorkerAddresses(gateway.address, gateway.address) if gateway else None
    host = service.load_balancer if job.spec.network.exposure == "LoadBalancer" else node
    return service.addresses(settings.advertised_address or host) if host else None


def told_elsewhere(members: Iterable[Member], addresses: Addresses | None) -> tuple[Member, ...]:
    """Members of this site as other sites are to know them, without those that cannot be reached
    from there yet."""
    if addresses is None:
        return tuple(members)
    return tuple(
        replace(member, exchange_address=known.exchange, measuring_address=known.measuring)
        if (known := addresses.get(member.identity))
        else member
        for member in members
        if member.identity in addresses or member.state is not MemberState.READY
    )


def hindrances(run: Run, seen: Observed, settings: Settings) -> list[str]:
    """Why other sites cannot reach some of this one's workers yet, in words.

    A pod that has no node yet is no hindrance of this kind.
    """
    if not is_exposed(run.job):
        return []
    if run.job.spec.network.exposure == "Gateway" and settings.gateway is None:
        return [NO_GATEWAY]
    services = worker_services(seen)
    is_balanced = run.job.spec.network.exposure == "LoadBalancer"
    words = []
    for worker in own_workers(run):
        name = service_name(run, worker)
        why = _hindrance(name, services.get(name), seen.unmade.get(name), is_balanced=is_balanced)
        if why:
            words.append(f"{_short_name(worker)}: out of other sites' reach: {why}")
    return words


def _hindrance(
    name: str, service: WorkerService | None, unmade: Unmade | None, *, is_balanced: bool
) -> str:
    """Why the worker that this Service leads to cannot be reached; empty: nothing is in the way."""
    has_all = service is not None and not (is_balanced and not service.load_balancer)
    if unmade is not None and not (has_all and unmade.is_there):
        return f"{unmade.message}; tried again"
    if service is None:
        return f"Service {name} is not there yet"
    if not has_all:
        return (
            f"Service {name} has no load balancer's address yet; where this cluster has no load"
            " balancer, take exposure NodePort"
        )
    return ""


def is_late(run: Run, now: datetime) -> bool:
    """Whether workers should be reachable by now."""
    return run.started_at is not None and now - run.started_at >= EXPOSED_WITHIN


def _nodes(run: Run) -> dict[str, str]:
    """The address of the node that each worker's newest pod is on, by the worker's short name."""
    pods: dict[str, PodView] = {}
    for pod in sorted(run.pods, key=lambda each: each.made_at or _LONG_AGO):
        if pod.phase not in ("Succeeded", "Failed"):
            pods[pod.worker] = pod
    return {worker: pod.node_address for worker, pod in pods.items()}


def _short_name(worker: WorkerIdentity) -> str:
    """As `PodView.worker` has it."""
    return f"{worker.group}-{worker.index}"
