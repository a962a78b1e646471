"""Tests of the operator's rights in the chart.

There is no wildcard. There is one Role for the operator's own namespace and one for each of
`namespaces`. Then there is no ClusterRole except for Kueue's resources without a namespace. Every
rule has a reason. Secrets are reachable only by the authority's name. The rights are exactly those
of files/rights.yaml.

Left out: whether the operator needs all of them (the audit log of cluster tests); an API server
(tests/cluster/test_chart.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml

from chart import CHART, NAMESPACE, SITE, Helm, merged, nested

if TYPE_CHECKING:
    from collections.abc import Mapping

RIGHTS = yaml.safe_load((CHART / "files" / "rights.yaml").read_text())
NAMED = {
    "ADMISSION_POLICY": "dlion-dlion-system-tenancy",
    "AUTHORITY": "dlion-authority",
    "OPERATOR": "dlion-operator",
    "SECRET_NAMES": "plant-ca",
}
SCOPES = {
    "jobs", "cluster", "operator", "TLSRoute", "IngressRouteTCP", "Secret", "CertManager", "Kueue",
    "KueueClasses", "AdmissionPolicy",
}  # fmt: skip
NAMESPACED = merged(SITE, nested("namespaces", ["ml", "edge"]))


def granted(scopes: set[str]) -> list[dict[str, Any]]:
    """The rules of the file, as a Role has them."""
    found = []
    for right in RIGHTS:
        if right["scope"] in scopes:
            rule = {key: right[key] for key in right if key not in {"scope", "reason"}}
            if rule.get("resourceNames"):
                rule["resourceNames"] = [NAMED[each] for each in rule["resourceNames"]]
            found.append(rule)
    return found


def roles(helm: Helm, values: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Roles and bindings, in each case that of the operator's own namespace first."""
    found = helm.objects(values, only="rights.yaml")
    found.sort(key=lambda each: (each["metadata"]["name"], each["metadata"].get("namespace", "")))
    bindings = [each for each in found if each["kind"].endswith("Binding")]
    return [each for each in found if each not in bindings], bindings


def test_rights_are_few_and_each_has_a_reason() -> None:
    for right in RIGHTS:
        assert set(right) <= {"scope", "apiGroups", "resources", "resourceNames", "verbs", "reason"}
        assert right["scope"] in SCOPES
        assert len(right["reason"]) > 20
        for words in (right["apiGroups"], right["resources"], right["verbs"]):
            assert words
            assert "*" not in "".join(words)
    everything = {(resource, verb) for r in RIGHTS for resource in r["resources"]
                  for verb in r["verbs"]}  # fmt: skip
    never = {("secrets", "list"), ("secrets", "watch"), ("secrets", "delete"),
             ("dlionjobs", "create"), ("dlionjobs", "patch"), ("dlionjobs", "update"),
             ("dlionjobs", "delete"), ("pods", "create"), ("pods/exec", "create")}  # fmt: skip
    assert not everything & never


def test_secrets_are_reached_by_name() -> None:
    secrets = [right for right in RIGHTS if "secrets" in right["resources"]]
    scopes = ["Secret", "CertManager", "operator", "operator"]
    assert [right["scope"] for right in secrets] == scopes
    for right in secrets:
        by_name = right.get("resourceNames") or right["verbs"] == ["create"]
        assert by_name or right["scope"] == "CertManager"
    assert secrets[0]["verbs"] == secrets[1]["verbs"] == ["get"]


def test_all_namespaces_need_one_cluster_role(helm: Helm) -> None:
    (own, jobs), bindings = roles(helm, SITE)
    assert (own["kind"], jobs["kind"]) == ("Role", "ClusterRole")
    assert [each["kind"] for each in bindings] == ["RoleBinding", "ClusterRoleBinding"]
    assert own["metadata"]["namespace"] == bindings[0]["metadata"]["namespace"] == NAMESPACE
    assert own["rules"] == granted({"operator"})
    assert jobs["rules"] == granted({"jobs", "cluster", "AdmissionPolicy"})


def test_some_namespaces_need_only_roles(helm: Helm) -> None:
    made, bindings = roles(helm, NAMESPACED)
    homes = [each["metadata"]["namespace"] for each in made]
    assert homes == [each["metadata"]["namespace"] for each in bindings]
    assert homes == [NAMESPACE, "edge", "ml"]
    for role in made[1:]:
        assert role["rules"] == granted({"jobs"})
    whole = helm.objects(NAMESPACED)
    kinds = {each["kind"] for each in whole}
    assert not {"ClusterRole", "ClusterRoleBinding"} & kinds


