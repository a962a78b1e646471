"""Tests of each template of the chart, with its defaults and with the values that it reads.

They cover names, ports, labels, probes and mounts that other parts rely on. Pods meet `restricted`.
A disabled object is left out. The definition of DLionJob is the repository's own.

Left out: several sites, network policies, refusals, settings and rights (the files beside this
one); an API server (tests/cluster/test_chart.py).
"""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import yaml

import manifest_schema
from chart import CHART, GATEWAY, NAMESPACE, SITE, Helm, merged, nested, sites
from dlion_api import cluster_names as names
from dlion_api.names import JobKey
from dlion_operator.controller.process import IDENTITY_VARIABLE

TEMPLATES = sorted(
    str(path.relative_to(CHART / "templates")) for path in CHART.rglob("templates/**/*.yaml")
)
ON = {"monitoring": {part: {"enabled": True} for part in ("monitors", "rules", "dashboards")}}
TOGETHER = sites("plant-a", "plant-b")
EVERYTHING = merged(SITE, ON, TOGETHER, GATEWAY)
NOT_READY, UNREACHABLE = (f"node.kubernetes.io/{each}" for each in ("not-ready", "unreachable"))
SWITCHES = {
    "admission-policy.yaml": ("tenancy.admissionPolicy", "Never"),
    "config.yaml": None,
    "crd-runtime.yaml": ("crds.enabled", False),
    "crd.yaml": ("crds.enabled", False),
    "dashboards.yaml": ("monitoring.dashboards.enabled", False),
    "deployment.yaml": None,
    "gateway.yaml": ("gateway.address", ""),
    "monitors.yaml": ("monitoring.monitors.enabled", False),
    "networkpolicy-operator.yaml": ("networkPolicies.enabled", False),
    "rights.yaml": ("rbac.create", False),
    "rules.yaml": ("monitoring.rules.enabled", False),
    "service-federation.yaml": ("sites", []),
    "service.yaml": None,
    "serviceaccount.yaml": ("serviceAccount", {"create": False, "name": "a"}),
    "tests/ready.yaml": None,
    "trust.yaml": ("sites", []),
    "users.yaml": ("rbac.aggregate", False),
}
WORKER = names.run_labels(JobKey("ml", "digits", "1"), "plant-a") | {
    names.COMPONENT_LABEL: names.WORKER
}


def test_helm_lint_finds_nothing(helm: Helm) -> None:
    for values in (SITE, EVERYTHING):
        helm.lint(values)


def test_every_template_has_a_switch_or_none() -> None:
    assert list(SWITCHES) == TEMPLATES


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_renders_alone_and_is_labelled(helm: Helm, template: str) -> None:
    found = helm.objects(EVERYTHING | {"commonLabels": {"team": "a"}}, only=template)
    assert found
    for each in found:
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "dlion"
        assert labels["app.kubernetes.io/instance"] == "dlion"
        assert labels["team"] == "a"
        assert len(each["metadata"]["name"]) <= 63


@pytest.mark.parametrize("template", [name for name, switch in SWITCHES.items() if switch])
def test_a_disabled_template_is_left_out(helm: Helm, template: str) -> None:
    switch = SWITCHES[template]
    assert switch is not None
    whole = merged(EVERYTHING, nested(*switch))
    made = {(each["kind"], each["metadata"]["name"]) for each in helm.objects(whole)}
    mine = {(e["kind"], e["metadata"]["name"]) for e in helm.objects(EVERYTHING, only=template)}
    assert made
    assert not made & mine


def test_a_label_of_the_chart_is_not_overwritten(helm: Helm) -> None:
    values = SITE | {"commonLabels": {"app.kubernetes.io/name": "other"}}
    pod = helm.one("Deployment", values, only="deployment.yaml")["spec"]["template"]
    assert pod["metadata"]["labels"]["app.kubernetes.io/name"] == "dlion"


# ---- the definition


@pytest.mark.parametrize(
    ("template", "definition"),
    [("crd.yaml", "dlionjob.yaml"), ("crd-runtime.yaml", "dlionruntime.yaml")],
)
def test_the_definition_is_the_repositorys_own(helm: Helm, template: str, definition: str) -> None:
    made = helm.one("CustomResourceDefinition", only=template)
    own = yaml.safe_load((manifest_schema.CRD.parent / definition).read_text())
    assert made["spec"] == own["spec"]
    assert made["metadata"]["name"] == own["metadata"]["name"]


