"""What a user who may create DLionJobs gets by podTemplate, with a real API server.

Proves: the chart's ValidatingAdmissionPolicy denies a job whose writer has no right to a Secret or
a service account that it uses, wherever in a template that stands, and names both; it admits one
whose writer has the right, or that the chart's lists allow; a later writer is compared as well,
unless `spec` stays; malformed templates are admitted or denied, never by an error of the server. An
operator makes pods of an admitted job only if the job is younger than the policy, and never of a
job that has what no right allows. The server takes the NetworkPolicies of a run.

Left out: pods that run, and that a network enforces a policy (the testbed's does not).
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from api_server import Jobs, jobs_of
from chart import SITE, Helm, helm_program, merged
from dlion_api.errors import UnavailableError
from fault_proxy import waited
from manifest_table import changed
from operator_process import OperatorProcess
from podless_jobs import children, manifest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.kubectl import Kubectl

pytestmark = pytest.mark.cluster
NOBODY, READER, EDITOR = "nobody", "reader", "editor"
"""May write jobs; also get the Secret db and impersonate runner; also all that `edit` may."""
SETTLED_S = 31
RIGHTS = [
    {"apiGroups": ["dlion.dev"], "resources": ["dlionjobs"],
     "verbs": ["get", "create", "update", "patch", "delete"]},
]  # fmt: skip
READERS_RIGHTS = [
    {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["db"], "verbs": ["get"]},
    {"apiGroups": [""], "resources": ["serviceaccounts"], "resourceNames": ["runner"],
     "verbs": ["impersonate"]},
]  # fmt: skip


def mounted(*names: str) -> dict[str, Any]:
    return {"volumes": [{"name": f"v{n}", "secret": {"secretName": name}}
                        for n, name in enumerate(names)]}  # fmt: skip


def projected(*sources: dict[str, Any]) -> dict[str, Any]:
    return {"volumes": [{"name": "v", "projected": {"sources": list(sources)}}]}


def variables(field: str, **entry: Any) -> dict[str, Any]:
    return {field: [{"name": "trainer", **entry}]}


KEY = {"name": "K", "valueFrom": {"secretKeyRef": {"name": "db", "key": "k"}}}
TOKEN = {"automountServiceAccountToken": True}
SECRET_TOLD, RUNNER_TOLD = "uses Secret db", "uses service account runner"
DEFAULT_TOLD = "uses service account default or its token"
CASES: dict[str, tuple[dict[str, Any] | None, str, str, str]] = {
    # the job's template, and what nobody, the reader and the editor are told (empty: admitted)
    "nothing": (None, "", "", ""),
    "placement": ({"nodeSelector": {"a": "b"}, "volumes": None}, "", "", ""),
    "mounted": (mounted("db"), SECRET_TOLD, "", ""),
    "mounted twice": (mounted("db", "db"), SECRET_TOLD, "", ""),
    "another": (mounted("db", "other"), SECRET_TOLD, "uses Secret other", ""),
    "listed": (mounted("open", "team-a"), "", "", ""),
    "nearly listed": (mounted("opened"), "uses Secret opened", "uses Secret opened", ""),
    "too many": (mounted(*(f"s{n}" for n in range(9))), "uses Secret s0", "uses Secret s0",
                 "more than 8 Secrets"),
    "projected": (projected({"configMap": {"name": "c"}}, {"secret": {"name": "db"}}),
                  SECRET_TOLD, "", ""),
    "variable": (variables("containers", env=[{"name": "A", "value": "b"}, KEY]), SECRET_TOLD,
                 "", ""),
    "variables": (variables("containers", envFrom=[{"secretRef": {"name": "db"}}]), SECRET_TOLD,
                  "", ""),
    "of the sidecar": (variables("initContainers", env=[KEY]), SECRET_TOLD, "", ""),
    "account": ({"serviceAccountName": "runner"}, RUNNER_TOLD, "", ""),
    "account, old name": ({"serviceAccount": "runner"}, RUNNER_TOLD, "", ""),
    "listed account": ({"serviceAccountName": "shared"}, "", "", ""),
    "its token": ({"serviceAccountName": "runner", **TOKEN}, RUNNER_TOLD, "", ""),
    "default token": (TOKEN, DEFAULT_TOLD, DEFAULT_TOLD, ""),
    "projected token": (projected({"serviceAccountToken": {"path": "t"}}), DEFAULT_TOLD,
                        DEFAULT_TOLD, ""),
    "no token": ({"automountServiceAccountToken": False}, "", "", ""),
}  # fmt: skip


class Users:
    """Users of one namespace, and what the API server tells them."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def write(self, user: str, document: dict[str, Any], *, dry_run: bool = False) -> str:
        """What it is told; empty: it is admitted."""
        return self._jobs.create(document, dry_run=dry_run, user=user).message

    def ask(self, user: str, document: dict[str, Any]) -> str:
        return self.write(user, document, dry_run=True)


