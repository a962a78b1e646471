"""Tests of the chart with a list of sites, the same at each site.

One shared file of values and a few lines per site give each site's view of the others. It consists
of settings, a folder of bundles, a Service, a route of a gateway and a rule of the network policy.
A single site gets none of these. Another bundle does not restart pods. Impossible values are
refused with the site's name, a private key without its content.

Left out: the operator's use of it; the renewal of a mounted bundle in a running pod.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from chart import SITE, Helm, bundle, entry, merged, nested, sites
from dlion_api.errors import UnavailableError
from dlion_api.names import OperatorIdentity, SiteName

if TYPE_CHECKING:
    from collections.abc import Mapping

NAMES = ("plant-a", "plant-b", "plant-c")
SHARED = merged(sites(*NAMES), {"federation": {"service": {"type": "NodePort"}}})
KEY = ec.generate_private_key(ec.SECP256R1()).private_bytes(
    Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
)


def at(site: str, *more: Mapping[str, Any]) -> dict[str, Any]:
    """The shared values and that site's few lines."""
    return merged(SHARED, nested("site.name", site), *more)


def settings(helm: Helm, values: Mapping[str, Any]) -> dict[str, Any]:
    """The operator's settings file."""
    data = helm.one("ConfigMap", values, only="config.yaml")["data"]
    found: dict[str, Any] = yaml.safe_load(data["config.yaml"])
    return found


def pod(helm: Helm, values: Mapping[str, Any]) -> dict[str, Any]:
    """The operator's pod."""
    found = helm.one("Deployment", values, only="deployment.yaml")
    template: dict[str, Any] = found["spec"]["template"]
    return template


