"""What a site's cluster tells other sites: its name, its bundle, how its operator is reached.

Called by `trust`. The bundle is read where the operator shows it, in a ConfigMap: nobody needs a
right to the authority's Secret, which holds the key as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dlion_api import cluster_names
from dlion_api.addresses import joined
from dlion_api.errors import (
    AbsentError,
    ContractError,
    DataError,
    DeniedError,
    DLionError,
    UnavailableError,
)
from dlion_cli.bundles import Bundle, read_bundle
from dlion_cli.cluster import READ_TIMEOUT_S, path_of
from dlion_cli.listed_sites import address_fault
from dlion_cli.site_cluster import settings_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlion_cli.cluster import Cluster

_PORT: Final = "federation"
_OPERATOR: Final = (
    f"{cluster_names.NAME_LABEL}={cluster_names.NAME},{cluster_names.COMPONENT_LABEL}=operator"
)


@dataclass(frozen=True)
class SiteAuthority:
    """One site, as it gives itself to know."""

    name: str
    bundle: Bundle
    address: str
    """host:port of its federation Service or its gateway; empty where neither tells."""
    hint: str
    """What an address has to be, where there is none."""


def site_authority(cluster: Cluster, *, authority: str, address: str = "") -> SiteAuthority:
    """The site whose operator runs in that namespace; without an address its Service is asked, and
    where that tells none the operator's settings, for a gateway.

    Raises: AbsentError without such a ConfigMap, DeniedError without the right to read it,
    DataError where it holds no authority of a site; and as `Cluster.get` does.
    """
    bundle = _shown_bundle(cluster, authority)
    names = sorted(bundle.sites)
    if len(names) != 1:
        raise DataError(
            f"ConfigMap {cluster.namespace}/{authority}: its certificates name "
            f"{' and '.join(names) or 'no site'}; an operator's authority names its own. Name "
            "another with --authority (the chart's authority.secretName)"
        )
    hint = ""
    if not address:
        address, hint = _federation_address(cluster)
    return SiteAuthority(names[0], bundle, address, hint)


def _shown_bundle(cluster: Cluster, authority: str) -> Bundle:
    where = f"ConfigMap {cluster.namespace}/{authority}"
    try:
        found = cluster.get(
            path_of("api", "v1", "namespaces", cluster.namespace, "configmaps", authority)
        )
    except AbsentError as error:
        raise AbsentError(
            f"there is no {where} (context {cluster.context!r}): the operator shows its "
            "certificates there from its start on; one of an earlier release does not. Name its "
            "namespace with -n, or another authority with --authority (the chart's "
            "authority.secretName)"
        ) from error
    except DeniedError as error:
        raise DeniedError(
            f"{error}. This one is enough: --resource-name={authority}; there are certificates "
            "alone in it"
        ) from error
    text: Any = (found.get("data") or {}).get(cluster_names.BUNDLE_KEY, "")
    try:
        return read_bundle(str(text).encode(errors="replace"))
    except ContractError as error:
        raise DataError(
            f"{where}: its {cluster_names.BUNDLE_KEY} is no authority's: {error}"
        ) from error


def _federation_address(cluster: Cluster) -> tuple[str, str]:
    """host:port as other sites dial it, or a hint of what it has to be."""
    path = path_of("api", "v1", "namespaces", cluster.namespace, "services")
    try:
        listed = cluster.get(path, {"labelSelector": _OPERATOR}).get("items") or []
    except (DeniedError, UnavailableError):
        return "", "host:port of the federation Service (Services may not be listed here)"
    address, hint = _by_service(listed)
    return (address, hint) if address else _by_gateway(cluster, listed, hint)


def _by_service(listed: Sequence[dict[str, Any]]) -> tuple[str, str]:
    found = [
        (service, port)
        for service in listed
        for port in service["spec"].get("ports") or ()
        if port.get("name") == _PORT
    ]
    if len(found) != 1:
        how_many = "several federation Services" if found else "no federation Service yet"
        return "", f"host:port by which other sites reach this one ({how_many})"
    return _address_of(*found[0])


def _by_gateway(cluster: Cluster, listed: Sequence[dict[str, Any]], hint: str) -> tuple[str, str]:
    """Of its gateway, which the chart gives a route to the operator; the hint where there is none.

    The operator's ConfigMap is called as its own Service, the one without the federation's port.
    """
    operators = [
        str(service["metadata"]["name"])
        for service in listed
        if all(port.get("name") != _PORT for port in service["spec"].get("ports") or ())
    ]
    if len(operators) != 1:
        return "", hint
    try:
        gateway = settings_of(cluster, operators[0], READ_TIMEOUT_S).get("gateway")
    except DLionError:
        more = f"or its gateway.address (ConfigMap {operators[0]} cannot be read here)"
        return "", f"{hint}; {more}"
    address = gateway.get("address") if isinstance(gateway, dict) else None
    if not isinstance(address, str) or address_fault(address):
        return "", hint
    return address, ""


def _address_of(service: dict[str, Any], port: dict[str, Any]) -> tuple[str, str]:
    kind = service["spec"].get("type")
    if kind == "NodePort":
        return "", f"an address of a node, and :{port.get('nodePort')}"
    if kind == "LoadBalancer":
        ingress = ((service.get("status") or {}).get("loadBalancer") or {}).get("ingress") or [{}]
        host = ingress[0].get("hostname") or ingress[0].get("ip")
        if host:
            return joined(host, port["port"]), ""
        return "", f"what the load balancer gets, and :{port['port']}; it has no address yet"
    name = service["metadata"]["name"]
    return "", f"what other sites call Service {name} (ClusterIP), and :{port['port']}"