@pytest.fixture
def users(kubectl: Kubectl) -> Iterator[Users]:
    with jobs_of(kubectl) as jobs:
        yield Users(jobs)


@pytest.fixture
def policy(kubectl: Kubectl, users: Users, tmp_path: Path) -> Iterator[str]:
    """The chart's policy, for this namespace alone, in force; its name."""
    program = helm_program()
    if program is None:
        pytest.skip("no helm: run `make testbed-setup`")
    values = merged(SITE, {
        "namespaces": [kubectl.namespace],
        "tenancy": {
            "admissionPolicy": "Always",
            "podTemplate": {"secrets": ["open", "team-*"], "serviceAccounts": ["shared"]},
        },
    })  # fmt: skip
    documents = Helm(program, tmp_path / "helm").objects(values, only="admission-policy.yaml")
    name = f"tenancy-{kubectl.namespace}"
    for each in documents:
        each["metadata"]["name"] = name
        if "policyName" in each["spec"]:
            each["spec"]["policyName"] = name
    kubectl.apply(*documents)
    grant(kubectl)
    try:
        probe = manifest(podTemplate={"spec": mounted("db")})
        assert waited(lambda: bool(users.ask(NOBODY, probe)), 30), "the policy is not in force"
        yield name
    finally:
        for each in documents:
            kubectl.run("delete", each["kind"], name, "--ignore-not-found")


def changed_secret(document: dict[str, Any], part: str, name: str) -> dict[str, Any]:
    return changed(document, {f"spec.trainer.initializer.{part}.secretName": name})


def grant(kubectl: Kubectl) -> None:
    """The users have their rights."""
    rbac = {"apiVersion": "rbac.authorization.k8s.io/v1"}
    roles = {"jobs": (RIGHTS, (NOBODY, READER, EDITOR)), "reads": (READERS_RIGHTS, (READER,))}
    made: list[dict[str, Any]] = [
        {**rbac, "kind": "Role", "metadata": {"name": name}, "rules": rules}
        for name, (rules, _) in roles.items()
    ]
    bound = {**{name: ("Role", users) for name, (_, users) in roles.items()},
             "edit": ("ClusterRole", (EDITOR,))}  # fmt: skip
    made += [
        {**rbac, "kind": "RoleBinding", "metadata": {"name": name},
         "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
         "subjects": [{"kind": "User", "name": user} for user in users]}
        for name, (kind, users) in bound.items()
    ]  # fmt: skip
    kubectl.apply(*made)


@pytest.mark.usefixtures("policy")
def test_a_writer_gets_what_it_has_the_right_to(users: Users) -> None:
    wrong = []
    for name, (spec, *told) in CASES.items():
        document = manifest(podTemplate=None if spec is None else {"spec": spec})
        in_a_group = manifest()
        in_a_group["spec"]["sites"][0]["groups"][1]["podTemplate"] = {"spec": spec}
        for user, words in zip((NOBODY, READER, EDITOR), told, strict=True):
            said = [users.ask(user, document)]
            if spec is not None and user != EDITOR:
                said.append(users.ask(user, in_a_group))
            for each in said:
                is_right = words in each and user in each if words and "more" not in words else (
                    words in each if words else each == "")  # fmt: skip
                if not is_right:
                    wrong.append((name, user, each))
    assert wrong == []


@pytest.mark.usefixtures("policy")
def test_a_download_needs_the_right_to_its_secret(users: Users) -> None:
    document = manifest()
    trainer = document["spec"]["trainer"]
    download = {"url": "https://example.com/m.keras", "sha256": "0" * 64, "secretName": "db"}
    trainer["dataset"] = {"path": "d.npz", "format": "npz"}
    for part in ("dataset", "model"):
        trainer |= {"startFrom": "m.keras", "initializer": {part: download}}
        assert SECRET_TOLD in users.ask(NOBODY, document), part
        assert users.ask(READER, document) == users.ask(EDITOR, document) == "", part
        assert users.ask(NOBODY, changed_secret(document, part, "team-a")) == "", part


