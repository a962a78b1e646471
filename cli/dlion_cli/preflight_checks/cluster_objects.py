"""Checks of a cluster's objects for `dlion doctor`. Pure: `cluster_health` reads them.

The objects may have missing and foreign fields.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any, Final

from dlion_cli.cluster.cluster_jobs import event_time
from dlion_cli.cluster.documents import mapping_of, mappings_in
from dlion_cli.preflight_checks.checks import Check, CheckOutcome
from dlion_cli.preflight_checks.site_cluster import Document
from dlion_cli.terminal.formatting import format_duration
from dlion_operator.kubernetes.lease import DURATION_S
from dlion_operator.kubernetes.quantities import parse_quantity

CLUSTER: Final = "cluster"
RECENT: Final = timedelta(hours=1)
"""Older events are not reported."""
_PRESSURES: Final = ("MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable")
_DEFAULT_CLASS: Final = "storageclass.kubernetes.io/is-default-class"
_NEARLY_USED: Final = 0.9
_MAX_NAMED: Final = 3


def _time(text: object) -> datetime | None:
    try:
        time_ = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return time_ if time_.tzinfo else time_.replace(tzinfo=UTC)


def _since(span: timedelta) -> str:
    return format_duration(max(0.0, span.total_seconds()))


def image_check(deployment: Mapping[str, Any]) -> Check:
    """Whether a ready operator's image is of this release, as far as its tag shows."""
    template = mapping_of(mapping_of(deployment.get("spec")).get("template"))
    containers = mappings_in(mapping_of(template.get("spec")).get("containers"))
    image, own = str(containers[0].get("image", "")) if containers else "", version("dlion")
    observed = f"ready, of release {own}, image {image or 'unknown'}"
    tag = image.rpartition(":")[2] if "@" not in image else ""
    if re.match(r"v?[0-9]+\.[0-9]", tag) and tag.removeprefix("v") != own:
        advice = "Remove images.operator.tag from the chart's values and upgrade"
        return Check(CLUSTER, "operator", CheckOutcome.WARN, observed, advice)
    return Check(CLUSTER, "operator", CheckOutcome.OK, observed)


def lease_check(spec: Mapping[str, Any], now: datetime) -> Check:
    """Whether an operator holds the namespace's Lease, by its last renewal."""
    holder, renewed = spec.get("holderIdentity"), _time(spec.get("renewTime"))
    advice = "See the operator's log; without the Lease it acts on no job of this namespace"
    if not holder or renewed is None:
        return Check(CLUSTER, "lease", CheckOutcome.WARN, "has no holder", advice)
    figures = {"renewed_before_s": (now - renewed).total_seconds()}
    observed = f"held by {holder}, renewed {_since(now - renewed)} ago"
    if now - renewed > timedelta(seconds=2 * DURATION_S):
        return Check(CLUSTER, "lease", CheckOutcome.FAIL, observed, advice, figures)
    return Check(CLUSTER, "lease", CheckOutcome.OK, observed, figures=figures)


def events_check(pods: Sequence[Document], events: Sequence[Document], now: datetime) -> Check:
    """Recent warnings about the operator's pods."""
    names = {mapping_of(pod.get("metadata")).get("name") for pod in pods}
    recent = [
        event
        for event in events
        if mapping_of(event.get("involvedObject")).get("name") in names
        and event.get("type") == "Warning"
        and (when := _time(event_time(event))) is not None
        and now - when <= RECENT
    ]
    if not recent:
        observed = f"no warning about {len(names)} pods within {RECENT.seconds // 3600} h"
        return Check(CLUSTER, "operator events", CheckOutcome.OK, observed)
    last = sorted(recent, key=event_time)[-_MAX_NAMED:]
    observed = "; ".join(f"{event.get('reason')}: {event.get('message')}" for event in last)
    advice = "kubectl describe pod, and the operator's log, show the cause"
    return Check(CLUSTER, "operator events", CheckOutcome.WARN, observed, advice)