@pytest.mark.parametrize("template", ["crd.yaml", "crd-runtime.yaml"])
def test_the_definition_is_kept_by_default(helm: Helm, template: str) -> None:
    kept = helm.one("CustomResourceDefinition", only=template)
    assert kept["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    values = merged(SITE, nested("crds.keep", False))
    gone = helm.one("CustomResourceDefinition", values, only=template)
    assert "annotations" not in gone["metadata"]


# ---- the operator


def operator(helm: Helm, values: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """The Deployment's pod and its container."""
    deployment = helm.one("Deployment", merged(SITE, values or {}), only="deployment.yaml")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    template = deployment["spec"]["template"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= (
        template["metadata"]["labels"].items()
    )
    (container,) = template["spec"]["containers"]
    return template, container


def test_the_operator_is_started_by_its_module(helm: Helm) -> None:
    template, container = operator(helm)
    assert container["command"] == [*names.BLOCK_SIGTERM_COMMAND, "python", "-m", "dlion_operator"]
    config = "/etc/dlion-operator/config.yaml"
    assert container["args"] == ["--config", config, "--log-format", "json"]
    *fields, identity = container["env"]
    assert {e["name"]: e["valueFrom"]["fieldRef"]["fieldPath"] for e in fields} == {
        "POD_NAMESPACE": "metadata.namespace",
        "POD_NAME": "metadata.name",
        "POD_UID": "metadata.uid",
    }
    # Kubernetes expands only variables that precede it.
    assert identity == {"name": IDENTITY_VARIABLE, "value": "$(POD_NAME)_$(POD_UID)"}
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert set(mounted) == {"/etc/dlion-operator", "/tmp"}
    assert volumes[mounted["/etc/dlion-operator"]]["configMap"] == {"name": "dlion-operator"}
    assert helm.one("ConfigMap", only="config.yaml")["metadata"]["name"] == "dlion-operator"
    account = helm.one("ServiceAccount", only="serviceaccount.yaml")["metadata"]["name"]
    assert template["spec"]["serviceAccountName"] == account


def test_the_operator_has_probes_of_its_health(helm: Helm) -> None:
    _, container = operator(helm, nested("health.port", 10001))
    asked = {
        kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")
    }
    assert asked == {
        "startup": {"path": "/livez", "port": "health"},
        "liveness": {"path": "/livez", "port": "health"},
        "readiness": {"path": "/readyz", "port": "health"},
    }
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {
        "coordinator": names.COORDINATOR_PORT,
        "metrics": names.METRICS_PORT,
        "health": 10001,
    }


def test_other_settings_restart_the_operator_but_other_values_do_not(helm: Helm) -> None:
    def checksum(values: dict[str, Any]) -> str:
        return str(operator(helm, values)[0]["metadata"]["annotations"]["checksum/config"])

    assert checksum(nested("keeper.size", "1Gi")) != checksum({})
    assert checksum(nested("networkPolicies.apiServerPorts", [6443])) == checksum({})


def test_the_placement_of_the_operator_has_the_fields_of_a_pod(helm: Helm) -> None:
    placed = {
        "nodeSelector": {"a": "b"},
        "affinity": {"podAffinity": {}},
        "priorityClassName": "high",
    }
    more = {"podAnnotations": {"x": "y"}, "resources": {"limits": {"cpu": 1}}}
    template, container = operator(helm, {"operator": placed | more})
    assert placed.items() <= template["spec"].items()
    assert template["metadata"]["annotations"]["x"] == "y"
    assert container["resources"]["limits"] == {"cpu": 1, "memory": "768Mi"}


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ([], {NOT_READY: 20, UNREACHABLE: 20}),
        ([{"key": "edge", "operator": "Exists"}], {"edge": None, NOT_READY: 20, UNREACHABLE: 20}),
        ([{"operator": "Exists"}], {None: None, NOT_READY: 20, UNREACHABLE: 20}),
        ([{"key": NOT_READY, "tolerationSeconds": 90}], {NOT_READY: 90, UNREACHABLE: 20}),
    ],
)
def test_a_dead_node_blocks_the_operator_only_for_seconds(
    helm: Helm, given: list[dict[str, Any]], seconds: dict[str | None, int | None]
) -> None:
    """Kubernetes' default is five minutes."""
    template, _ = operator(helm, nested("operator.tolerations", given))
    found = template["spec"]["tolerations"]
    assert {each.get("key"): each.get("tolerationSeconds") for each in found} == seconds
    assert found[: len(given)] == given
    for each in found[len(given) :]:
        assert (each["operator"], each["effect"]) == ("Exists", "NoExecute")


@pytest.mark.parametrize(
    ("images", "reference"),
    [
        ({}, "dlion-operator:0.1.0"),
        ({"operator": {"tag": "main"}}, "dlion-operator:main"),
        ({"registry": "mirror.example:5000"}, "mirror.example:5000/dlion-operator:0.1.0"),
        ({"registry": "mirror.example/"}, "mirror.example/dlion-operator:0.1.0"),
        (
            {"operator": {"tag": "main", "digest": "sha256:" + "a" * 64}},
            "dlion-operator@sha256:" + "a" * 64,
        ),
    ],
)
def test_an_image_is_named_by_tag_or_digest(
    helm: Helm, images: dict[str, Any], reference: str
) -> None:
    _, container = operator(helm, {"images": images})
    assert container["image"] == reference
    test = helm.one("Pod", merged(SITE, {"images": images}), only="tests/ready.yaml")
    assert test["spec"]["containers"][0]["image"] == reference


@pytest.mark.parametrize("kind", ["Deployment", "Pod"])
def test_pods_of_the_chart_are_restricted(helm: Helm, kind: str) -> None:
    (found,) = [each for each in helm.objects() if each["kind"] == kind]
    pod = found["spec"]["template"]["spec"] if kind == "Deployment" else found["spec"]
    secure = pod["securityContext"]
    assert secure["runAsNonRoot"] is True
    assert secure["runAsUser"] == secure["runAsGroup"] == 65532
    assert secure["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]
    assert pod["automountServiceAccountToken"] is (kind == "Deployment")


def test_all_pods_have_the_secrets_of_a_registry(helm: Helm) -> None:
    values = merged(SITE, nested("images.pullSecrets", ["a", "b"]))
    for only, kind in (("deployment.yaml", "Deployment"), ("tests/ready.yaml", "Pod")):
        found = helm.one(kind, values, only=only)["spec"]
        pod = found["template"]["spec"] if kind == "Deployment" else found
        assert pod["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]


def test_workers_find_the_coordinator_by_the_service(helm: Helm) -> None:
    values = merged(SITE, nested("coordinator.port", 17443))
    service = helm.one("Service", values, only="service.yaml")
    config = yaml.safe_load(
        helm.one("ConfigMap", values, only="config.yaml")["data"]["config.yaml"]
    )
    host, _, port = config["coordinator"]["address"].partition(":")
    assert host == f"{service['metadata']['name']}.{NAMESPACE}.svc"
    ports = {each["name"]: each for each in service["spec"]["ports"]}
    assert set(ports) == {"coordinator", "metrics", "health"}
    assert ports["coordinator"]["port"] == int(port) == config["coordinator"]["port"]
    template, container = operator(helm)
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    open_ports = {each["name"] for each in container["ports"]}
    assert {each["targetPort"] for each in ports.values()} == open_ports


def test_a_release_with_another_name_has_its_own_objects(helm: Helm) -> None:
    made = {e["metadata"]["name"] for e in helm.objects(release="edge") if "spec" in e}
    assert {"edge-dlion-operator", "edge-dlion-test"} < made
    longest = max(helm.objects(release="x" * 53), key=lambda each: len(each["metadata"]["name"]))
    assert len(longest["metadata"]["name"]) <= 63


# ---- monitoring


def test_prometheus_has_the_targets(helm: Helm) -> None:
    values = merged(SITE, ON, nested("monitoring.monitors.labels", {"release": "prometheus"}))
    service = helm.one("ServiceMonitor", values, only="monitors.yaml")
    pods = helm.one("PodMonitor", values, only="monitors.yaml")
    for monitor in (service, pods):
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = service["spec"]["endpoints"]
    (pod_endpoint,) = pods["spec"]["podMetricsEndpoints"]
    asked = {"port": "metrics", "interval": "30s", "honorLabels": True}
    assert endpoint == pod_endpoint == asked
    labels = helm.one("Service", only="service.yaml")["metadata"]["labels"]
    assert service["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert pods["spec"]["selector"]["matchLabels"].items() <= WORKER.items()
    assert pods["spec"]["namespaceSelector"] == {"any": True}
    some = merged(values, nested("namespaces", ["ml"]))
    pods = helm.one("PodMonitor", some, only="monitors.yaml")
    assert pods["spec"]["namespaceSelector"] == {"matchNames": ["ml"]}


def test_alerts_and_dashboards_equal_the_files(helm: Helm) -> None:
    rules = helm.one("PrometheusRule", EVERYTHING, only="rules.yaml")
    assert rules["spec"] == yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    maps = helm.objects(EVERYTHING, only="dashboards.yaml")
    for found, file in zip(maps, sorted((CHART / "dashboards").glob("*.json")), strict=True):
        assert found["data"] == {f"dlion-{file.name}": file.read_text()}
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_the_program_of_helms_test_is_python(helm: Helm) -> None:
    container = helm.one("Pod", only="tests/ready.yaml")["spec"]["containers"][0]
    program, _, text, *addresses = container["command"]
    assert program == "python"
    compile(text, "ask.py", "exec")
    done = subprocess.run(
        ["python3", "-c", text.replace("+ 60", "+ 0"), *("http://127.0.0.1:1/",) * 2],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Connection refused" in done.stderr
    assert addresses == [
        "http://dlion-operator:9441/readyz",
        "http://dlion-operator:9440/metrics",
    ]
