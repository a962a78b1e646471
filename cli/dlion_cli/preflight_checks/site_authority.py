"""A site's name, bundle and federation address, read from its cluster.

Called by `trust`. Reads the bundle from a ConfigMap, because the authority's Secret also contains
the private key.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from dlion_api.addresses import join_host_port
from dlion_api.cluster_names import BUNDLE_KEY
from dlion_api.errors import (
    AbsentError,
    ContractError,
    DataError,
    DeniedError,
    DLionError,
    UnavailableError,
)
from dlion_cli.cluster.client import READ_TIMEOUT_S, ClusterClient
from dlion_cli.cluster.documents import OPERATOR_SELECTOR
from dlion_cli.inputs.bundles import Bundle, read_bundle
from dlion_cli.inputs.listed_sites import address_problem
from dlion_cli.preflight_checks.site_cluster import operator_settings

_PORT: Final = "federation"


@dataclass(frozen=True)
class SiteAuthority:
    """What other sites need to know of a site."""

    name: str
    bundle: Bundle
    address: str
    """host:port of its federation Service or gateway; empty if neither has one."""
    hint: str
    """A description of the address if it is unknown."""


def site_authority(cluster: ClusterClient, *, authority: str, address: str = "") -> SiteAuthority:
    """The site whose operator runs in the cluster's namespace.

    Without `address`, the federation Service's or else the gateway's address is used.

    Raises: AbsentError without the ConfigMap; DeniedError without permission to read it; DataError
    if it has no site's authority; and as `ClusterClient.get`.
    """
    bundle = _read_published_bundle(cluster, authority)
    names = sorted(bundle.sites)
    if len(names) != 1:
        raise DataError(
            f"ConfigMap {cluster.namespace}/{authority}: its certificates name "
            f"{' and '.join(names) or 'no site'}; an operator's authority names its own site. "
            "Select another with --authority (the chart's authority.secretName)"
        )
    hint = ""
    if not address:
        address, hint = _federation_address(cluster)
    return SiteAuthority(names[0], bundle, address, hint)


def _read_published_bundle(cluster: ClusterClient, authority: str) -> Bundle:
    where = f"ConfigMap {cluster.namespace}/{authority}"
    try:
        document = cluster.get(cluster.core_path("configmaps", authority))
    except AbsentError as error:
        raise AbsentError(
            f"there is no {where} (context {cluster.context!r}). The operator publishes its "
            "certificates there when it starts, except in earlier releases. Select its namespace "
            "with -n, or another authority with --authority (the chart's authority.secretName)"
        ) from error
    except DeniedError as error:
        raise DeniedError(
            f"{error}. Permission for this ConfigMap is sufficient: --resource-name={authority}; "
            "it contains only certificates"
        ) from error
    text: Any = (document.get("data") or {}).get(BUNDLE_KEY, "")
    try:
        return read_bundle(str(text).encode(errors="replace"))
    except ContractError as error:
        raise DataError(f"{where}: its {BUNDLE_KEY} is invalid: {error}") from error


def _federation_address(cluster: ClusterClient) -> tuple[str, str]:
    """host:port for other sites, or a hint."""
    selector = {"labelSelector": OPERATOR_SELECTOR}
    try:
        listed = cluster.get(cluster.core_path("services"), selector).get("items") or []
    except (DeniedError, UnavailableError):
        return "", "host:port of the federation Service (no permission to list Services)"
    address, hint = _service_address(listed)
    return (address, hint) if address else _gateway_address(cluster, listed, hint)


def _service_address(listed: Sequence[dict[str, Any]]) -> tuple[str, str]:
    ports = [
        (service, port)
        for service in listed
        for port in service["spec"].get("ports") or ()
        if port.get("name") == _PORT
    ]
    if len(ports) != 1:
        how_many = "several federation Services" if ports else "no federation Service yet"
        return "", f"host:port by which other sites reach this one ({how_many})"
    return _address_of(*ports[0])


def _gateway_address(
    cluster: ClusterClient, listed: Sequence[dict[str, Any]], hint: str
) -> tuple[str, str]:
    """The address of the gateway in the operator's settings, or the hint.

    The operator's ConfigMap has the name of its own Service, which is the one without the
    federation port.
    """
    operators = [
        str(service["metadata"]["name"])
        for service in listed
        if all(port.get("name") != _PORT for port in service["spec"].get("ports") or ())
    ]
    if len(operators) != 1:
        return "", hint
    try:
        gateway = operator_settings(cluster, operators[0], READ_TIMEOUT_S).get("gateway")
    except DLionError:
        more = f"or its gateway.address (ConfigMap {operators[0]} cannot be read)"
        return "", f"{hint}; {more}"
    address = gateway.get("address") if isinstance(gateway, dict) else None
    if not isinstance(address, str) or address_problem(address):
        return "", hint
    return address, ""


def _address_of(service: dict[str, Any], port: dict[str, Any]) -> tuple[str, str]:
    kind = service["spec"].get("type")
    if kind == "NodePort":
        return "", f"a node's address, and :{port.get('nodePort')}"
    if kind == "LoadBalancer":
        ingress = ((service.get("status") or {}).get("loadBalancer") or {}).get("ingress") or [{}]
        host = ingress[0].get("hostname") or ingress[0].get("ip")
        if host:
            return join_host_port(host, port["port"]), ""
        return "", f"the load balancer's address, and :{port['port']}; it has none yet"
    name = service["metadata"]["name"]
    return (
        "",
        f"the address at which other sites reach Service {name} (ClusterIP), and :{port['port']}",
    )
