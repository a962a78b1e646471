"""What `dlion preflight --contexts` makes of a site's cluster, held against the list of sites.

Called by `preflight` with what `site_cluster` has asked. Pure.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from dlion_api.document import schema
from dlion_api.errors import AbsentError, DataError, DLionError, UnavailableError
from dlion_api.spec import Job
from dlion_api.trust import BACKDATED
from dlion_cli.checks import Check, Outcome
from dlion_cli.site_cluster import ClockBounds, Operator, SiteCluster
from dlion_cli.site_trust import trust_check
from dlion_operator.federation.state import SILENT_AFTER_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dlion_cli.listed_sites import TrustedSite

_VERSION_LABEL: Final = "app.kubernetes.io/version"
_UPGRADE: Final = "Upgrade it with the list: helm upgrade … -f sites.yaml"
_OTHER_GATEWAY: Final = (
    "Correct the address in the list, or gateway.address of its values; leave both where the "
    "operators of other sites come in another way than its workers' peers"
)
_NOTICED_S: Final = 60.0
"""Clocks that are further apart are worth a word."""
_MOST_NAMED: Final = 4


def site_of(found: SiteCluster) -> str:
    """The site whose operator runs there, as it is told; empty where that cannot be said."""
    if isinstance(found.operator, DLionError):
        return ""
    return str(found.operator.settings.get("site", ""))


def site_checks(found: SiteCluster, sites: Sequence[TrustedSite]) -> list[Check]:
    """Of one site's cluster, all but what a job asks for."""
    site = site_of(found) or f"context {found.context}"
    checks = [Check(site, "api", Outcome.OK, f"Kubernetes {found.version}, by {found.context}")]
    if found.clock is not None:
        checks.append(_clock(site, found.clock))
    checks.append(_definition(site, found.schema))
    if isinstance(found.operator, DLionError):
        return [*checks, not_looked_at(site, "operator", found.operator)]
    operator = found.operator
    checks.append(_operator(site, operator, found))
    own = next((each for each in sites if each.name == site), None)
    if own is None:
        seen = f"its operator's site.name is {site!r}, which the list does not have"
        return [*checks, Check(site, "listed", Outcome.FAIL, seen, "Correct one of the two")]
    others = [each for each in sites if each.name != site]
    if not others:
        return checks
    checks += [_service(own, operator), _settings(site, operator, others)]
    return [*checks, trust_check(site, operator, others), _streams(site, operator, found, others)]


def clocks_check(clocks: Mapping[str, ClockBounds]) -> Iterator[Check]:
    """How far the clocks of these sites are apart, whatever this machine's says."""
    if len(clocks) < 2:
        return
    ahead = max(clocks, key=lambda site: clocks[site].at_least_s)
    behind = min(clocks, key=lambda site: clocks[site].at_most_s)
    least_s = max(0.0, clocks[ahead].at_least_s - clocks[behind].at_most_s)
    most_s = max(each.at_most_s for each in clocks.values())
    most_s -= min(each.at_least_s for each in clocks.values())
    figures = {"apart_at_least_s": least_s, "apart_at_most_s": most_s}
    if most_s <= _NOTICED_S:
        seen = f"at most {most_s:.1f} s apart"
        yield Check("all", "clocks", Outcome.OK, seen, figures=figures)
        return
    outcome = Outcome.FAIL if least_s >= BACKDATED.total_seconds() else Outcome.WARN
    seen = f"{least_s:.1f} to {most_s:.1f} s apart: {ahead} ahead of {behind}; certificates bear "
    seen += f"less than {BACKDATED.total_seconds():.0f} s"
    yield Check("all", "clocks", outcome, seen, "Set the clocks by NTP", figures)


def not_looked_at(site: str, name: str, error: DLionError) -> Check:
    """FAIL where it is not there or not one, UNKNOWN where it may not be seen or says nothing."""
    wrong = isinstance(error, AbsentError | DataError)
    outcome = Outcome.FAIL if wrong else Outcome.UNKNOWN
    return Check(site, name, outcome, str(error))