def storage_check(wanted: str, classes: Sequence[Document]) -> Check:
    """Whether the keepers' storage class is there; empty: the cluster's default."""
    metadata = [mapping_of(each.get("metadata")) for each in classes]
    names = [str(each.get("name")) for each in metadata]
    known = f"there are {', '.join(names)}" if names else "there is no storage class"
    if wanted:
        if wanted in names:
            return Check(CLUSTER, "storage", CheckOutcome.OK, f"class {wanted} is there")
        observed, advice = f"no class {wanted}; {known}", "Correct keeper.storageClassName"
        return Check(CLUSTER, "storage", CheckOutcome.FAIL, observed, advice)
    defaults = [
        str(each.get("name"))
        for each in metadata
        if mapping_of(each.get("annotations")).get(_DEFAULT_CLASS) == "true"
    ]
    if defaults:
        return Check(CLUSTER, "storage", CheckOutcome.OK, f"default class {defaults[0]}")
    advice = "Set keeper.storageClassName in the chart's values, or mark a class as default"
    return Check(CLUSTER, "storage", CheckOutcome.FAIL, f"no default class; {known}", advice)


def nodes_check(nodes: Sequence[Document]) -> Check:
    """Whether nodes are ready and without pressure."""
    problems, ready = [], 0
    for node in nodes:
        name = mapping_of(node.get("metadata")).get("name")
        conditions = {
            each.get("type"): each.get("status")
            for each in mappings_in(mapping_of(node.get("status")).get("conditions"))
        }
        is_ready = conditions.get("Ready") == "True"
        ready += is_ready
        pressed = [each for each in _PRESSURES if conditions.get(each) == "True"]
        cordoned = mapping_of(node.get("spec")).get("unschedulable") is True
        states = ["not ready"] * (not is_ready) + pressed + ["cordoned"] * cordoned
        problems += [f"{name}: {', '.join(states)}"] if states else []
    observed = f"{ready} of {len(nodes)} ready"
    figures = {"nodes": float(len(nodes)), "ready": float(ready)}
    if problems:
        more = len(problems) - _MAX_NAMED
        observed += f"; {'; '.join(problems[:_MAX_NAMED])}" + (f"; {more} more" * (more > 0))
    advice = "kubectl describe node shows the cause"
    if not ready:
        return Check(CLUSTER, "nodes", CheckOutcome.FAIL, observed, advice, figures)
    outcome = CheckOutcome.WARN if problems else CheckOutcome.OK
    return Check(CLUSTER, "nodes", outcome, observed, advice if problems else "", figures)


@dataclass
class _QuotaUse:
    """Resources of a namespace's quotas, as text."""

    used_up: list[str] = field(default_factory=list)
    nearly: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, name: str, used: object, hard: object) -> None:
        try:
            share = parse_quantity(str(used)), parse_quantity(str(hard))
        except ValueError:
            return
        self.count += 1
        text = f"{name} {used} of {hard}"
        if share[0] >= share[1]:
            self.used_up.append(text)
        elif float(share[0]) >= _NEARLY_USED * float(share[1]):
            self.nearly.append(text)


def quota_check(namespace: str, quotas: Sequence[Document]) -> Check:
    """Whether the namespace's quotas leave room."""
    use = _QuotaUse()
    for quota in quotas:
        status = mapping_of(quota.get("status"))
        used, hard = mapping_of(status.get("used")), mapping_of(status.get("hard"))
        for name, limit in hard.items():
            use.add(name, used.get(name, "0"), limit)
    if not use.count:
        return Check(CLUSTER, "quota", CheckOutcome.OK, f"none in namespace {namespace}")
    advice = "Delete jobs that have ended, or ask for a larger ResourceQuota"
    if use.used_up:
        observed = f"used up in {namespace}: {', '.join(use.used_up)}"
        return Check(CLUSTER, "quota", CheckOutcome.FAIL, observed, advice)
    if use.nearly:
        observed = f"nearly used up in {namespace}: {', '.join(use.nearly)}"
        return Check(CLUSTER, "quota", CheckOutcome.WARN, observed, advice)
    observed = f"{use.count} limits in {namespace} leave room"
    return Check(CLUSTER, "quota", CheckOutcome.OK, observed)


def rights_check(namespace: str, missing: Mapping[str, Sequence[str]]) -> Check:
    """What the user may do; `missing` are the missing rights of each command."""
    lacking = {command: rights for command, rights in missing.items() if rights}
    if not lacking:
        observed = f"all commands are allowed in namespace {namespace}"
        return Check(CLUSTER, "rights", CheckOutcome.OK, observed)
    observed = f"in namespace {namespace} there is no right for " + "; ".join(
        f"{command} ({', '.join(rights)})" for command, rights in lacking.items()
    )
    outcome = CheckOutcome.FAIL if "get, watch" in lacking else CheckOutcome.WARN
    advice = "Ask for the role edit there (kubectl create rolebinding), or a role with these rights"
    return Check(CLUSTER, "rights", outcome, observed, advice)
