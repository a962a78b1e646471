"""Checks a job's requirements at one site: exposure of its workers, capacity and images."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from dlion_api.cluster_names import EXCHANGE_PORT, MEASURING_PORT
from dlion_api.errors import DLionError
from dlion_api.spec import Job
from dlion_api.spec.sites import Group, Site
from dlion_api.status.conditions import Reason
from dlion_cli.cluster.documents import mapping_of, mappings_in
from dlion_cli.cluster.node_capacity import group_capacities
from dlion_cli.preflight_checks.checks import Check, CheckOutcome
from dlion_cli.preflight_checks.site_checks import query_error_check
from dlion_cli.preflight_checks.site_cluster import OperatorSnapshot, SiteCluster
from dlion_operator.children.strategic_merge import merged

_ENDPOINTS: Final = {
    "PodNetwork": ("pods", f"ports {EXCHANGE_PORT} and {MEASURING_PORT}"),
    "NodePort": ("nodes", "two node ports for each worker"),
    "LoadBalancer": ("load balancers", "two ports for each worker"),
}
"""Hosts and ports that other sites' workers connect to, by exposure."""


def capacity_checks(cluster: SiteCluster, site: Site, job: Job) -> list[Check]:
    """The checks of a site of the job."""
    if isinstance(cluster.operator, DLionError) or cluster.nodes is None:
        return []
    settings = cluster.operator.settings
    checks = [_exposure(cluster.operator, site, job)] if len(job.spec.sites) > 1 else []
    return [*checks, _capacity(cluster, site, job, settings), _images(cluster, site, job, settings)]


def _exposure(operator: OperatorSnapshot, site: Site, job: Job) -> Check:
    """Whether the site can expose workers as the job requires; before a run nothing listens."""
    exposure = job.spec.network.exposure
    if exposure != "Gateway":
        hosts, ports = _ENDPOINTS[exposure]
        if exposure != "PodNetwork":
            hosts = operator.settings.get("advertisedAddress") or hosts
        observed = f"{exposure}: other sites connect to its {hosts}, at {ports}"
        advice = (
            "Check that these ports are open between the sites; nothing listens there before a run"
        )
        return Check(site.name, "exposure", CheckOutcome.UNKNOWN, observed, advice)
    if address := operator.gateway.get("address"):
        route = operator.gateway.get("route")
        observed = f"{exposure}: other sites connect to {address}, routed by {route}s"
        return Check(site.name, "exposure", CheckOutcome.OK, observed)
    observed = f"{exposure}: its operator has no gateway configured"
    advice = (
        "Set gateway.address and gateway.route in the site's values and upgrade, or give the job "
        "another network.exposure"
    )
    return Check(site.name, "exposure", CheckOutcome.FAIL, observed, advice)


def _capacity(cluster: SiteCluster, site: Site, job: Job, settings: Mapping[str, Any]) -> Check:
    if isinstance(cluster.nodes, DLionError):
        return query_error_check(site.name, "room", cluster.nodes)
    sidecar = mapping_of(mapping_of(settings.get("sidecar")).get("resources"))
    placed = [(group, _placement(job, group)) for group in site.groups]
    tolerant = [group.name for group, spec in placed if spec.get("tolerations")]
    groups = [replace(group, node_selector=spec["nodeSelector"]) for group, spec in placed]
    capacities = group_capacities(groups, sidecar, cluster.nodes or [], tolerant=tolerant)
    observed = f"nodes: {len(cluster.nodes or [])}; capacity, ignoring other pods: "
    observed += ", ".join(
        f"{each.group} {each.placed} of {each.requested} workers" for each in capacities
    )
    impossible = [f"{each.group}: {each.reason}" for each in capacities if each.reason]
    if impossible:
        advice = "Reduce the requests, select other nodes (nodeSelector), or add a larger node"
        observed = f"{observed}; {'; '.join(impossible)}"
        return Check(site.name, "room", CheckOutcome.FAIL, observed, advice)
    if any(each.placed < each.requested for each in capacities):
        advice = "Workers without capacity stay Pending: reduce workers or requests, or add nodes"
        return Check(site.name, "room", CheckOutcome.WARN, observed, advice)
    return Check(site.name, "room", CheckOutcome.OK, observed)


def _placement(job: Job, group: Group) -> dict[str, Any]:
    """The node selector and tolerations of the group's pods, as its operator merges them."""
    spec: dict[str, Any] = {"nodeSelector": group.node_selector}
    for overlay in _pod_specs(job, [group]):
        given = {name: overlay[name] for name in ("nodeSelector", "tolerations") if name in overlay}
        with contextlib.suppress(AttributeError, TypeError, ValueError):  # the operator names it
            spec = merged(spec, given)
    return spec | {"nodeSelector": mapping_of(spec.get("nodeSelector"))}


def _images(cluster: SiteCluster, site: Site, job: Job, settings: Mapping[str, Any]) -> Check:
    """Only a pod shows whether nodes can pull the images, and none is started."""
    images = mapping_of(settings.get("images"))
    runtime = {} if isinstance(cluster.runtime, DLionError) else mapping_of(cluster.runtime)
    given = mapping_of(runtime.get("spec")).get("image")
    worker = job.spec.trainer.image or given or images.get("worker")  # the keeper's, too
    named = [worker, *(group.image for group in site.groups), images.get("sidecar")]
    own = images.get("pullSecrets")
    secrets = [*own] if isinstance(own, list) else []
    for spec in _pod_specs(job, site.groups):
        secrets += [each.get("name") for each in mappings_in(spec.get("imagePullSecrets"))]
    observed = f"not verified, since that needs a pod: {_listed(named)}; "
    observed += f"Secrets of registries: {_listed(secrets) or 'none'}"
    namespace = f"namespace {job.metadata.namespace}"
    advice = "Check that the nodes can pull all of them"
    advice += f" with these Secrets, in {namespace}" if secrets else " without a Secret"
    advice += f"; otherwise the job reports {Reason.IMAGE_UNAVAILABLE}"
    return Check(site.name, "images", CheckOutcome.UNKNOWN, observed, advice)


def _pod_specs(job: Job, groups: Sequence[Group]) -> list[Mapping[str, Any]]:
    """The specs of the pod templates that the job and these groups have."""
    templates = [job.spec.pod_template, *(group.pod_template for group in groups)]
    return [mapping_of(mapping_of(template).get("spec")) for template in templates]


def _listed(values: Sequence[object]) -> str:
    """Each of them once, in order, without empty ones."""
    return ", ".join(dict.fromkeys(str(each) for each in values if each))
