"""What a job asks of one site's cluster: room for its workers, and images.

Called by `preflight` with what `site_cluster` has asked. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlion_api.errors import DLionError
from dlion_cli.checks import Check, Outcome
from dlion_cli.placing import rooms
from dlion_cli.site_checks import not_looked_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlion_api.spec import Job
    from dlion_api.spec.sites import Site
    from dlion_cli.site_cluster import SiteCluster


def room_checks(found: SiteCluster, site: Site, job: Job) -> list[Check]:
    """Of the site whose cluster that is, as the job names it."""
    if isinstance(found.operator, DLionError) or found.nodes is None:
        return []
    settings = found.operator.settings
    return [_room(found, site, job, settings), _images(found, site, job, settings)]


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


def _images(found: SiteCluster, site: Site, job: Job, settings: Mapping[str, Any]) -> Check:
    """Whether a node may fetch them is seen by a pod alone, and none is started here."""
    images = _mapping(settings.get("images"))
    named = [job.spec.trainer.image or images.get("worker"), images.get("sidecar")]
    seen = f"not tried, as that takes a pod: {', '.join(str(each) for each in named if each)}"
    advice = (
        f"kubectl --context {found.context} -n {job.metadata.namespace} run image-test "
        f"--restart=Never --image={named[0]} --command -- true"
    )
    return Check(site.name, "images", Outcome.UNKNOWN, seen, advice)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
