"""Test the chart on a real API server: its objects, the operator's rights, and what remains.

Every object is accepted. A namespace that enforces `restricted` accepts the operator's pod and
refuses an unrestricted one. The account has exactly the rights of files/rights.yaml, with a
ClusterRole and with only Roles. Upgrades change the mode. After `helm uninstall` only the
definition and its jobs remain. A second release is refused on ownership; `crds.enabled=false` and
`--take-ownership` resolve that. On your cluster these tests refuse to start if DLion is in use, and
do not touch other releases.

Left out: a running operator and its leftovers (no node here: test_chart_on_a_node); the Prometheus
Operator's kinds, which this API server lacks.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from chart import CHART, NAMESPACE, SITE, Helm, helm_program, merged, nested, sites
from dlion_api.errors import UnavailableError
from manifest_table import smallest
from testbed.existing import occupation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.kubectl import Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.root]

CRD = "dlionjobs.dlion.dev"
CRDS = (CRD, "dlionruntimes.dlion.dev")
RIGHTS = yaml.safe_load((CHART / "files" / "rights.yaml").read_text())
FOREIGN = "monitoring.coreos.com/v1"
HOMES = ("ml", "edge")
CLUSTER_WIDE = ("Cluster", "Custom", "ValidatingAdmission")
NAMED = {
    "AUTHORITY": "dlion-authority",
    "OPERATOR": "dlion-operator",
    "ADMISSION_POLICY": "dlion-dlion-system-tenancy",
}
RELEASES = ("dlion", "second", "other")
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:dlion-operator"
NAMESPACED = merged(SITE, nested("namespaces", list(HOMES)))
TOGETHER = merged(
    SITE, sites("plant-a", "plant-b", "plant-c"), nested("federation.service.type", "NodePort")
)
LISTED = (
    "clusterroles,clusterrolebindings,roles,rolebindings,deployments,replicasets,services,configmaps,"
    "serviceaccounts,networkpolicies,pods,secrets,crd,"
    "validatingadmissionpolicies,validatingadmissionpolicybindings"
)


@pytest.fixture(scope="module")
def kubectl(control_plane: Kubectl) -> Iterator[Kubectl]:
    """The operator's namespace, which enforces `restricted`, and two namespaces for jobs."""
    restricted = "pod-security.kubernetes.io/enforce=restricted"
    for name in (NAMESPACE, *HOMES):
        control_plane.run("create", "namespace", name)
        control_plane.run("label", "namespace", name, restricted)
    made = replace(control_plane, namespace=NAMESPACE)
    until(
        lambda: made.get("serviceaccounts")["items"]
    )  # no pod is accepted before `default` exists
    try:
        yield made
    finally:
        control_plane.run("delete", "namespace", NAMESPACE, *HOMES, "--wait=false")
        control_plane.run("delete", "crd", *CRDS, "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="module")
def helm(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Helm]:
    """helm with that cluster, from which DLion is removed at the end, also after a failure."""
    program = helm_program()
    assert program is not None  # the testbed has one; for another cluster install it
    made = Helm(program, tmp_path_factory.mktemp("helm"), kubectl)
    yield made
    vacate(made, kubectl)


@pytest.fixture
def vacant(helm: Helm, kubectl: Kubectl) -> Iterator[Helm]:
    """A cluster without DLion, before and after the test."""
    vacate(helm, kubectl)
    yield helm
    vacate(helm, kubectl)


@pytest.fixture
def release(helm: Helm) -> Helm:
    """Install the chart with these values, also if an earlier test left it."""
    helm.run("upgrade", "--install", "dlion", str(CHART), "-n", NAMESPACE, values=dict(SITE))
    return helm


def vacate(helm: Helm, kubectl: Kubectl) -> None:
    """Uninstall all releases of these tests."""
    uninstall_ours(helm)
    until(lambda: are_listed(kubectl))
    kubectl.run("delete", "crd", *CRDS, "--ignore-not-found", timeout_s=180)


def are_listed(kubectl: Kubectl) -> bool:
    """Report whether the API server lists objects of each of our definitions that exists.

    A definition that is deleted earlier stays for minutes: its storage is not ready, and the
    controller that empties it retries with growing delays.
    """
    there = {each["metadata"]["name"] for each in kubectl.get("crd")["items"]}
    try:
        return all(kubectl.get(name, "-A") for name in set(CRDS) & there)
    except UnavailableError:
        return False


def uninstall_ours(helm: Helm) -> None:
    """Uninstall the releases of these tests, also those that are half installed."""
    for name in set(RELEASES) & set(helm.run("list", "-n", NAMESPACE, "--all", "--short").split()):
        helm.run("uninstall", name, "-n", NAMESPACE)


def install(helm: Helm, name: str, values: dict[str, Any], *more: str) -> str:
    """Install and return the output of helm."""
    chart = ["install", name, str(CHART), "-n", NAMESPACE]
    return helm.run(*chart, *more, values=values)


def of_ours(kubectl: Kubectl) -> set[str]:
    """Return the objects except those that every cluster and namespace has."""
    found = set()
    for each in kubectl.get(LISTED, "-A")["items"]:
        meta = each["metadata"]
        name = meta["name"]
        if "dlion" in json.dumps([name, meta.get("labels", {}), meta.get("namespace", "")]):
            found.add(f"{each['kind']} {meta.get('namespace', '')}/{name}".replace(" /", " "))
    standing = {f"{kind} {NAMESPACE}/{name}" for kind, name in (
        ("ConfigMap", "kube-root-ca.crt"), ("ServiceAccount", "default"))}  # fmt: skip
    return found - standing


def until(true: Any) -> None:
    """Wait for the condition: garbage collection on a busy machine sometimes takes a minute."""
    deadline_s = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline_s, "the condition did not become true"
        time.sleep(0.2)


def until_left(kubectl: Kubectl, expected: set[str]) -> None:
    """Wait until exactly the expected objects of the chart are left."""
    deadline_s = time.monotonic() + 120
    while (found := of_ours(kubectl)) != expected:
        assert time.monotonic() < deadline_s, (
            f"unexpected: {found - expected}, missing: {expected - found}"
        )
        time.sleep(0.2)


@pytest.mark.parametrize(
    "values", [SITE, NAMESPACED, TOGETHER], ids=["cluster", "namespaced", "several"]
)
def test_every_object_is_accepted(helm: Helm, kubectl: Kubectl, values: dict[str, Any]) -> None:
    monitored = {part: {"enabled": True} for part in ("monitors", "rules", "dashboards")}
    found = helm.objects(merged(values, {"monitoring": monitored}))
    known = [each for each in found if each["apiVersion"] != FOREIGN]
    assert len(found) - len(known) == 3
    for each in known:
        assert "namespace" in each["metadata"] or each["kind"].startswith(CLUSTER_WIDE)
    home = replace(kubectl, namespace="")
    strict = ("create", "--dry-run=server", "--validate=strict", "-f", "-", "-o", "name")
    listed = {"apiVersion": "v1", "kind": "List", "items": known}
    made = home.run(*strict, text=json.dumps(listed)).split()
    assert len(made) == len(known)


def test_the_operators_pod_is_accepted_where_restricted_is_enforced(
    release: Helm, kubectl: Kubectl
) -> None:
    assert release
    until(lambda: len(kubectl.get("pods", "-l", "app.kubernetes.io/component=operator")["items"]))
    (pod,) = kubectl.get("pods", "-l", "app.kubernetes.io/component=operator")["items"]
    mounts = pod["spec"]["containers"][0]["volumeMounts"]
    assert "/var/run/secrets/kubernetes.io/serviceaccount" in {m["mountPath"] for m in mounts}
    # The same pod without the fields that `restricted` requires is refused: it is enforced.
    template = kubectl.get("deployment", "dlion-operator")["spec"]["template"]
    loose = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "loose"}}
    spec = template["spec"] | {"securityContext": {}}
    dry = ("create", "--dry-run=server", "-f", "-")
    assert kubectl.run(*dry, text=json.dumps(loose | {"spec": template["spec"]}))
    with pytest.raises(UnavailableError, match="violates PodSecurity"):
        kubectl.run(*dry, text=json.dumps(loose | {"spec": spec}))


