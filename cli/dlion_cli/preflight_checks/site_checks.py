"""Checks of a site's cluster against the list of sites, for `dlion preflight --contexts`."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final

from dlion_api.addresses import split_host_port
from dlion_api.document import schema
from dlion_api.errors import AbsentError, ContractError, DataError, DLionError, UnavailableError
from dlion_api.protocol.trust import CLOCK_SKEW_ALLOWANCE
from dlion_api.spec import Job
from dlion_cli.cluster.documents import mapping_of, mappings_in
from dlion_cli.inputs.bundles import Bundle, read_bundle
from dlion_cli.inputs.listed_sites import TrustedSite
from dlion_cli.preflight_checks.checks import Check, CheckOutcome
from dlion_cli.preflight_checks.site_cluster import ClockBounds, OperatorSnapshot, SiteCluster
from dlion_operator.federation.state import SILENT_AFTER_S

_CHECK_BUNDLES: Final = (
    "Check that the list has the newest bundles (`dlion trust show`), and upgrade it with the "
    "list: helm upgrade … -f sites.yaml"
)


def trust_check(site: str, operator: OperatorSnapshot, others: Sequence[TrustedSite]) -> Check:
    """One check of all other sites' bundles; its outcome is the worst of them."""
    if isinstance(operator.trust, AbsentError):
        return Check(site, "trust", CheckOutcome.FAIL, "it has no bundles", _CHECK_BUNDLES)
    if isinstance(operator.trust, DLionError):
        return Check(site, "trust", CheckOutcome.UNKNOWN, str(operator.trust))
    failures, warnings = [], []
    for other in others:
        held = operator.trust.get(other.name)
        if held is None:
            failures.append(f"no bundle of {other.name}")
            continue
        try:
            bundle = read_bundle(held)
        except ContractError as error:
            failures.append(f"the bundle of {other.name} {error}")
            continue
        if not bundle.keys & other.bundle.keys:
            failures.append(f"another authority's bundle of {other.name} {_describe(bundle)}")
        elif bundle.fingerprint != other.bundle.fingerprint:
            warnings.append(f"another bundle of {other.name}, for the same key {_describe(bundle)}")
    listed = {other.name for other in others}
    warnings += [f"also trusts {name}" for name in operator.trust if name not in listed]
    if failures or warnings:
        outcome = CheckOutcome.FAIL if failures else CheckOutcome.WARN
        return Check(site, "trust", outcome, "; ".join(failures + warnings), _CHECK_BUNDLES)
    observed = f"it trusts {', '.join(sorted(listed))} by the listed bundles"
    return Check(site, "trust", CheckOutcome.OK, observed)


def _describe(bundle: Bundle) -> str:
    return f"(until {bundle.not_after:%Y-%m-%d}, sha256 {bundle.fingerprint[:29]}…)"


_VERSION_LABEL: Final = "app.kubernetes.io/version"
_UPGRADE: Final = "Upgrade it with the list: helm upgrade … -f sites.yaml"
_GATEWAY_ADVICE: Final = (
    "Correct the address in the list, or gateway.address in its values. Keep both if operators "
    "and workers' peers use different addresses"
)
_MAX_CLOCK_SKEW_S: Final = 60.0
"""Larger differences between clocks are reported."""
_MAX_NAMED: Final = 4


def site_name(cluster: SiteCluster) -> str:
    """The site name in the operator's settings; empty if unknown."""
    if isinstance(cluster.operator, DLionError):
        return ""
    return str(cluster.operator.settings.get("site", ""))


def site_checks(cluster: SiteCluster, sites: Sequence[TrustedSite]) -> list[Check]:
    """The checks of one cluster, except those of a job."""
    site = site_name(cluster) or f"context {cluster.context}"
    observed = f"Kubernetes {cluster.version}, by {cluster.context}"
    checks = [Check(site, "api", CheckOutcome.OK, observed)]
    if cluster.clock is not None:
        checks.append(clock_check(site, cluster.clock))
    checks.append(definition_check(site, cluster.schema))
    if isinstance(cluster.operator, DLionError):
        return [*checks, query_error_check(site, "operator", cluster.operator)]
    operator = cluster.operator
    checks.append(operator_check(site, operator.deployment, cluster.context, cluster.namespace))
    own = next((each for each in sites if each.name == site), None)
    if own is None:
        observed = f"its operator's site.name is {site!r}, which is not in the list"
        advice = "Correct the list or the name"
        return [*checks, Check(site, "listed", CheckOutcome.FAIL, observed, advice)]
    others = [each for each in sites if each.name != site]
    if not others:
        return checks
    checks += [_service(own, operator), _settings(site, operator, others)]
    return [*checks, trust_check(site, operator, others), _streams(site, operator, cluster, others)]