def test_editors_of_a_namespace_may_edit_its_jobs(helm: Helm) -> None:
    found = helm.objects(only="users.yaml")
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    granted_to = {
        label.removeprefix(prefix): role["rules"]
        for role in found
        for label in role["metadata"]["labels"]
        if label.startswith(prefix)
    }
    verbs = {to: [v for rule in rules for v in rule["verbs"]] for to, rules in granted_to.items()}
    assert verbs == {
        "view": ["get", "list", "watch"],
        "edit": ["create", "update", "patch", "delete"],
    }
    for (rule,) in granted_to.values():
        assert (rule["apiGroups"], rule["resources"]) == (["dlion.dev"], ["dlionjobs"])


def test_the_operators_own_namespace_may_be_among_them(helm: Helm) -> None:
    values = merged(SITE, nested("namespaces", [NAMESPACE]))
    found = helm.objects(values, only="rights.yaml")
    keys = [(e["kind"], e["metadata"]["namespace"], e["metadata"]["name"]) for e in found]
    assert len(set(keys)) == len(keys) == 4


@pytest.mark.parametrize("values", [SITE, NAMESPACED, merged(SITE, nested(
    "serviceAccount", {"create": False, "name": "somebody"}))])  # fmt: skip
def test_every_binding_leads_to_its_role_and_the_operators_account(
    helm: Helm, values: dict[str, Any]
) -> None:
    deployment = helm.one("Deployment", values, only="deployment.yaml")
    account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
    for role, binding in zip(*roles(helm, values), strict=True):
        assert binding["roleRef"] == {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": role["kind"],
            "name": role["metadata"]["name"],
        }
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}
        ]


def test_an_authority_with_another_name_is_reached_by_that_name(helm: Helm) -> None:
    values = merged(SITE, nested("authority.secretName", "plant-a-ca"))
    (role, _), _ = roles(helm, values)
    named = [rule["resourceNames"] for rule in role["rules"] if "resourceNames" in rule]
    assert named[:2] == [["plant-a-ca"], ["plant-a-ca"]]  # its Secret, its ConfigMap


@pytest.mark.parametrize("route", ["TLSRoute", "IngressRouteTCP"])
@pytest.mark.parametrize("values", [SITE, NAMESPACED])
def test_routes_are_granted_if_there_is_a_gateway_of_their_kind(
    helm: Helm, values: dict[str, Any], route: str
) -> None:
    gateway = {"address": "plant-a.example:443", "route": route, "parent": {"name": "edge"}}
    made, _ = roles(helm, merged(values, nested("gateway", gateway)))
    scopes = {"jobs", "cluster", "AdmissionPolicy", route} if values is SITE else {"jobs", route}
    for role in made[1:]:
        assert sorted(map(str, role["rules"])) == sorted(map(str, granted(scopes)))


@pytest.mark.parametrize(
    ("tls", "scope"),
    [({"secretNames": ["plant-ca"]}, "Secret"), ({"certManager": True}, "CertManager")],
)
@pytest.mark.parametrize("values", [SITE, NAMESPACED])
def test_secrets_with_authorities_are_reached_if_the_values_request_it(
    helm: Helm, values: dict[str, Any], tls: dict[str, Any], scope: str
) -> None:
    made, _ = roles(helm, merged(values, {"tls": tls}))
    scopes = {"jobs", "cluster", "AdmissionPolicy", scope} if values is SITE else {"jobs", scope}
    for role in made[1:]:
        assert sorted(map(str, role["rules"])) == sorted(map(str, granted(scopes)))


def test_rights_for_queues_are_granted_if_the_values_request_it(helm: Helm) -> None:
    on = nested("kueue.enabled", True)
    (_, jobs), _ = roles(helm, merged(SITE, on))
    wanted = granted({"jobs", "cluster", "Kueue", "KueueClasses", "AdmissionPolicy"})
    assert sorted(map(str, jobs["rules"])) == sorted(map(str, wanted))


def test_an_operator_of_some_namespaces_reads_flavors_and_classes_of_the_cluster(
    helm: Helm,
) -> None:
    made, bindings = roles(helm, merged(NAMESPACED, nested("kueue.enabled", True)))
    (classes,) = [each for each in made if each["kind"] == "ClusterRole"]
    assert classes["rules"] == granted({"KueueClasses"})
    assert {verb for rule in classes["rules"] for verb in rule["verbs"]} == {"get"}
    bound = [each["roleRef"]["name"] for each in bindings if each["kind"] == "ClusterRoleBinding"]
    assert bound == [classes["metadata"]["name"]]
    jobs = [each for each in made if each["metadata"].get("namespace") in ("ml", "edge")]
    for role in jobs:
        assert sorted(map(str, role["rules"])) == sorted(map(str, granted({"jobs", "Kueue"})))
