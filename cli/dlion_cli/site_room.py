"""What a job asks of one site's cluster: a way to its workers, room for them, and images.

Called by `preflight` with what `site_cluster` has asked. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dlion_api.cluster_names import EXCHANGE_PORT, MEASURING_PORT
from dlion_api.errors import DLionError
from dlion_api.status.conditions import Reason
from dlion_cli.checks import Check, Outcome
from dlion_cli.placing import rooms
from dlion_cli.site_checks import not_looked_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlion_api.spec import Job
    from dlion_api.spec.sites import Site
    from dlion_cli.site_cluster import Operator, SiteCluster

_DIALLED: Final = {
    "PodNetwork": ("pods", f"ports {EXCHANGE_PORT} and {MEASURING_PORT}"),
    "NodePort": ("nodes", "two node ports for each worker"),
    "LoadBalancer": ("load balancers", "two ports for each worker"),
}
"""What other sites' workers dial, and where, by the job's exposure; settings name a gateway."""


def room_checks(found: SiteCluster, site: Site, job: Job) -> list[Check]:
    """Of the site whose cluster that is, as the job names it."""
    if isinstance(found.operator, DLionError) or found.nodes is None:
        return []
    settings = found.operator.settings
    checks = [_exposure(found.operator, site, job)] if len(job.spec.sites) > 1 else []
    return [*checks, _room(found, site, job, settings), _images(site, job, settings)]


def _exposure(operator: Operator, site: Site, job: Job) -> Check:
    """Whether the site has what the job exposes its workers by; before a run nothing is there."""
    exposure = job.spec.network.exposure
    if exposure != "Gateway":
        hosts, ports = _DIALLED[exposure]
        if exposure != "PodNetwork":
            hosts = operator.settings.get("advertisedAddress") or hosts
        seen = f"{exposure}: other sites dial its {hosts}, at {ports}"
        advice = "See that these are open between the sites; nothing listens there before a run"
        return Check(site.name, "exposure", Outcome.UNKNOWN, seen, advice)
    if address := operator.gateway.get("address"):
        seen = f"{exposure}: other sites dial {address}, told by {operator.gateway.get('route')}s"
        return Check(site.name, "exposure", Outcome.OK, seen)
    seen = f"{exposure}: its operator knows of no gateway"
    advice = (
        "Name it in the site's values (gateway.address, gateway.route) and upgrade, or give the "
        "job another network.exposure"
    )
    return Check(site.name, "exposure", Outcome.FAIL, seen, advice)


def _room(found: SiteCluster, site: Site, job: Job, settings: Mapping[str, Any]) -> Check:
    if isinstance(found.nodes, DLionError):
        return not_looked_at(site.name, "room", found.nodes)
    sidecar = _mapping(_mapping(settings.get("sidecar")).get("resources"))
    template = _mapping(_mapping(job.spec.pod_template).get("spec"))
    there = rooms(
        site.groups, sidecar, found.nodes or [], bears_taints=bool(template.get("tolerations"))
    )
    seen = f"nodes: {len(found.nodes or [])}; room, but for what other pods have: "
    seen += ", ".join(f"{room.group} {room.placed} of {room.wanted} workers" for room in there)
    impossible = [f"{room.group}: {room.reason}" for room in there if room.reason]
    if impossible:
        advice = "Ask for less, choose other nodes (nodeSelector), or add one that is large enough"
        seen = f"{seen}; {'; '.join(impossible)}"
        return Check(site.name, "room", Outcome.FAIL, seen, advice)
    if any(room.placed < room.wanted for room in there):
        advice = (
            "If no better order finds room for the rest it stays Pending: ask for fewer workers or "
            "less, or add nodes"
        )
        return Check(site.name, "room", Outcome.WARN, seen, advice)
    return Check(site.name, "room", Outcome.OK, seen)


def _images(site: Site, job: Job, settings: Mapping[str, Any]) -> Check:
    """Whether a node may fetch them is seen by a pod alone, and none is started here."""
    images = _mapping(settings.get("images"))
    named = [job.spec.trainer.image or images.get("worker"), images.get("sidecar")]
    template = _mapping(_mapping(job.spec.pod_template).get("spec"))
    secrets = _entries(images.get("pullSecrets"))
    secrets += [_mapping(each).get("name") for each in _entries(template.get("imagePullSecrets"))]
    seen = f"not tried, as that takes a pod: {', '.join(str(each) for each in named if each)}; "
    seen += f"Secrets of registries: {', '.join(str(each) for each in secrets) or 'none'}"
    namespace = f"namespace {job.metadata.namespace}"
    advice = "See that the nodes may fetch all of them"
    advice += f" by these Secrets, in {namespace}" if secrets else " without a Secret"
    advice += f"; of one that does not come the job says {Reason.IMAGE_UNAVAILABLE}"
    return Check(site.name, "images", Outcome.UNKNOWN, seen, advice)


def _entries(value: object) -> list[Any]:
    return list(value) if isinstance(value, list) else []


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