def clock_skew_checks(clocks: Mapping[str, ClockBounds]) -> Iterator[Check]:
    """The differences between the sites' clocks, independent of this machine's."""
    if len(clocks) < 2:
        return
    ahead = max(clocks, key=lambda site: clocks[site].at_least_s)
    behind = min(clocks, key=lambda site: clocks[site].at_most_s)
    min_s = max(0.0, clocks[ahead].at_least_s - clocks[behind].at_most_s)
    max_s = max(each.at_most_s for each in clocks.values())
    max_s -= min(each.at_least_s for each in clocks.values())
    figures = {"apart_at_least_s": min_s, "apart_at_most_s": max_s}
    if max_s <= _MAX_CLOCK_SKEW_S:
        observed = f"at most {max_s:.1f} s apart"
        yield Check("all", "clocks", CheckOutcome.OK, observed, figures=figures)
        return
    allowed_s = CLOCK_SKEW_ALLOWANCE.total_seconds()
    outcome = CheckOutcome.FAIL if min_s >= allowed_s else CheckOutcome.WARN
    observed = f"{min_s:.1f} to {max_s:.1f} s apart: {ahead} ahead of {behind}; "
    observed += f"certificates tolerate less than {allowed_s:.0f} s"
    yield Check("all", "clocks", outcome, observed, "Synchronize the clocks by NTP", figures)


def query_error_check(site: str, name: str, error: DLionError) -> Check:
    """FAIL if the object is missing or invalid; UNKNOWN if it is not accessible."""
    wrong = isinstance(error, AbsentError | DataError)
    outcome = CheckOutcome.FAIL if wrong else CheckOutcome.UNKNOWN
    return Check(site, name, outcome, str(error))


def clock_check(site: str, clock: ClockBounds) -> Check:
    """Whether the clocks of API server and this machine agree."""
    figures = {"clock_ahead_at_least_s": clock.at_least_s, "clock_ahead_at_most_s": clock.at_most_s}
    span = f"{clock.at_least_s:+.2f} to {clock.at_most_s:+.2f} s"
    observed = f"its API server's is {span} ahead of this machine's"
    differs = clock.at_least_s > _MAX_CLOCK_SKEW_S or clock.at_most_s < -_MAX_CLOCK_SKEW_S
    outcome = CheckOutcome.WARN if differs else CheckOutcome.OK
    advice = "Find the wrong clock and synchronize it by NTP" if differs else ""
    return Check(site, "clock", outcome, observed, advice, figures)


def definition_check(site: str, served: Mapping[str, Any] | DLionError) -> Check:
    """Whether the cluster's definition of a DLionJob has the fields of this release."""
    if isinstance(served, DLionError):
        return query_error_check(site, "definition", served)
    here, there = set(_fields(schema(Job)["properties"]["spec"])), set(_fields(served))
    if here == there:
        observed = f"matches this command ({len(here)} fields)"
        return Check(site, "definition", CheckOutcome.OK, observed)
    observed = "differs from this command:"
    for preposition, names in (("without", here - there), ("with", there - here)):
        if names:
            observed += f" {preposition} {_join_names(sorted(names))}"
    advice = "Install the same release of chart and command: helm upgrade, pip install"
    outcome = CheckOutcome.FAIL if here - there else CheckOutcome.WARN
    return Check(site, "definition", outcome, observed, advice)


def _fields(node: object, path: str = "spec") -> Iterator[str]:
    """The paths of all fields in a schema."""
    if not isinstance(node, dict):
        return
    for name, below in (node.get("properties") or {}).items():
        yield f"{path}.{name}"
        yield from _fields(below, f"{path}.{name}")
    yield from _fields(node.get("items"), f"{path}[]")
    yield from _fields(node.get("additionalProperties"), f"{path}[]")


def operator_check(site: str, deployment: Mapping[str, Any], context: str, namespace: str) -> Check:
    """Whether the operator is ready and of this release."""
    metadata, status = mapping_of(deployment.get("metadata")), mapping_of(deployment.get("status"))
    name, release = metadata.get("name"), (metadata.get("labels") or {}).get(_VERSION_LABEL)
    own = version("dlion")
    if not status.get("readyReplicas"):
        observed = f"{name} is not ready: {_unready_reason(status)}"
        kubectl = f"kubectl --context {context} -n {namespace}"
        advice = f"{kubectl} describe deployment {name}; then {kubectl} logs deployment/{name}"
        return Check(site, "operator", CheckOutcome.FAIL, observed, advice)
    if release != own:
        observed = f"{name} is ready, of release {release or 'unknown'}; this command is of {own}"
        advice = "Install the same release at all sites and for this command"
        return Check(site, "operator", CheckOutcome.WARN, observed, advice)
    return Check(site, "operator", CheckOutcome.OK, f"{name} {release} is ready")


def _unready_reason(status: Mapping[str, Any]) -> str:
    messages = [
        str(each.get("message"))
        for each in status.get("conditions") or ()
        if isinstance(each, dict) and each.get("status") != "True" and each.get("message")
    ]
    return "; ".join(messages) or "it has no ready pod"


