"""Tests of the chart's values and their use.

The schema has every value, and each changes the output. Unknown and invalid values are refused with
their place. The operator's own loader accepts every rendered configuration. Each of its settings
can be reached, up to the bounds of the schema. `dlion render` makes the same settings from the same
values.

Left out: several sites (test_sites.py); an API server (tests/cluster/test_chart.py).
"""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from chart import CHART, GATEWAY, NAMESPACE, SITE, Helm, merged, nested, sites
from dlion_api.document.shapes import document_name
from dlion_api.errors import UnavailableError
from dlion_cli.inputs import chart_values
from dlion_operator.model.settings import (
    FederationSettings,
    Gateway,
    GatewayListenerSettings,
    RemoteSite,
    Settings,
    load_settings,
)
from dlion_operator.model.site_runtime import SiteRuntime
from dlion_operator.model.tenancy import PortRange, TemplateLimits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
TAINT = {"key": "edge", "operator": "Exists"}
DIGEST = "sha256:" + "0" * 64
ON = {"monitoring": {part: {"enabled": True} for part in ("monitors", "rules", "dashboards")}}
TEMPLATE_LISTS = [field.name for field in dataclasses.fields(TemplateLimits)]
RENDERED = (
    "advertised_address", "images", "coordinator", "keeper", "sidecar", "load_balancer", "gateway",
    "tenancy", "scratch", "network_policies", "kueue", "default_runtime",
)  # fmt: skip
"""Settings that matter for a job's objects."""
OTHER: dict[str, Any] = {
    "site.name": "plant-b",
    "site.advertisedAddress": "plant-a.example",
    "sites": sites("plant-a", "plant-c")["sites"],
    "federation.port": 18446,
    "federation.certificateLifeSeconds": 60,
    "federation.measureOnDemand": True,
    "federation.service.type": "NodePort",
    "federation.service.nodePort": {"type": "LoadBalancer", "nodePort": 30446},
    "federation.service.annotations": {"a": "b"},
    "namespaces": ["ml"],
    "images.registry": "mirror.plant-a.example:5000",
    "images.operator.repository": "a/operator",
    "images.operator.tag": "1.2",
    "images.operator.digest": DIGEST,
    "images.worker.repository": "a/worker",
    "images.worker.tag": "1.2",
    "images.worker.digest": DIGEST,
    "images.sidecar.repository": "a/sidecar",
    "images.sidecar.tag": "1.2",
    "images.sidecar.digest": DIGEST,
    "images.pullPolicy": "Always",
    "images.pullSecrets": ["registry"],
    "operator.logFormat": "text",
    "operator.resources.requests.cpu": 1,
    "operator.resources.requests.memory": "1Gi",
    "operator.resources.limits.memory": "2Gi",
    "operator.nodeSelector": {"disk": "ssd"},
    "operator.tolerations": [TAINT],
    "operator.affinity": {"nodeAffinity": {}},
    "operator.priorityClassName": "system-cluster-critical",
    "operator.podAnnotations": {"a": "b"},
    "coordinator.port": 17443,
    "coordinator.address": "10.0.0.1:7443",
    "keeper.size": "5Gi",
    "keeper.storageClassName": "fast",
    "keeper.claimName": "models",
    "keeper.resources.requests.cpu": "100m",
    "keeper.resources.requests.memory": "1Gi",
    "keeper.resources.limits.memory": "2Gi",
    "keeper.nodeSelector": {"disk": "ssd"},
    "keeper.tolerations": [TAINT],
    "keeper.affinity": {"nodeAffinity": {}},
    "keeper.priorityClassName": "storage",
    "sidecar.resources.requests.cpu": "100m",
    "sidecar.resources.requests.memory": "1Gi",
    "sidecar.resources.limits.memory": "2Gi",
    "loadBalancer.annotations": {"a": "b"},
    "loadBalancer.className": "tailscale",
    "gateway.address": {"address": "plant-b.example:443", "parent": {"name": "edge"}},
    "gateway.route": "IngressRouteTCP",
    "gateway.parent.name": "other",
    "gateway.parent.namespace": "gateways",
    "gateway.parent.sectionName": "tls",
    "gateway.entryPoints": ["dlion"],
    "authority.secretName": "plant-a-ca",
    "authority.keep": True,
    "authority.certificateLifeSeconds": 2_147_483_647,
    "tls.secretNames": ["plant-a-ca"],
    "tls.certManager": True,
    "tenancy.excludedNamespaces": ["kube-system"],
    "tenancy.admissionPolicy": "Never",
    "tenancy.podTemplate.serviceAccounts": ["a", "b-*"],
    "tenancy.podTemplate.secrets": ["*"],
    "tenancy.podTemplate.configMaps": [],
    "tenancy.podTemplate.claims": ["data"],
    "tenancy.podTemplate.volumes": ["emptyDir"],
    "tenancy.podTemplate.images": ["registry.example/*"],
    "tenancy.podTemplate.pullSecrets": [],
    "tenancy.podTemplate.runtimeClasses": ["kata"],
    "tenancy.podTemplate.priorityClasses": ["low"],
    "tenancy.podTemplate.tolerations": ["edge"],
    "tenancy.podTemplate.annotations": ["team.example/*"],
    "tenancy.podTemplate.fields": ["nodeName"],
    "scratch.tmp": "1Gi",
    "scratch.shared": "2Gi",
    "scratch.state": "1.5Ti",
    "scratch.downloads": "64Gi",
    "kueue.enabled": True,
    "runtimes.default": "edge",
    "metrics.port": 19440,
    "health.port": 19441,
    "crds.enabled": False,
    "crds.keep": False,
    "rbac.create": False,
    "rbac.aggregate": False,
    "serviceAccount.create": {"create": False, "name": "somebody"},
    "serviceAccount.name": "somebody",
    "serviceAccount.annotations": {"a": "b"},
    "commonLabels": {"team": "edge"},
    "networkPolicies.enabled": False,
    "networkPolicies.restrictEgress": False,
    "networkPolicies.peerPorts": [{"port": 443}],
    "networkPolicies.egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.9/32"}}]}],
    "networkPolicies.dnsTo": [{"namespaceSelector": {}}],
    "networkPolicies.apiServerPorts": [6443],
    "networkPolicies.peerCIDRs": ["10.1.0.0/16"],
    "networkPolicies.gatewayFrom": [{"namespaceSelector": {}}],
    "networkPolicies.metricsFrom": [{"namespaceSelector": {}}],
    "monitoring.monitors.enabled": False,
    "monitoring.monitors.interval": "5s",
    "monitoring.monitors.labels": {"release": "prometheus"},
    "monitoring.rules.enabled": False,
    "monitoring.rules.labels": {"release": "prometheus"},
    "monitoring.dashboards.enabled": False,
    "monitoring.dashboards.labels.grafana_dashboard": "yes",
}
"""Another value for each; with it, the output of the chart differs."""
WITH_ANOTHER = {
    "serviceAccount.create": "serviceAccount",
    "federation.service.nodePort": "federation.service",
    "gateway.address": "gateway",
}
"""Values that need another value: the places of both."""
SCENE = merged(
    SITE,
    ON,
    GATEWAY,
    sites("plant-a", "plant-b"),
)
"""Tests that change one value share its output, because each rendering is a process."""