@pytest.mark.parametrize("own", NAMES)
def test_each_site_has_the_others_in_its_settings(helm: Helm, own: str) -> None:
    others = [name for name in NAMES if name != own]
    found = settings(helm, at(own))
    assert found["site"] == own
    assert found["federation"] == {
        "port": 8446,
        "certificateLifeSeconds": 86400,
        "measureOnDemand": False,  # any client that reaches the port of metrics may read them
    }
    assert found["sites"] == [
        {
            "name": name,
            "address": f"{name}.example:8446",
            "bundleFile": f"/etc/dlion/trust/{name}.pem",
        }
        for name in others
    ]
    trust = helm.one("ConfigMap", at(own), only="trust.yaml")
    assert trust["data"] == {f"{name}.pem": bundle(name) for name in others}
    spec = pod(helm, at(own))["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in spec["containers"][0]["volumeMounts"]}
    mount = mounts["/etc/dlion/trust"]
    assert volumes[mount["name"]]["configMap"] == {"name": trust["metadata"]["name"]}
    assert mount["readOnly"]
    assert "subPath" not in mount  # with one, a changed bundle would not reach the pod


@pytest.mark.parametrize("listed", [[], [{"name": "plant-a"}], [entry("plant-a")]])
def test_a_single_site_has_no_others_in_its_settings(
    helm: Helm, listed: list[dict[str, Any]]
) -> None:
    values = merged(SITE, {"sites": listed})
    assert helm.objects(values) == helm.objects(SITE)
    assert not {"federation", "sites"} & set(settings(helm, values))


def test_other_sites_reach_the_service(helm: Helm) -> None:
    ports = {
        "federation": {"port": 18446, "service": {"nodePort": 30446, "annotations": {"a": "b"}}}
    }
    values = at("plant-a", ports)
    service = helm.one("Service", values, only="service-federation.yaml")
    assert service["spec"]["type"] == "NodePort"
    assert service["metadata"]["annotations"] == {"a": "b"}
    assert service["spec"]["ports"] == [
        {"name": "federation", "port": 18446, "targetPort": 18446, "nodePort": 30446}
    ]
    template = pod(helm, values)
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    opened = {port["name"]: port for port in template["spec"]["containers"][0]["ports"]}
    assert opened["federation"]["containerPort"] == settings(helm, values)["federation"]["port"]
    assert opened["federation"]["containerPort"] == 18446
    longest = helm.objects(values, release="x" * 53)
    assert max(len(each["metadata"]["name"]) for each in longest) <= 63


@pytest.mark.parametrize(
    ("kind", "made"), [("ClusterIP", False), ("NodePort", True), ("LoadBalancer", True)]
)
def test_an_external_service_exists_before_the_others_are_named(
    helm: Helm, kind: str, made: bool
) -> None:
    values = merged(SITE, nested("federation.service.type", kind))
    names = {each["metadata"]["name"] for each in helm.objects(values) if each["kind"] == "Service"}
    assert ("dlion-operator-federation" in names) == made
    assert "federation" not in settings(helm, values)


def test_another_bundle_restarts_nothing_but_another_site_does(helm: Helm) -> None:
    renewed = [entry("plant-a"), entry("plant-b", bundle=bundle("plant-b") + bundle("b-next"))]
    two = merged(SITE, sites("plant-a", "plant-b"))
    assert pod(helm, merged(two, {"sites": renewed})) == pod(helm, two)
    trust = helm.one("ConfigMap", merged(two, {"sites": renewed}), only="trust.yaml")
    assert trust["data"] == {"plant-b.pem": bundle("plant-b") + bundle("b-next")}
    assert pod(helm, at("plant-a")) != pod(helm, two)


def test_federation_is_reached_from_the_blocks_of_peers(helm: Helm) -> None:
    def blocks(*values: Mapping[str, Any]) -> list[str]:
        policy = helm.one("NetworkPolicy", merged(*values), only="networkpolicy-operator.yaml")
        return [
            source["ipBlock"]["cidr"]
            for rule in policy["spec"]["ingress"]
            if {"port": "federation", "protocol": "TCP"} in rule["ports"]
            for source in rule["from"]  # a rule without one would admit every client
        ]

    assert blocks(at("plant-a")) == ["0.0.0.0/0", "::/0"]
    some = nested("networkPolicies.peerCIDRs", ["10.1.0.0/16"])
    assert blocks(at("plant-a"), some) == ["10.1.0.0/16"]
    assert blocks(at("plant-a"), nested("networkPolicies.peerCIDRs", [])) == []
    assert blocks(SITE) == []


REFUSED: list[tuple[list[dict[str, Any]], str]] = [
    ([entry("plant-b")], 'site.name "plant-a" is not among sites (plant-b)'),
    ([entry("plant-a"), entry("plant-b"), entry("plant-b")], "sites names plant-b twice"),
    ([{"name": "plant-a"}, entry("plant-b", bundle="")], "dlion trust show` there"),
    ([{"name": "plant-a"}, entry("plant-b", bundle=" \n")], "plant-b is not PEM"),
    ([{"name": "plant-a"}, entry("plant-b", address="")], "plant-b has no address"),
    (
        [{"name": "plant-a"}, entry("plant-b"), entry("plant-c", address="plant-b.example:8446")],
        "plant-b and plant-c have the same address plant-b.example:8446",
    ),
    (
        [entry("plant-a"), entry("plant-b", bundle=bundle("plant-a").replace("\n", "\r\n"))],
        "plant-a and plant-b have the same bundle",
    ),
    ([{"name": "plant-a"}, entry("plant-b", bundle=bundle("plant-b")[:-9])], "is not PEM"),
    ([{"name": "plant-a"}, entry("plant-b", bundle="plant-b.pem")], "is not PEM of certificates"),
    ([entry("plant-a", bundle=KEY.decode())], "the bundle of plant-a holds a private key"),
    (
        [{"name": "plant-a"}, entry("plant-b", bundle=bundle("plant-b") + KEY.decode())],
        "the bundle of plant-b holds a private key",
    ),
    ([{"address": "a:1"}], "name"),
    ([entry("Plant-B")], "/sites/0/name"),
    ([entry("a" * 41)], "/sites/0/name"),
    ([entry("plant-b", address="https://plant-b:8446")], "/sites/0/address"),
    ([entry("plant-b", address="plant-b")], "/sites/0/address"),
    ([entry("plant-b", bundle="-" * 16001)], "/sites/0/bundle"),
    ([entry("plant-b", ca="")], "ca"),
    ([{"name": "plant-a"}] * 65, "/sites"),
]


@pytest.mark.parametrize(("listed", "place"), REFUSED)
def test_impossible_values_are_refused(
    helm: Helm, listed: list[dict[str, Any]], place: str
) -> None:
    with pytest.raises(UnavailableError) as refusal:
        helm.objects(merged(SITE, {"sites": listed}))
    message = str(refusal.value)
    assert place in message or place.lstrip("/").replace("/", ".") in message
    assert KEY.decode().splitlines()[1] not in message


@pytest.mark.parametrize("route", ["TLSRoute", "IngressRouteTCP"])
def test_other_sites_reach_the_gateway_too(helm: Helm, route: str) -> None:
    gateway = {
        "address": "plant-a.example:443",
        "route": route,
        "parent": {"name": "edge", "namespace": "gateways", "sectionName": "tls"},
        "entryPoints": ["dlion"],
    }
    values = at("plant-a", {"gateway": gateway})
    made = helm.one(route, values, only="gateway.yaml")
    service = helm.one("Service", values, only="service-federation.yaml")
    backend = {"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}
    host = OperatorIdentity(SiteName("plant-a")).dns_name
    if route == "TLSRoute":
        assert made["spec"] == {
            "parentRefs": [gateway["parent"]],
            "hostnames": [host],
            "rules": [{"backendRefs": [backend]}],
        }
    else:
        assert made["spec"] == {
            "entryPoints": ["dlion"],
            "routes": [{"match": f"HostSNI(`{host}`)", "services": [backend]}],
            "tls": {"passthrough": True},
        }
    alone = merged(SITE, {"gateway": gateway})
    assert route not in {each["kind"] for each in helm.objects(alone)}
