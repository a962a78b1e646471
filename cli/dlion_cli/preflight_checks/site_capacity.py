"""Checks a job's requirements at one site: exposure of its workers, capacity and images."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dlion_api.cluster_names import (
    EXCHANGE_PORT,
    MEASURING_PORT,
    SIDECAR_CONTAINER,
    TRAINER_CONTAINER,
)
from dlion_api.errors import DLionError
from dlion_api.spec import Job
from dlion_api.spec.sites import Group, Site
from dlion_api.status_names import Reason
from dlion_cli.cluster.documents import mapping_of, mappings_in
from dlion_cli.cluster.node_capacity import group_capacities
from dlion_cli.preflight_checks.checks import Check, CheckOutcome
from dlion_cli.preflight_checks.site_checks import query_error_check
from dlion_cli.preflight_checks.site_cluster import OperatorSnapshot, SiteCluster
from dlion_operator.children.pods import resources_of
from dlion_operator.children.strategic_merge import merged

_ENDPOINTS: Final = {
    "PodNetwork": ("pods", f"ports {EXCHANGE_PORT} and {MEASURING_PORT}"),
    "NodePort": ("nodes", "two node ports for each worker"),
    "LoadBalancer": ("load balancers", "two ports for each worker"),
}
"""Hosts and ports that other sites' workers connect to, by exposure."""
_PLACING: Final = frozenset(
    {"containers", "initContainers", "nodeSelector", "resources", "tolerations"}
)
"""Fields of a podTemplate that determine the capacity that a worker needs."""


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
        return query_error_check(site.name, "capacity", cluster.nodes)
    sidecar = mapping_of(mapping_of(settings.get("sidecar")).get("resources"))
    runtime = _runtime_spec(cluster)
    pods = [(group, _placement(job, group, sidecar, runtime)) for group in site.groups]
    capacities = group_capacities(pods, cluster.nodes or [])
    observed = f"nodes: {len(cluster.nodes or [])}; capacity, ignoring other pods: "
    observed += ", ".join(
        f"{each.group} {each.placed} of {each.requested} workers" for each in capacities
    )
    impossible = [f"{each.group}: {each.reason}" for each in capacities if each.reason]
    if impossible:
        advice = "Reduce the requests, select other nodes (nodeSelector), or add a larger node"
        observed = f"{observed}; {'; '.join(impossible)}"
        return Check(site.name, "capacity", CheckOutcome.FAIL, observed, advice)
    if any(each.placed < each.requested for each in capacities):
        advice = "Workers without capacity stay Pending: reduce workers or requests, or add nodes"
        return Check(site.name, "capacity", CheckOutcome.WARN, observed, advice)
    return Check(site.name, "capacity", CheckOutcome.OK, observed)


def _placement(
    job: Job, group: Group, sidecar: Mapping[str, Any], runtime: Mapping[str, Any]
) -> dict[str, Any]:
    """What determines the capacity that the group's pods need, as its operator merges it.

    `sidecar`: resources of the container beside each trainer. `runtime`: the spec of the site's
    DLionRuntime.
    """
    trainer = {"name": TRAINER_CONTAINER, "resources": resources_of(group.resources)}
    own = {"nodeSelector": dict(group.node_selector), "containers": [trainer]}
    beside = {"name": SIDECAR_CONTAINER, "restartPolicy": "Always", "resources": sidecar}
    spec: dict[str, Any] = {"initContainers": [beside]}
    site = _pod_spec(runtime.get("podTemplate"))
    for overlay in (site, own, _pod_spec(job.spec.pod_template), _pod_spec(group.pod_template)):
        for name in _PLACING & overlay.keys():
            with contextlib.suppress(
                AttributeError, TypeError, ValueError
            ):  # the operator names it
                spec = merged(spec, {name: overlay[name]})
    return spec


def _images(cluster: SiteCluster, site: Site, job: Job, settings: Mapping[str, Any]) -> Check:
    """Only a pod shows whether nodes can pull the images, and none is started."""
    images = mapping_of(settings.get("images"))
    runtime = _runtime_spec(cluster)
    # The keeper's, too.
    worker = job.spec.trainer.image or runtime.get("image") or images.get("worker")
    named = [worker, *(group.image for group in site.groups), images.get("sidecar")]
    own = images.get("pullSecrets")
    secrets = [*own] if isinstance(own, list) else []
    groups = (group.pod_template for group in site.groups)
    for template in (runtime.get("podTemplate"), job.spec.pod_template, *groups):
        listed = mappings_in(_pod_spec(template).get("imagePullSecrets"))
        secrets += [each.get("name") for each in listed]
    observed = f"not verified, since that needs a pod: {_listed(named)}; "
    observed += f"Secrets of registries: {_listed(secrets) or 'none'}"
    namespace = f"namespace {job.metadata.namespace}"
    advice = "Check that the nodes can pull all of them"
    advice += f" with these Secrets, in {namespace}" if secrets else " without a Secret"
    advice += f"; otherwise the job reports {Reason.IMAGE_UNAVAILABLE}"
    return Check(site.name, "images", CheckOutcome.UNKNOWN, observed, advice)


def _runtime_spec(cluster: SiteCluster) -> dict[str, Any]:
    """The spec of the job's DLionRuntime. Empty: it uses none, or it cannot be read."""
    if isinstance(cluster.runtime, DLionError):
        return {}
    return mapping_of(mapping_of(cluster.runtime).get("spec"))


def _pod_spec(template: object) -> dict[str, Any]:
    """The spec of a podTemplate."""
    return mapping_of(mapping_of(template).get("spec"))


def _listed(values: Sequence[object]) -> str:
    """Return each item once, in order, without empty ones."""
    return ", ".join(dict.fromkeys(str(each) for each in values if each))