@pytest.mark.usefixtures("policy")
def test_no_template_takes_a_checked_name_away_and_keeps_the_token(users: Users) -> None:
    document = manifest(podTemplate={"spec": {"serviceAccountName": "runner", **TOKEN}})
    group = document["spec"]["sites"][0]["groups"][0]
    for own in ({"serviceAccountName": "default"}, {"serviceAccountName": None},
                {"$patch": "replace", "serviceAccountName": "runner"}):  # fmt: skip
        group["podTemplate"] = {"spec": own}
        assert DEFAULT_TOLD in users.ask(READER, document), own
    group["podTemplate"] = {"spec": {"serviceAccountName": "runner"}}
    assert users.ask(READER, document) == ""


@pytest.mark.usefixtures("policy")
def test_malformed_templates_are_answered(users: Users) -> None:
    """They are denied where they cannot be read, and never by an error that helps nobody."""
    malformed: list[dict[str, Any]] = [
        {"volumes": "x"}, {"volumes": [None]}, {"volumes": [3]}, {"containers": {}},
        {"containers": [{"env": [None]}]}, {"serviceAccountName": 3}, mounted("db,other"),
        {"volumes": [{"secret": {"secretName": ["db"]}}]},
    ]  # fmt: skip
    for spec in malformed:
        said = users.ask(NOBODY, manifest(podTemplate={"spec": spec}))
        assert "panic" not in said
        assert "Internal" not in said
        assert said == "" or "denied request" in said, said
    many = [{"name": f"n{n}", "env": [{"name": "a", "value": "b"}] * 10} for n in range(40)]
    assert users.ask(NOBODY, manifest(podTemplate={"spec": {"containers": many}})) == ""


@pytest.mark.usefixtures("policy")
def test_who_changes_a_job_is_compared_as_well(kubectl: Kubectl, users: Users) -> None:
    assert users.write(EDITOR, manifest(podTemplate={"spec": mounted("db")})) == ""
    labels = json.dumps({"metadata": {"labels": {"team": "edge"}}})
    pause = json.dumps({"spec": {"suspend": True}})

    def patch(user: str, text: str) -> str:
        try:
            kubectl.run("patch", "dlj", "digits", f"--as={user}", "--type=merge", "-p", text)
        except UnavailableError as error:
            return str(error)
        return ""

    assert patch(NOBODY, labels) == ""
    assert SECRET_TOLD in patch(NOBODY, pause)
    assert patch(READER, pause) == ""


def ready(kubectl: Kubectl, name: str) -> tuple[str, str]:
    status = kubectl.get("dlj", name).get("status") or {}
    found = [each for each in status.get("conditions", ()) if each["type"] == "Ready"]
    return (found[0]["reason"], found[0]["message"]) if found else ("", "")


def test_an_operator_believes_a_policy_that_is_older_than_the_job(
    kubectl: Kubectl, users: Users, policy: str, tmp_path: Path
) -> None:
    began_s = time.monotonic()
    secret = {"spec": mounted("db")}
    early = {**manifest("early", podTemplate=secret), "metadata": {"name": "early"}}
    assert users.write(READER, early) == ""
    settings = {
        "tenancy": {"admissionPolicy": policy},
        "networkPolicies": {"enabled": True, "peerCidrs": ["10.0.0.0/8"],
                            "operatorNamespace": "dlion-system",
                            "operatorLabels": {"app.kubernetes.io/name": "dlion"}},
    }  # fmt: skip
    with OperatorProcess(
        tmp_path, kubectl.kubeconfig, namespaces=(kubectl.namespace,),
        namespace=kubectl.namespace, settings=settings,
    ):  # fmt: skip
        assert waited(lambda: ready(kubectl, "early")[0] == "TemplateNotAllowed", 30)
        assert "delete the job and create it again" in ready(kubectl, "early")[1]
        assert (
            users.write(NOBODY, manifest("pinned", podTemplate={"spec": {"nodeName": "n"}})) == ""
        )
        assert waited(lambda: ready(kubectl, "pinned")[0] == "TemplateNotAllowed", 30)
        assert not [each for each in children(kubectl) if not each.startswith("Pod/")]
        time.sleep(max(0.0, began_s + SETTLED_S - time.monotonic()))
        kubectl.run("delete", "dlj", "early", f"--as={READER}")
        assert users.write(READER, early) == ""
        assert waited(lambda: any("Job/early" in each for each in children(kubectl)), 60)
        (job, *_) = kubectl.get("jobs", "-l", "dlion.dev/job-name=early")["items"]
        names = [each["name"] for each in job["spec"]["template"]["spec"]["volumes"]]
        assert "v0" in names
        policies = kubectl.get("networkpolicies", "-l", "dlion.dev/job-name=early")["items"]
        assert sorted(each["metadata"]["labels"]["app.kubernetes.io/component"]
                      for each in policies) == ["keeper", "worker"]  # fmt: skip
        kubectl.run("delete", "dlj", "early", "pinned")