def _clock(site: str, clock: ClockBounds) -> Check:
    figures = {"clock_ahead_at_least_s": clock.at_least_s, "clock_ahead_at_most_s": clock.at_most_s}
    seen = f"its API server's is {clock.at_least_s:+.2f} to {clock.at_most_s:+.2f} s ahead of this "
    seen += "machine's"
    differs = clock.at_least_s > _NOTICED_S or clock.at_most_s < -_NOTICED_S
    outcome = Outcome.WARN if differs else Outcome.OK
    advice = "See which of the two is wrong; set it by NTP" if differs else ""
    return Check(site, "clock", outcome, seen, advice, figures)


def _definition(site: str, served: Mapping[str, Any] | DLionError) -> Check:
    if isinstance(served, DLionError):
        return not_looked_at(site, "definition", served)
    here, there = set(_fields(schema(Job)["properties"]["spec"])), set(_fields(served))
    if here == there:
        seen = f"DLionJobs as this command knows them ({len(here)} fields)"
        return Check(site, "definition", Outcome.OK, seen)
    seen = "another release's:"
    for words, names in (("without", here - there), ("with", there - here)):
        if names:
            seen += f" {words} {_joined(sorted(names))}"
    advice = "Bring chart and command to one release: helm upgrade, pip install"
    return Check(site, "definition", Outcome.FAIL if here - there else Outcome.WARN, seen, advice)


def _fields(node: object, path: str = "spec") -> Iterator[str]:
    """The paths of all fields that a schema declares."""
    if not isinstance(node, dict):
        return
    for name, below in (node.get("properties") or {}).items():
        yield f"{path}.{name}"
        yield from _fields(below, f"{path}.{name}")
    yield from _fields(node.get("items"), f"{path}[]")
    yield from _fields(node.get("additionalProperties"), f"{path}[]")


def _operator(site: str, operator: Operator, found: SiteCluster) -> Check:
    metadata = operator.deployment.get("metadata") or {}
    status = operator.deployment.get("status") or {}
    name, release = metadata.get("name"), (metadata.get("labels") or {}).get(_VERSION_LABEL)
    own = version("dlion")
    if not status.get("readyReplicas"):
        seen = f"{name} is not ready: {_why_not(status)}"
        advice = (
            f"kubectl --context {found.context} -n {found.namespace} describe deployment {name}; "
            f"then its log: kubectl --context {found.context} -n {found.namespace} logs "
            f"deployment/{name}"
        )
        return Check(site, "operator", Outcome.FAIL, seen, advice)
    if release != own:
        seen = f"{name} is ready, of release {release or 'unknown'}; this command is of {own}"
        advice = "Bring all sites and this command to one release"
        return Check(site, "operator", Outcome.WARN, seen, advice)
    return Check(site, "operator", Outcome.OK, f"{name} {release} is ready")


def _why_not(status: Mapping[str, Any]) -> str:
    words = [
        str(each.get("message"))
        for each in status.get("conditions") or ()
        if isinstance(each, dict) and each.get("status") != "True" and each.get("message")
    ]
    return "; ".join(words) or "it has no pod that is"