def _service(own: TrustedSite, operator: OperatorSnapshot) -> Check:
    """Whether the listed address fits the site's federation Service."""
    service, name = operator.service, "service"
    if isinstance(service, DLionError):
        return query_error_check(own.name, name, service)
    if service is None:
        return Check(own.name, name, CheckOutcome.FAIL, "there is no federation Service", _UPGRADE)
    spec: Mapping[str, Any] = service.get("spec") or {}
    port: Mapping[str, Any] = next(iter(spec.get("ports") or ()), {})
    kind, listed_host, listed_port = spec.get("type"), *split_host_port(own.address)
    if own.address == operator.gateway.get("address"):
        observed = f"{kind}, port {port.get('port')}, behind its gateway {own.address}"
        return Check(own.name, name, CheckOutcome.OK, observed)
    open_at = port.get("nodePort") if kind == "NodePort" else port.get("port")
    observed = f"{kind}, port {open_at}; the list has {own.address}"
    if kind == "LoadBalancer":
        status: Mapping[str, Any] = (service.get("status") or {}).get("loadBalancer") or {}
        hosts = [
            str(host)
            for each in status.get("ingress") or ()
            for host in (each.get("hostname"), each.get("ip"))
            if host
        ]
        where = ", ".join(hosts) or "no address yet"
        observed = f"{kind} at {where}, port {open_at}; the list has {own.address}"
        if not hosts:
            advice = "Find out why it has no address: kubectl describe service"
            return Check(own.name, name, CheckOutcome.FAIL, observed, advice)
        if listed_host not in hosts:
            advice = "Check that the listed name resolves to it, or correct the list"
            return Check(own.name, name, CheckOutcome.WARN, observed, advice)
    if str(open_at) != listed_port:
        advice = "Correct the port in the list, unless ports are mapped in between"
        if behind := operator.gateway.get("address"):
            observed, advice = f"{observed}; its gateway is {behind}", _GATEWAY_ADVICE
        return Check(own.name, name, CheckOutcome.WARN, observed, advice)
    return Check(own.name, name, CheckOutcome.OK, observed)


def _settings(site: str, operator: OperatorSnapshot, others: Sequence[TrustedSite]) -> Check:
    """Whether the operator has the same list of other sites."""
    configured = {
        str(each.get("name")): str(each.get("address"))
        for each in mappings_in(operator.settings.get("sites"))
    }
    listed = {each.name: each.address for each in others}
    wrong = [
        f"{name} at {configured[name]} instead of {address}" if name in configured else f"no {name}"
        for name, address in listed.items()
        if configured.get(name) != address
    ]
    wrong += [f"{name}, which is not in the list" for name in configured if name not in listed]
    if wrong:
        observed = f"its settings differ from the list: {_join_names(wrong)}"
        return Check(site, "list", CheckOutcome.FAIL, observed, _UPGRADE)
    observed = f"it connects to {_join_names(list(listed))} as listed"
    return Check(site, "list", CheckOutcome.OK, observed)


def _streams(
    site: str, operator: OperatorSnapshot, cluster: SiteCluster, others: Sequence[TrustedSite]
) -> Check:
    """Whether the operator's streams from and to other sites work, by its metrics."""
    streams, name = operator.streams, "streams"
    if isinstance(streams, DLionError):
        observed = f"its metrics cannot be read through the API server: {streams}"
        advice = "Allow the API server to reach its metrics port (networkPolicies.metricsFrom)"
        # A permission error names the missing permission itself.
        advice = advice if isinstance(streams, UnavailableError) else ""
        return Check(site, name, CheckOutcome.UNKNOWN, observed, advice)
    wrong = [problem for each in others for problem in _stream_problems(site, each, streams)]
    if wrong:
        where = f"kubectl --context {cluster.context} -n {cluster.namespace}"
        advice = f"See its log: {where} logs deployment/"
        advice += str(operator.deployment["metadata"]["name"])
        return Check(site, name, CheckOutcome.FAIL, _join_names(wrong), advice)
    trips_s = {
        other: trip_s
        for other in (each.name for each in others)
        if (trip_s := streams[other].get("round_trip_seconds")) is not None
    }
    connected = [
        f"{each.name} ({trips_s[each.name] * 1e3:.0f} ms round trip)"
        if each.name in trips_s
        else each.name
        for each in others
    ]
    figures = {f"{other}_round_trip_s": trip_s for other, trip_s in trips_s.items()}
    observed = f"connected in both directions to {_join_names(connected)}"
    return Check(site, name, CheckOutcome.OK, observed, figures=figures)


def _stream_problems(
    site: str, other: TrustedSite, streams: Mapping[str, Mapping[str, float]]
) -> Iterator[str]:
    """What is wrong with the streams of this site's operator to and from another's."""
    samples = streams.get(other.name, {})
    if samples.get("bundle_valid") == 0.0:
        yield f"its bundle of {other.name} is invalid"
    age_s = samples.get("heartbeat_age_seconds")
    hears = age_s is not None and age_s <= SILENT_AFTER_S
    if hears and not samples.get("connected"):
        yield (
            f"connections from {site} to {other.address} fail, while those of {other.name} "
            f"arrive: a one-way firewall, or {other.name} refuses it"
        )
        return
    if not samples.get("connected"):
        yield f"{other.name} is not connected to it"
    if age_s is None:
        yield f"no heartbeat of {other.name} yet"
    elif not hears:
        yield f"the last heartbeat of {other.name} was {age_s:.0f} s ago"


def _join_names(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
