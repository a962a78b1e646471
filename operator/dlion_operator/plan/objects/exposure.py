"""How other sites reach this site's workers (`spec.network.exposure`). Pure.

The addresses follow from the workers' Services (`children`). They are for other sites
only: workers of one site dial each other's pods.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.addresses import join_host_port
from dlion_api.names import WorkerIdentity
from dlion_api.protocol.membership import Member, MemberState
from dlion_api.spec import Job
from dlion_operator.children.exposed_workers import worker_routes, worker_service
from dlion_operator.model.job_view import ObjectView
from dlion_operator.plan.observed import Observed, PodView
from dlion_operator.plan.runs import Run

EXPOSURE_TIMEOUT = timedelta(minutes=5)
"""Timeout from the start or resumption of a run's Jobs. Clouds need minutes for a load balancer."""
NO_GATEWAY = (
    "exposure Gateway: this site's operator knows of no gateway; name it in the chart's values"
    " (gateway.address, gateway.route)"
)
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class WorkerAddresses:
    """The addresses of one worker for other sites, each as `host:port`."""

    exchange: str
    measuring: str


Addresses = Mapping[WorkerIdentity, WorkerAddresses]
"""The known addresses. A worker without one cannot be reached yet."""


class WorkerService(ObjectView):
    @property
    def node_ports(self) -> Mapping[str, int]:
        """Node ports by port name. Empty unless all ports have one."""
        ports = {each.get("name"): each.get("nodePort") for each in self._spec.get("ports") or ()}
        return ports if all(ports.get(each) for each in (names.EXCHANGE, names.MEASURING)) else {}

    @property
    def load_balancer(self) -> str:
        """Address or host name of its load balancer. Empty: none yet."""
        for each in (self._status.get("loadBalancer") or {}).get("ingress") or ():
            return str(each.get("ip") or each.get("hostname") or "")
        return ""

    def addresses(self, host: str) -> WorkerAddresses | None:
        """The worker's addresses at that host, or None while there are no ports."""
        ports = self.node_ports  # a load balancer's are the same
        if not ports:
            return None
        exchange, measuring = ports[names.EXCHANGE], ports[names.MEASURING]
        return WorkerAddresses(join_host_port(host, exchange), join_host_port(host, measuring))


def is_exposed(job: Job) -> bool:
    """Whether the job's workers need more than their pods' addresses."""
    return job.spec.network.exposure != "PodNetwork" and len(job.spec.sites) > 1


def worker_services(observed: Observed) -> dict[str, WorkerService]:
    """Existing worker Services of any run that are not being deleted, by name."""
    views = map(WorkerService, observed.services)
    return {
        view.name: view
        for view in views
        if view.component == names.WORKER and not view.document["metadata"].get("deletionTimestamp")
    }


def service_name(run: Run, worker: WorkerIdentity) -> str:
    return names.worker_service_name(run.job.key, worker.group, worker.index)


def local_workers(run: Run) -> list[WorkerIdentity]:
    """The current workers of this site, without groups that wait in a queue. Ports and load
    balancers are expensive."""
    waiting = {group.name for group in run.groups if run.is_queued(group.name)}
    here = (worker for worker in run.workers if worker.site == run.site)
    return [worker for worker in here if worker.group not in waiting]


def exposing_objects(run: Run) -> Iterator[tuple[str, dict[str, Any]]]:
    """Services of current workers, and gateway routes for existing Services, each with its
    Service's name."""
    if not is_exposed(run.job):
        return
    there, owner = worker_services(run.observed), run.owner
    by_gateway = run.job.spec.network.exposure == "Gateway"
    for worker in local_workers(run):
        name = service_name(run, worker)
        service = there.get(name)
        ports = service.node_ports if service else {}
        yield name, worker_service(run.job, worker, ports, run.settings, owner)
        if service and by_gateway and run.settings.gateway:
            routes = worker_routes(run.job, worker, run.settings.gateway, service.document)
            yield from ((name, route) for route in routes)


def addresses(run: Run) -> Addresses | None:
    """Addresses of this site's workers for other sites. None: their pods' addresses."""
    if not is_exposed(run.job):
        return None
    services, nodes = worker_services(run.observed), _nodes(run)
    known_addresses = {}
    for worker in local_workers(run):
        name, node = service_name(run, worker), nodes.get(_short_name(worker), "")
        service, failed_object = services.get(name), run.observed.failed_objects.get(name)
        known = _addresses_of(run, service, node) if service else None
        if known is not None and (failed_object is None or failed_object.exists):
            known_addresses[worker] = known
    return known_addresses


def _addresses_of(run: Run, service: WorkerService, node: str) -> WorkerAddresses | None:
    """Addresses of that Service's worker. `node`: its node's address, or empty."""
    exposure, gateway = run.job.spec.network.exposure, run.settings.gateway
    if exposure == "Gateway":
        return WorkerAddresses(gateway.address, gateway.address) if gateway else None
    host = service.load_balancer if exposure == "LoadBalancer" else node
    return service.addresses(run.settings.advertised_address or host) if host else None


def advertised_members(
    members: Iterable[Member], addresses: Addresses | None
) -> tuple[Member, ...]:
    """Members of this site for other sites, without those that cannot be reached from there yet."""
    if addresses is None:
        return tuple(members)
    return tuple(
        replace(member, exchange_address=known.exchange, measuring_address=known.measuring)
        if (known := addresses.get(member.identity))
        else member
        for member in members
        if member.identity in addresses or member.state is not MemberState.READY
    )


def exposure_problems(run: Run) -> list[str]:
    """Messages on why other sites cannot reach some workers of this site yet.

    A pod without a node is not such a problem.
    """
    if not is_exposed(run.job):
        return []
    if run.job.spec.network.exposure == "Gateway" and run.settings.gateway is None:
        return [NO_GATEWAY]
    services = worker_services(run.observed)
    whys = {w: _exposure_problem(run, service_name(run, w), services) for w in local_workers(run)}
    return [
        f"{_short_name(worker)}: unreachable from other sites: {why}"
        for worker, why in whys.items()
        if why
    ]


def _exposure_problem(run: Run, name: str, services: Mapping[str, WorkerService]) -> str:
    """Why the worker with the Service of that name cannot be reached. Empty: it can."""
    service, failed_object = services.get(name), run.observed.failed_objects.get(name)
    is_balanced = run.job.spec.network.exposure == "LoadBalancer"
    has_all = service is not None and not (is_balanced and not service.load_balancer)
    if failed_object is not None and not (has_all and failed_object.exists):
        return f"{failed_object.message}; retrying"
    if service is None:
        return f"Service {name} does not exist yet"
    if not has_all:
        return (
            f"Service {name} has no load balancer address yet; where this cluster has no load"
            " balancer, use exposure NodePort"
        )
    return ""


def is_exposure_overdue(run: Run) -> bool:
    """Whether workers should be reachable by now."""
    return run.started_at is not None and run.observed.now - run.started_at >= EXPOSURE_TIMEOUT


def _nodes(run: Run) -> dict[str, str]:
    """Node address of each worker's newest pod, by short name."""
    pods: dict[str, PodView] = {}
    for pod in sorted(run.pods, key=lambda each: each.created_at or _LONG_AGO):
        if not pod.is_finished:
            pods[pod.worker] = pod
    return {worker: pod.node_address for worker, pod in pods.items()}


def _short_name(worker: WorkerIdentity) -> str:
    """The worker's short name, as in `PodView.worker`."""
    return f"{worker.group}-{worker.index}"
