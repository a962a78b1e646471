"""Test what a user with the right to create DLionJobs gets by podTemplate, on a real API server.

The chart's ValidatingAdmissionPolicy denies a job whose writer has no right to a Secret or service
account that it uses, in any field of a template, and names both. It admits a job whose writer has
the right, or that the chart's lists allow. A later writer is checked as well, unless `spec` stays
the same. Malformed templates are admitted or denied, never by an internal error. An operator
creates pods of an admitted job only if the job is younger than the policy, and never of a job that
has what no right allows. The API server accepts the NetworkPolicies of a run.

Left out: pods that run, and the enforcement of a NetworkPolicy (the testbed's network has none).
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
WRITER, READER, EDITOR = "writer", "reader", "editor"
"""May write jobs; also get the Secret db and impersonate runner; also all that `edit` allows."""
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
USES_SECRET, USES_RUNNER = "uses Secret db", "uses service account runner"
USES_DEFAULT = "uses service account default or its token"
CASES: dict[str, tuple[dict[str, Any] | None, str, str, str]] = {
    # the job's template, and the message for writer, reader and editor (empty: admitted)
    "nothing": (None, "", "", ""),
    "placement": ({"nodeSelector": {"a": "b"}, "volumes": None}, "", "", ""),
    "mounted": (mounted("db"), USES_SECRET, "", ""),
    "mounted twice": (mounted("db", "db"), USES_SECRET, "", ""),
    "another": (mounted("db", "other"), USES_SECRET, "uses Secret other", ""),
    "listed": (mounted("open", "team-a"), "", "", ""),
    "nearly listed": (mounted("opened"), "uses Secret opened", "uses Secret opened", ""),
    "too many": (mounted(*(f"s{n}" for n in range(9))), "uses Secret s0", "uses Secret s0",
                 "more than 8 Secrets"),
    "projected": (projected({"configMap": {"name": "c"}}, {"secret": {"name": "db"}}),
                  USES_SECRET, "", ""),
    "variable": (variables("containers", env=[{"name": "A", "value": "b"}, KEY]), USES_SECRET,
                 "", ""),
    "variables": (variables("containers", envFrom=[{"secretRef": {"name": "db"}}]), USES_SECRET,
                  "", ""),
    "of the sidecar": (variables("initContainers", env=[KEY]), USES_SECRET, "", ""),
    "account": ({"serviceAccountName": "runner"}, USES_RUNNER, "", ""),
    "account, old name": ({"serviceAccount": "runner"}, USES_RUNNER, "", ""),
    "listed account": ({"serviceAccountName": "shared"}, "", "", ""),
    "its token": ({"serviceAccountName": "runner", **TOKEN}, USES_RUNNER, "", ""),
    "default token": (TOKEN, USES_DEFAULT, USES_DEFAULT, ""),
    "projected token": (projected({"serviceAccountToken": {"path": "t"}}), USES_DEFAULT,
                        USES_DEFAULT, ""),
    "no token": ({"automountServiceAccountToken": False}, "", "", ""),
}  # fmt: skip


class Users:
    """Users of one namespace, and the answers of the API server to them."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def write(self, user: str, document: dict[str, Any], *, dry_run: bool = False) -> str:
        """Return the message of a denial; empty if the job is admitted."""
        return self._jobs.create(document, dry_run=dry_run, user=user).message

    def ask(self, user: str, document: dict[str, Any]) -> str:
        return self.write(user, document, dry_run=True)


@pytest.fixture
def users(kubectl: Kubectl) -> Iterator[Users]:
    with jobs_of(kubectl) as jobs:
        yield Users(jobs)


@pytest.fixture
def policy(kubectl: Kubectl, users: Users, tmp_path: Path) -> Iterator[str]:
    """Install the chart's policy for this namespace only; return its name."""
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
        assert waited(lambda: bool(users.ask(WRITER, probe)), 30), "the policy has no effect"
        yield name
    finally:
        for each in documents:
            kubectl.run("delete", each["kind"], name, "--ignore-not-found")


def changed_secret(document: dict[str, Any], part: str, name: str) -> dict[str, Any]:
    return changed(document, {f"spec.trainer.initializer.{part}.secretName": name})