# ---- rights


def rules_of(kubectl: Kubectl, user: str, namespace: str) -> set[tuple[str, ...]]:
    """Return (group, resource, name, verb) of all that a user may do in that namespace."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    url = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
    groups = ("system:serviceaccounts", "system:authenticated")
    who = [f"--as={user}", *(f"--as-group={group}" for group in groups)]
    answer = json.loads(kubectl.run(*who, "create", "--raw", url, "-f", "-",
                                    text=json.dumps(review)))  # fmt: skip
    assert not answer["status"].get("incomplete"), answer["status"]
    return {
        (group, resource, name, verb)
        for rule in answer["status"]["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames") or [""]
        for verb in rule["verbs"]
    }


def granted(*scopes: str) -> set[tuple[str, ...]]:
    """Return the same tuples of files/rights.yaml."""
    return {
        (group, resource, NAMED.get(name, name), verb)
        for right in RIGHTS
        if right["scope"] in scopes
        for group in right["apiGroups"]
        for resource in right["resources"]
        for name in right.get("resourceNames") or [""]
        for verb in right["verbs"]
    }


def test_the_operator_has_exactly_the_listed_rights(release: Helm, kubectl: Kubectl) -> None:
    no_account = f"system:serviceaccount:{NAMESPACE}:nobody"

    def rights(namespace: str) -> set[tuple[str, ...]]:
        own = rules_of(kubectl, no_account, namespace)
        return rules_of(kubectl, ACCOUNT, namespace) - own

    whole = granted("jobs", "cluster", "AdmissionPolicy")
    assert rights("default") == rights("ml") == whole
    assert rights(NAMESPACE) == whole | granted("operator")
    # Only Roles, once the same release watches some namespaces.
    release.run("upgrade", "dlion", str(CHART), "-n", NAMESPACE, values=NAMESPACED)
    assert rights("default") == set()
    assert rights("ml") == rights("edge") == granted("jobs")
    assert rights(NAMESPACE) == granted("operator")
    assert not any("ClusterRole" in each for each in of_ours(kubectl))
    # And back again.
    release.run("upgrade", "dlion", str(CHART), "-n", NAMESPACE, values=dict(SITE))
    assert rights("ml") == whole
    assert not any(" ml/" in each for each in of_ours(kubectl))


def test_editors_of_a_namespace_can_edit_its_jobs(release: Helm, kubectl: Kubectl) -> None:
    assert release
    for name, role in (("reader", "view"), ("writer", "edit")):
        made = ["create", "rolebinding", name, f"--clusterrole={role}", f"--user={name}"]
        replace(kubectl, namespace="ml").run(*made)

    def verbs(user: str) -> set[str]:
        rules = rules_of(kubectl, user, "ml")
        return {verb for group, resource, _, verb in rules if resource == "dlionjobs"}

    until(lambda: verbs("reader") == {"get", "list", "watch"})
    written = {"create", "update", "patch", "delete"}
    until(lambda: verbs("writer") == written | {"get", "list", "watch"})


# ---- a release's life


def job(kubectl: Kubectl) -> None:
    """Create a user's job in ml."""
    document = smallest()
    document["metadata"] = {"name": "mine"}
    until(lambda: kubectl.knows("dlj"))
    replace(kubectl, namespace="ml").run("create", "-f", "-", text=json.dumps(document))