def _service(own: TrustedSite, operator: Operator) -> Check:
    """Whether the listed address can be that of the site's federation Service."""
    service, name = operator.service, "service"
    if isinstance(service, DLionError):
        return not_looked_at(own.name, name, service)
    if service is None:
        return Check(own.name, name, Outcome.FAIL, "there is no federation Service", _UPGRADE)
    spec: Mapping[str, Any] = service.get("spec") or {}
    port: Mapping[str, Any] = next(iter(spec.get("ports") or ()), {})
    kind, listed_host, listed_port = spec.get("type"), *_parts(own.address)
    if own.address == operator.gateway.get("address"):
        seen = f"{kind}, port {port.get('port')}, behind its gateway {own.address}"
        return Check(own.name, name, Outcome.OK, seen)
    open_at = port.get("nodePort") if kind == "NodePort" else port.get("port")
    seen = f"{kind}, port {open_at}; the list has {own.address}"
    if kind == "LoadBalancer":
        status: Mapping[str, Any] = (service.get("status") or {}).get("loadBalancer") or {}
        hosts = [
            str(host)
            for each in status.get("ingress") or ()
            for host in (each.get("hostname"), each.get("ip"))
            if host
        ]
        seen = f"{kind} at {', '.join(hosts) or 'no address yet'}, port {open_at}; the list has "
        seen += own.address
        if not hosts:
            advice = "See why its load balancer gives it no address (kubectl describe service)"
            return Check(own.name, name, Outcome.FAIL, seen, advice)
        if listed_host not in hosts:
            advice = "See that the listed name leads there, or correct the list"
            return Check(own.name, name, Outcome.WARN, seen, advice)
    if str(open_at) != listed_port:
        advice = "Correct the port in the list; leave it where something between maps the ports"
        if behind := operator.gateway.get("address"):
            seen, advice = f"{seen}; its gateway is {behind}", _OTHER_GATEWAY
        return Check(own.name, name, Outcome.WARN, seen, advice)
    return Check(own.name, name, Outcome.OK, seen)


def _parts(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


def _settings(site: str, operator: Operator, others: Sequence[TrustedSite]) -> Check:
    """Whether the operator dials whom the list has, where the list has them."""
    entries = operator.settings.get("sites")
    told = {
        str(each.get("name")): str(each.get("address"))
        for each in (entries if isinstance(entries, list) else ())
        if isinstance(each, dict)
    }
    listed = {each.name: each.address for each in others}
    wrong = [
        f"{name} at {told[name]} instead of {address}" if name in told else f"no {name}"
        for name, address in listed.items()
        if told.get(name) != address
    ]
    wrong += [f"{name}, which the list does not have" for name in told if name not in listed]
    if wrong:
        seen = f"it is told of another list: {_joined(wrong)}"
        return Check(site, "list", Outcome.FAIL, seen, _UPGRADE)
    return Check(site, "list", Outcome.OK, f"it dials {_joined(list(listed))} as listed")


def _streams(
    site: str, operator: Operator, found: SiteCluster, others: Sequence[TrustedSite]
) -> Check:
    """Whether this operator tells and hears the others just now, by its own metrics."""
    streams, name = operator.streams, "streams"
    if isinstance(streams, DLionError):
        seen = f"its metrics are not to be had by way of the API server: {streams}"
        advice = "Let the API server reach its port of metrics (networkPolicies.metricsFrom)"
        # Where a right is missing the error itself says which.
        advice = advice if isinstance(streams, UnavailableError) else ""
        return Check(site, name, Outcome.UNKNOWN, seen, advice)
    wrong = []
    for other in (each.name for each in others):
        samples = streams.get(other, {})
        if samples.get("bundle_valid") == 0.0:
            wrong.append(f"its bundle of {other} will not do")
        if not samples.get("connected"):
            wrong.append(f"{other} does not listen to it")
        age_s = samples.get("heartbeat_age_seconds")
        if age_s is None:
            wrong.append(f"{other} has never been heard")
        elif age_s > SILENT_AFTER_S:
            wrong.append(f"{other} was heard {age_s:.0f} s ago")
    if wrong:
        where = f"kubectl --context {found.context} -n {found.namespace}"
        advice = f"Its log says why: {where} logs deployment/"
        advice += str(operator.deployment["metadata"]["name"])
        return Check(site, name, Outcome.FAIL, _joined(wrong), advice)
    trips_s = {
        other: trip_s
        for other in (each.name for each in others)
        if (trip_s := streams[other].get("round_trip_seconds")) is not None
    }
    heard = [
        f"{each.name} ({trips_s[each.name] * 1e3:.0f} ms there and back)"
        if each.name in trips_s
        else each.name
        for each in others
    ]
    figures = {f"{other}_round_trip_s": trip_s for other, trip_s in trips_s.items()}
    seen = f"it is heard by and hears {_joined(heard)}"
    return Check(site, name, Outcome.OK, seen, figures=figures)


def _joined(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