def grant(kubectl: Kubectl) -> None:
    """Grant the users their rights."""
    rbac = {"apiVersion": "rbac.authorization.k8s.io/v1"}
    roles = {"jobs": (RIGHTS, (WRITER, READER, EDITOR)), "reads": (READERS_RIGHTS, (READER,))}
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
def test_a_writer_gets_only_what_it_has_the_right_to(users: Users) -> None:
    wrong = []
    for name, (spec, *messages) in CASES.items():
        document = manifest(podTemplate=None if spec is None else {"spec": spec})
        in_a_group = manifest()
        in_a_group["spec"]["sites"][0]["groups"][1]["podTemplate"] = {"spec": spec}
        for user, words in zip((WRITER, READER, EDITOR), messages, strict=True):
            answers = [users.ask(user, document)]
            if spec is not None and user != EDITOR:
                answers.append(users.ask(user, in_a_group))
            for each in answers:
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
        assert USES_SECRET in users.ask(WRITER, document), part
        assert users.ask(READER, document) == users.ask(EDITOR, document) == "", part
        assert users.ask(WRITER, changed_secret(document, part, "team-a")) == "", part


@pytest.mark.usefixtures("policy")
def test_no_template_removes_a_checked_name_and_keeps_the_token(users: Users) -> None:
    document = manifest(podTemplate={"spec": {"serviceAccountName": "runner", **TOKEN}})
    group = document["spec"]["sites"][0]["groups"][0]
    for own in ({"serviceAccountName": "default"}, {"serviceAccountName": None},
                {"$patch": "replace", "serviceAccountName": "runner"}):  # fmt: skip
        group["podTemplate"] = {"spec": own}
        assert USES_DEFAULT in users.ask(READER, document), own
    group["podTemplate"] = {"spec": {"serviceAccountName": "runner"}}
    assert users.ask(READER, document) == ""


@pytest.mark.usefixtures("policy")
def test_malformed_templates_are_answered(users: Users) -> None:
    """They are denied if they cannot be read, never by an internal error."""
    malformed: list[dict[str, Any]] = [
        {"volumes": "x"}, {"volumes": [None]}, {"volumes": [3]}, {"containers": {}},
        {"containers": [{"env": [None]}]}, {"serviceAccountName": 3}, mounted("db,other"),
        {"volumes": [{"secret": {"secretName": ["db"]}}]},
    ]  # fmt: skip
    for spec in malformed:
        message = users.ask(WRITER, manifest(podTemplate={"spec": spec}))
        assert "panic" not in message
        assert "Internal" not in message
        assert message == "" or "denied request" in message, message
    many = [{"name": f"n{n}", "env": [{"name": "a", "value": "b"}] * 10} for n in range(40)]
    assert users.ask(WRITER, manifest(podTemplate={"spec": {"containers": many}})) == ""


@pytest.mark.usefixtures("policy")
def test_the_rights_of_a_later_writer_are_checked(kubectl: Kubectl, users: Users) -> None:
    assert users.write(EDITOR, manifest(podTemplate={"spec": mounted("db")})) == ""
    labels = json.dumps({"metadata": {"labels": {"team": "edge"}}})
    pause = json.dumps({"spec": {"suspend": True}})

    def patch(user: str, text: str) -> str:
        try:
            kubectl.run("patch", "dlj", "digits", f"--as={user}", "--type=merge", "-p", text)
        except UnavailableError as error:
            return str(error)
        return ""

    assert patch(WRITER, labels) == ""
    assert USES_SECRET in patch(WRITER, pause)
    assert patch(READER, pause) == ""


def ready(kubectl: Kubectl, name: str) -> tuple[str, str]:
    status = kubectl.get("dlj", name).get("status") or {}
    found = [each for each in status.get("conditions", ()) if each["type"] == "Ready"]
    return (found[0]["reason"], found[0]["message"]) if found else ("", "")


def test_an_operator_trusts_a_policy_that_is_older_than_the_job(
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
            users.write(WRITER, manifest("pinned", podTemplate={"spec": {"nodeName": "n"}})) == ""
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