def test_an_upgrade_names_the_other_sites(release: Helm, kubectl: Kubectl) -> None:
    output = release.run("upgrade", "dlion", str(CHART), "-n", NAMESPACE, values=TOGETHER)
    assert "trains with plant-b, plant-c" in output
    trust = kubectl.get("configmap", "dlion-operator-trust")
    assert set(trust["data"]) == {"plant-b.pem", "plant-c.pem"}
    assert kubectl.get("service", "dlion-operator-federation")["spec"]["type"] == "NodePort"
    release.run("upgrade", "dlion", str(CHART), "-n", NAMESPACE, values=dict(SITE))
    with pytest.raises(UnavailableError, match="not found"):
        kubectl.get("configmap", "dlion-operator-trust")


def test_an_upgrade_changes_settings_and_restarts_the_operator(
    release: Helm, kubectl: Kubectl
) -> None:
    before = kubectl.get("deployment", "dlion-operator")
    output = release.run("upgrade", "dlion", str(CHART), "-n", NAMESPACE,
                       values=merged(SITE, nested("keeper.size", "5Gi")))  # fmt: skip
    assert "keeper.size is not set" not in output
    after = kubectl.get("deployment", "dlion-operator")
    assert after["metadata"]["generation"] == before["metadata"]["generation"] + 1
    config = yaml.safe_load(kubectl.get("configmap", "dlion-operator")["data"]["config.yaml"])
    assert config["keeper"]["size"] == "5Gi"