def leaves(node: dict[str, Any], path: str = "") -> Iterator[str]:
    """The path of every value that is not a non-empty mapping."""
    for key, value in node.items():
        full = f"{path}.{key}".lstrip(".")
        if isinstance(value, dict) and value:
            yield from leaves(value, full)
        else:
            yield full


def test_every_value_is_tested() -> None:
    assert set(OTHER) == set(leaves(VALUES))


@pytest.fixture(scope="module")
def usual(helm: Helm) -> list[dict[str, Any]]:
    """The output of the chart with the usual value of everything."""
    return helm.objects(SCENE)


@pytest.mark.parametrize("path", OTHER)
def test_a_value_changes_what_is_rendered(
    helm: Helm, usual: list[dict[str, Any]], path: str
) -> None:
    changed = nested(WITH_ANOTHER.get(path, path), OTHER[path])
    assert helm.objects(merged(SCENE, changed)) != usual


def test_the_schema_has_exactly_the_values() -> None:
    assert set(_described(SCHEMA, VALUES)) == set(leaves(VALUES))


def _described(schema: dict[str, Any], default: Any, path: str = "") -> Iterator[str]:
    """Paths in the schema, as deep as the defaults."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    free = schema.get("additionalProperties", {}) is not False
    for key in default if free and isinstance(default, dict) else schema.get("properties", {}):
        if key == "global":  # helm's own
            continue
        full = f"{path}.{key}".lstrip(".")
        inner = default.get(key) if isinstance(default, dict) else None
        if isinstance(inner, dict) and inner:
            below = schema["additionalProperties"] if free else schema["properties"][key]
            yield from _described(below, inner, full)
        elif inner is not None:
            yield full
        else:
            assert full.endswith(("requests", "limits", "limits.cpu")), full  # no default


REFUSED: list[tuple[str, Any, str]] = [
    ("site.name", "", "site.name is missing: name this site"),
    ("site.name", "Plant A", "/site/name"),
    ("site.name", "a" * 41, "/site/name"),
    ("site.name", "-a", "/site/name"),
    ("site.name", 7, "/site/name"),
    ("site.title", "a", "title"),
    ("site.advertisedAddress", "plant-a.example:30446", "/site/advertisedAddress"),
    ("site.advertisedAddress", "https://plant-a.example", "/site/advertisedAddress"),
    ("site.advertisedAddress", "10.0.0.1 ", "/site/advertisedAddress"),
    ("cities", [], "cities"),
    ("namespaces", "ml", "/namespaces"),
    ("namespaces", ["ml", "ml"], "/namespaces"),
    ("namespaces", ["*"], "/namespaces/0"),
    ("namespaces", ["a"] * 257, "/namespaces"),
    ("images.operator", "dlion-operator:1", "/images/operator"),
    ("images.operator.repository", "", "/images/operator/repository"),
    ("images.operator.repository", "a b", "/images/operator/repository"),
    ("images.worker.tag", "1:2", "/images/worker/tag"),
    ("images.worker.tag", 1.2, "/images/worker/tag"),
    ("images.worker.digest", "0" * 64, "/images/worker/digest"),
    ("images.worker.name", "a", "name"),
    ("images.trainer", {}, "trainer"),
    ("images.pullPolicy", "Sometimes", "/images/pullPolicy"),
    ("images.pullSecrets", [{"name": "a"}], "/images/pullSecrets/0"),
    ("images.pullSecrets", ["a\nb"], "/images/pullSecrets/0"),
    ("operator.replicas", 2, "replicas"),
    ("operator.logFormat", "xml", "/operator/logFormat"),
    ("operator.resources.claims", [], "claims"),
    ("operator.resources.limits.cpu", "many", "/operator/resources/limits/cpu"),
    ("operator.nodeSelector", {"a": True}, "/operator/nodeSelector/a"),
    ("operator.tolerations", {}, "/operator/tolerations"),
    ("coordinator.port", 443, "/coordinator/port"),
    ("coordinator.port", 65536, "/coordinator/port"),
    ("coordinator.port", "7443", "/coordinator/port"),
    ("coordinator.address", "coordinator", "/coordinator/address"),
    ("keeper.size", "big", "/keeper/size"),
    ("keeper.size", "-1Gi", "/keeper/size"),
    ("keeper.resources.limits", {str(i): 1 for i in range(17)}, "/keeper/resources/limits"),
    ("keeper.nodeSelector", {"disk": "a b"}, "/keeper/nodeSelector/disk"),
    ("keeper.tolerations", ["edge"], "/keeper/tolerations/0"),
    ("keeper.tolerations", [TAINT] * 65, "/keeper/tolerations"),
    ("keeper.affinity", [], "/keeper/affinity"),
    ("keeper.priorityClassName", 7, "/keeper/priorityClassName"),
    ("keeper.serviceAccountName", "a", "serviceAccountName"),
    ("sidecar.image", "a", "image"),
    ("loadBalancer.annotations", {"a": 1}, "/loadBalancer/annotations/a"),
    ("loadBalancer.className", "a b", "/loadBalancer/className"),
    ("gateway.address", "https://plant-a.example", "/gateway/address"),
    ("gateway.address", "plant-a.example:443", "gateway.parent.name is missing"),
    ("gateway.route", "HTTPRoute", "/gateway/route"),
    ("authority.secretName", "", "/authority/secretName"),
    ("authority.secretName", "A", "/authority/secretName"),
    ("authority.keep", "yes", "/authority/keep"),
    ("authority.certificateLifeSeconds", 59, "/authority/certificateLifeSeconds"),
    ("authority.certificateLifeSeconds", 2**31, "/authority/certificateLifeSeconds"),
    ("authority.certificateLifeSeconds", "1d", "/authority/certificateLifeSeconds"),
    ("tls.certManager", "yes", "/tls/certManager"),
    ("kueue.enabled", "yes", "/kueue/enabled"),
    ("runtimes.default", "A", "/runtimes/default"),
    ("tenancy.excludedNamespaces", ["*"], "/tenancy/excludedNamespaces/0"),
    ("tenancy.admissionPolicy", True, "/tenancy/admissionPolicy"),
    ("tenancy.podTemplate.secrets", ["a*b"], "/tenancy/podTemplate/secrets/0"),
    ("tenancy.podTemplate.serviceAccounts", [""], "/tenancy/podTemplate/serviceAccounts/0"),
    ("tenancy.podTemplate.images", ["registry.example*"], "/tenancy/podTemplate/images/0"),
    ("tenancy.podTemplate.hostPaths", [], "hostPaths"),
    ("scratch.tmp", "big", "/scratch/tmp"),
    ("scratch.home", "1Gi", "home"),
    ("tls.secretNames", ["A"], "/tls/secretNames/0"),
    ("tls.secretNames", ["a", "a"], "/tls/secretNames"),
    ("federation.port", 1023, "/federation/port"),
    ("federation.measureOnDemand", "yes", "/federation/measureOnDemand"),
    ("federation.certificateLifeSeconds", 59, "/federation/certificateLifeSeconds"),
    ("federation.certificateLifeSeconds", 2**31, "/federation/certificateLifeSeconds"),
    ("federation.port", 7443, "coordinator.port and federation.port are both 7443"),
    ("federation.service.type", "ExternalName", "/federation/service/type"),
    ("federation.service.nodePort", 30446, "federation.service.type NodePort or LoadBalancer"),
    ("federation.service.nodePort", 65536, "/federation/service/nodePort"),
    ("federation.service.port", 1, "port"),
    ("metrics.port", 9441, "metrics.port and health.port are both 9441"),
    ("metrics.port", 7443, "coordinator.port and metrics.port are both 7443"),
    ("health.port", 7443, "coordinator.port and health.port are both 7443"),
    ("keeper", {"size": "1Gi", "claimName": "a"}, "exclude each other"),
    ("crds.enabled", "yes", "/crds/enabled"),
    ("rbac.rules", [], "rules"),
    ("serviceAccount.create", False, "serviceAccount.name is missing"),
    ("serviceAccount.name", "A", "/serviceAccount/name"),
    ("commonLabels", {"a": "b c"}, "/commonLabels/a"),
    ("networkPolicies.peerCIDRs", ["10.0.0.1"], "/networkPolicies/peerCIDRs/0"),
    ("networkPolicies.metricsFrom", ["a"], "/networkPolicies/metricsFrom/0"),
    ("networkPolicies.jobNamespaces", ["a"], "jobNamespaces"),
    ("networkPolicies.peerPorts", [443], "/networkPolicies/peerPorts/0"),
    ("networkPolicies.peerPorts", [{"port": 0}], "/networkPolicies/peerPorts/0/port"),
    ("networkPolicies.egress", {}, "/networkPolicies/egress"),
    ("networkPolicies.apiServerPorts", [], "/networkPolicies/apiServerPorts"),
    ("monitoring.monitors.interval", "often", "/monitoring/monitors/interval"),
    ("monitoring.rules.interval", "1m", "interval"),
    ("monitoring.dashboards.labels", {"a": 1}, "/monitoring/dashboards/labels/a"),
    # helm removes what is null.
    *(
        (name, None, f"'{name}'")
        for name, value in VALUES.items()
        if isinstance(value, dict) and value
    ),
    ("images.worker", None, "'worker'"),
    ("images.worker.repository", None, "'repository'"),
]


@pytest.mark.parametrize(("path", "value", "place"), REFUSED)
def test_an_invalid_value_is_refused_with_its_place(
    helm: Helm, path: str, value: Any, place: str
) -> None:
    with pytest.raises(UnavailableError) as refusal:
        helm.objects(merged(SITE, nested(path, value)))
    message = str(refusal.value)
    assert place in message or place.lstrip("/").replace("/", ".") in message


def test_the_name_of_the_site_is_required(helm: Helm) -> None:
    with pytest.raises(UnavailableError, match=r"--set site.name=plant-a"):
        helm.objects({})


# ---- the operator's settings

REACHED: dict[str, tuple[dict[str, Any], Any]] = {
    "site": (nested("site.name", "a" * 40), "a" * 40),
    "advertised_address": (nested("site.advertisedAddress", "fd00::1"), "fd00::1"),
    "namespaces": (nested("namespaces", ["ml", "edge"]), ("ml", "edge")),
    "federation": (
        merged(
            sites("plant-a", "plant-b"),
            {
                "federation": {
                    "port": 18446,
                    "certificateLifeSeconds": 60,
                    "measureOnDemand": True,
                }
            },
        ),
        FederationSettings(port=18446, certificate_life_seconds=60, measure_on_demand=True),
    ),
    "sites": (
        sites("plant-a", "plant-b"),
        (
            RemoteSite(
                name="plant-b",
                address="plant-b.example:8446",
                bundle_file="/etc/dlion/trust/plant-b.pem",
            ),
        ),
    ),
    "images.worker": (
        nested("images", {"registry": "r.example/", "worker": {"tag": "1", "digest": DIGEST}}),
        f"r.example/dlion-worker@{DIGEST}",
    ),
    "images.sidecar": (nested("images.sidecar.tag", "1.0"), "dlion-sidecar:1.0"),
    "images.pull_policy": (nested("images.pullPolicy", "Never"), "Never"),
    "images.pull_secrets": (nested("images.pullSecrets", ["a"] * 16), ("a",) * 16),
    "coordinator.port": (nested("coordinator.port", 65535), 65535),
    "coordinator.address": (nested("coordinator.address", "[fd00::1]:1"), "[fd00::1]:1"),
    "keeper.size": (nested("keeper.size", "1.5Gi"), "1.5Gi"),
    "keeper.storage_class_name": (nested("keeper.storageClassName", "a" * 253), "a" * 253),
    "keeper.claim_name": (nested("keeper.claimName", "a" * 253), "a" * 253),
    "keeper.resources.requests": (
        nested("keeper.resources.requests", {"cpu": 2, "memory": 1073741824}),
        {"cpu": "2", "memory": "1073741824"},
    ),
    "keeper.resources.limits": (
        nested("keeper.resources.limits", {"memory": "1.5G"}),
        {"memory": "1.5G"},
    ),
    "keeper.node_selector": (nested("keeper.nodeSelector", {"a": "b" * 63}), {"a": "b" * 63}),
    "keeper.tolerations": (nested("keeper.tolerations", [TAINT] * 64), (TAINT,) * 64),
    "keeper.affinity": (
        nested("keeper.affinity", {"podAffinity": "checked by the API server"}),
        {"podAffinity": "checked by the API server"},
    ),
    "keeper.priority_class_name": (nested("keeper.priorityClassName", "a" * 253), "a" * 253),
    "sidecar.resources.requests": (
        nested("sidecar.resources.requests", {"cpu": "1m", "memory": "1"}),
        {"cpu": "1m", "memory": "1"},
    ),
    "sidecar.resources.limits": (
        nested("sidecar.resources.limits", {"memory": 1, "nvidia.com/gpu": 1}),
        {"memory": "1", "nvidia.com/gpu": "1"},
    ),
    "load_balancer.annotations": (nested("loadBalancer.annotations", {"a": "b"}), {"a": "b"}),
    "load_balancer.class_name": (nested("loadBalancer.className", "a" * 253), "a" * 253),
    "gateway": (
        dict(GATEWAY),
        Gateway(address="plant-a.example:443", parent=GatewayListenerSettings(name="edge")),
    ),
    "authority.secret_name": (nested("authority.secretName", "true"), "true"),
    "authority.owner_service": (nested("authority.keep", True), ""),
    "authority.certificate_life_seconds": (
        nested("authority.certificateLifeSeconds", 2**31 - 1),
        2**31 - 1,
    ),
    "tenancy.excluded_namespaces": (
        merged(
            nested("namespaces", ["ml", "kube-system"]),
            nested("tenancy.excludedNamespaces", ["kube-system", "a"]),
        ),
        ("a", NAMESPACE),
    ),
    "tenancy.admission_policy": ({}, "dlion-dlion-system-tenancy"),
    **{
        f"tenancy.pod_template.{name}": (
            nested(f"tenancy.podTemplate.{document_name(name)}", ["a/*", "b"]),
            ("a/*", "b"),
        )
        for name in TEMPLATE_LISTS
    },
    "scratch.tmp": (nested("scratch.tmp", "1.5Gi"), "1.5Gi"),
    "scratch.shared": (nested("scratch.shared", "1M"), "1M"),
    "scratch.state": (nested("scratch.state", "1"), "1"),
    "scratch.downloads": (nested("scratch.downloads", "2.5T"), "2.5T"),
    "network_policies.enabled": (nested("networkPolicies.enabled", False), False),
    "network_policies.restrict_egress": (nested("networkPolicies.restrictEgress", False), False),
    "network_policies.operator_namespace": (nested("coordinator.address", "10.0.0.1:1"), ""),
    "network_policies.operator_labels": (
        {},
        {
            "app.kubernetes.io/name": "dlion",
            "app.kubernetes.io/instance": "dlion",
            "app.kubernetes.io/component": "operator",
        },
    ),
    "network_policies.peer_cidrs": (sites("plant-a", "plant-b"), ("0.0.0.0/0", "::/0")),
    "network_policies.peer_ports": (
        merged(GATEWAY, nested("networkPolicies.peerPorts", [{"port": 1, "endPort": 65535}])),
        (PortRange(port=1, end_port=65535), PortRange(port=443)),
    ),
    "network_policies.gateway_from": (
        merged(
            sites("plant-a", "plant-b"),
            nested("networkPolicies.gatewayFrom", [{"podSelector": {}}]),
        ),
        ({"podSelector": {}},),
    ),
    "network_policies.metrics_from": (
        nested("networkPolicies.metricsFrom", [{"podSelector": {}}]),
        ({"podSelector": {}},),
    ),
    "network_policies.egress": (nested("networkPolicies.egress", [{}]), ({},)),
    "network_policies.dns_to": (
        nested("networkPolicies.dnsTo", [{"podSelector": {}}]),
        ({"podSelector": {}},),
    ),
    "kueue": (nested("kueue.enabled", True), True),
    "default_runtime": (nested("runtimes.default", "a.b-c"), "a.b-c"),
    "metrics_port": (nested("metrics.port", 1024), 1024),
    "health_port": (nested("health.port", 65535), 65535),
}
"""By the setting: values that reach it, at a bound of the schema if there is one."""


def settings_of(helm: Helm, values: dict[str, Any], folder: Path) -> Settings:
    """The settings that the operator loads from the rendered configuration."""
    data = helm.one("ConfigMap", values, only="config.yaml")["data"]
    file = folder / "config.yaml"
    file.write_text(data["config.yaml"])
    return load_settings(file)


def fields(kind: Any, path: str = "") -> Iterator[str]:
    """The path of every setting."""
    for name, annotation in typing.get_type_hints(kind).items():
        is_of_a_run = annotation == SiteRuntime | None  # which is in no file
        if typing.get_origin(annotation) is typing.ClassVar or is_of_a_run:
            continue
        full = f"{path}.{name}".lstrip(".")
        if dataclasses.is_dataclass(annotation):
            yield from fields(annotation, full)
        else:
            yield full


def test_every_setting_of_the_operator_is_tested() -> None:
    assert set(REACHED) == set(fields(Settings))


@pytest.mark.parametrize("path", REACHED)
def test_a_setting_of_the_operator_is_reached(helm: Helm, path: str, tmp_path: Path) -> None:
    values, expected = REACHED[path]
    found: Any = settings_of(helm, merged(SITE, values), tmp_path)
    for name in path.split("."):
        found = getattr(found, name)
    if isinstance(found, dict):
        found = {key: str(value) for key, value in found.items()}
    assert found == expected


def test_the_defaults_are_the_operators_own(helm: Helm, tmp_path: Path) -> None:
    found = settings_of(helm, dict(SITE), tmp_path)
    for field in dataclasses.fields(Settings):
        if field.name == "authority":  # the chart's Service exists only with the chart
            named = dataclasses.replace(field.default, owner_service="dlion-operator")
            assert found.authority == named
        elif field.name in {"keeper", "sidecar"}:  # the chart gives them resources
            own = dataclasses.replace(getattr(found, field.name), resources=None)
            assert own == dataclasses.replace(field.default, resources=None)
        elif field.name == "tenancy":  # the chart knows its namespace, and makes the policy
            own = found.tenancy
            assert NAMESPACE in own.excluded_namespaces
            assert own.pod_template == field.default.pod_template
            assert set(field.default.excluded_namespaces) < set(own.excluded_namespaces)
        elif field.name == "network_policies":
            assert found.network_policies.enabled
            assert found.network_policies.peer_ports == field.default.peer_ports
        elif field.default is not dataclasses.MISSING:
            assert getattr(found, field.name) == field.default
    assert found.coordinator.address == f"dlion-operator.{NAMESPACE}.svc:7443"
    assert found.images.worker == "dlion-worker:0.1.0"


@pytest.mark.parametrize("path", [path for path in OTHER if not path.startswith("monitoring")])
def test_the_operator_accepts_every_configuration(helm: Helm, path: str, tmp_path: Path) -> None:
    changed = nested(WITH_ANOTHER.get(path, path), OTHER[path])
    assert settings_of(helm, merged(SCENE, changed), tmp_path).site


@pytest.mark.parametrize("path", [path for path in OTHER if not path.startswith("monitoring")])
def test_render_reads_values_like_the_chart(helm: Helm, path: str, tmp_path: Path) -> None:
    changed = merged(SCENE, nested(WITH_ANOTHER.get(path, path), OTHER[path]))
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(changed))
    of_the_chart = settings_of(helm, changed, tmp_path)
    values = chart_values.read_values(file)
    here = chart_values.settings_of(values, of_the_chart.site, source=str(file))
    of_the_chart = dataclasses.replace(  # no file has the rights of a user
        of_the_chart,
        tenancy=dataclasses.replace(of_the_chart.tenancy, admission_policy=""),
    )
    for name in RENDERED:
        assert getattr(here, name) == getattr(of_the_chart, name), name


def test_render_has_the_charts_defaults() -> None:
    file = CHART / "values.yaml"
    of_the_file = chart_values.settings_of(chart_values.read_values(file), "plant-a", source="")
    assert of_the_file == chart_values.settings_of(chart_values.DEFAULTS, "plant-a", source="")