def test_uninstalling_keeps_the_definition_and_its_jobs(vacant: Helm, kubectl: Kubectl) -> None:
    until_left(kubectl, set())  # pods of an earlier test, if any run
    output = install(vacant, "dlion", SITE)
    for line in (
        "operator of site plant-a watches all namespaces",
        "kubectl -n dlion-system rollout status deployment/dlion-operator",
        "keeper.size is not set",
        "dlion trust show -n dlion-system",
        f"kubectl delete crd {' '.join(CRDS)}",
    ):
        assert line in output
    job(kubectl)
    vacant.run("uninstall", "dlion", "-n", NAMESPACE, "--wait")
    until_left(kubectl, {f"CustomResourceDefinition {each}" for each in CRDS})
    assert replace(kubectl, namespace="ml").get("dlionjob", "mine")
    # The same release adopts it again, and can be configured to remove it.
    output = install(vacant, "dlion", merged(NAMESPACED, nested("crds.keep", False)))
    assert "watches namespaces ml, edge" in output
    assert "every job with it" in output
    assert replace(kubectl, namespace="ml").get("dlionjob", "mine")
    until(lambda: are_listed(kubectl))
    vacant.run("uninstall", "dlion", "-n", NAMESPACE, "--wait")
    until_left(kubectl, set())


def test_a_second_release_is_refused_unless_it_excludes_the_definition(
    release: Helm, kubectl: Kubectl
) -> None:
    with pytest.raises(UnavailableError, match="invalid ownership metadata"):
        install(release, "second", NAMESPACED)
    with pytest.raises(UnavailableError, match="not found"):
        kubectl.get("deployment", "second-dlion-operator")
    install(release, "second", merged(NAMESPACED, nested("crds.enabled", False)))
    assert kubectl.get("deployment", "second-dlion-operator")
    release.run("uninstall", "second", "-n", NAMESPACE)
    owner = kubectl.get("crd", CRD)["metadata"]["annotations"]["meta.helm.sh/release-name"]
    assert owner == "dlion"


def test_another_release_name_takes_ownership_on_request(vacant: Helm, kubectl: Kubectl) -> None:
    install(vacant, "dlion", SITE)
    job(kubectl)
    vacant.run("uninstall", "dlion", "-n", NAMESPACE)
    with pytest.raises(UnavailableError, match="invalid ownership metadata"):
        install(vacant, "other", SITE)
    install(vacant, "other", SITE, "--take-ownership")
    owner = kubectl.get("crd", CRD)["metadata"]["annotations"]["meta.helm.sh/release-name"]
    assert owner == "other"
    assert replace(kubectl, namespace="ml").get("dlionjob", "mine")
    replace(kubectl, namespace="ml").run("delete", "dlionjob", "mine")


# ---- in a cluster of yours


def test_a_cluster_with_dlion_in_use_is_refused_for_tests(vacant: Helm, kubectl: Kubectl) -> None:
    install(vacant, "dlion", SITE)
    assert "Deployment dlion-system/dlion-operator" in occupation(kubectl)
    job(kubectl)
    uninstall_ours(vacant)
    until(lambda: occupation(kubectl) == "DLionJob ml/mine")
    replace(kubectl, namespace="ml").run("delete", "dlionjob", "mine")
    assert occupation(kubectl) == ""
    kubectl.run("delete", "crd", CRD)
    assert occupation(kubectl) == ""


def test_other_releases_are_kept(release: Helm, tmp_path: Path) -> None:
    chart = {"apiVersion": "v2", "name": "proxy", "version": "1.0.0"}
    (tmp_path / "Chart.yaml").write_text(json.dumps(chart))
    for namespace in (NAMESPACE, "edge"):
        release.run("install", "theirs", str(tmp_path), "-n", namespace)
    uninstall_ours(release)
    left = {line.split()[1] for line in release.run("list", "-A", "--no-headers").splitlines()}
    for namespace in left:
        release.run("uninstall", "theirs", "-n", namespace)
    assert left == {NAMESPACE, "edge"}
