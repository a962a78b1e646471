"""Test the checks of `dlion doctor` for a cluster, with scripted answers.

- A correct cluster passes. Each fault has its check, message and remedy, and hides no other. The
  faults concern the kubeconfig, the server and its certificate, credentials, the definition, the
  operator and its Lease, warnings, storage, nodes, quotas and rights.
- A check without the right to read is unknown. A server or plugin that never answers takes at most
  the time limit. No credential is printed.

Left out: the machine (test_doctor_machine.py), the whole command (tests/local/test_doctor.py), a
real API server (tests/cluster).
"""

from __future__ import annotations

import base64
import json
import re
import time
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from dlion_api.document import schema
from dlion_api.spec import Job
from dlion_cli.cluster.connection_settings import ConnectionSettings
from dlion_cli.cluster.rights import COMMAND_RIGHTS
from dlion_cli.preflight_checks.checks import Check, CheckOutcome
from dlion_cli.preflight_checks.cluster_health import ClusterAccess, ClusterHealth
from dlion_cli.preflight_checks.timed_checks import run_checks
from scripted_servers import ServedTls, Server, served
from self_signed import self_signed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from scripted_servers import Answer

OK, WARN, FAIL, UNKNOWN = CheckOutcome
OPERATOR = "edge-dlion-operator"
KINDS = [{"group": "dlion.dev", "kind": "DLionJob", "version": "v1alpha1"}]
NAMES = (
    "kubeconfig", "credentials", "api server", "clock", "definition", "operator", "lease",
    "operator events", "storage", "nodes", "quota", "rights",
)  # fmt: skip
AFTER_API = NAMES[3:]


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlion_cli.preflight_checks.site_cluster._CLOCK_READING_INTERVAL_S", 0.0)


def ok(document: object) -> Answer:
    return 200, json.dumps(document)


def ago(**span: float) -> str:
    return (datetime.now(UTC) - timedelta(**span)).strftime("%Y-%m-%dT%H:%M:%SZ")


def definition(without: str = "", more: str = "") -> Answer:
    spec = schema(Job)["properties"]["spec"]
    fields = {name: each for name, each in spec["properties"].items() if name != without}
    fields |= {more: {"type": "string"}} if more else {}
    served_as = {
        "properties": {"spec": {**spec, "properties": fields}},
        "x-kubernetes-group-version-kind": KINDS,
    }
    return ok({"components": {"schemas": {"dev.dlion.v1alpha1": served_as}}})


def deployment(*, ready: int = 1, release: str = "", tag: str = "") -> Answer:
    labels = {"app.kubernetes.io/version": release or version("dlion")}
    image = f"mirror:5000/dlion-operator:{tag or version('dlion')}"
    unready = {"type": "Available", "status": "False", "message": "no pod is available"}
    status = {"readyReplicas": ready, "conditions": [] if ready else [unready]}
    spec = {"template": {"spec": {"containers": [{"image": image}]}}}
    metadata = {"name": OPERATOR, "labels": labels}
    return ok({"items": [{"metadata": metadata, "spec": spec, "status": status}]})


def settings(**keeper: str) -> Answer:
    return ok({"data": {"config.yaml": yaml.safe_dump({"site": "plant-a", "keeper": keeper})}})


def lease(renewed: object, holder: str = "plant-a-7f") -> Answer:
    return ok({"spec": {"holderIdentity": holder, "renewTime": renewed}})


def storage_class(name: str, default: str = "true") -> dict[str, Any]:
    note = {"storageclass.kubernetes.io/is-default-class": default}
    return {"metadata": {"name": name, "annotations": note}}


def node(name: str, *, unschedulable: bool = False, **conditions: str) -> dict[str, Any]:
    states = {"Ready": "True", "DiskPressure": "False"} | conditions
    listed = [{"type": kind, "status": state} for kind, state in states.items()]
    return {
        "metadata": {"name": name},
        "spec": {"unschedulable": unschedulable},
        "status": {"conditions": listed},
    }


def quota(used: str, hard: str) -> Answer:
    status = {"used": {"pods": used}, "hard": {"pods": hard, "odd": "many"}}
    return ok({"items": [{"status": status}]})


def warning(age_s: float, pod: str = "op-1") -> Answer:
    event = {
        "type": "Warning", "reason": "BackOff", "message": "restarting failed container",
        "involvedObject": {"name": pod}, "lastTimestamp": ago(seconds=age_s),
    }  # fmt: skip
    return ok({"items": [event]})


def forbidden(resource: str) -> Answer:
    message = f'x is forbidden: User "jane" cannot list resource "{resource}" at the cluster scope'
    return 403, json.dumps({"kind": "Status", "message": message})


def faultless() -> dict[str, Answer]:
    """Return the answers of a cluster without a fault."""
    return {
        "version": ok({"gitVersion": "v1.34.0"}),
        "v1alpha1": definition(),
        "deployments": deployment(),
        OPERATOR: settings(size="1Gi"),
        "dlion-operator": lease(ago(seconds=4)),
        "pods": ok({"items": [{"metadata": {"name": "op-1"}}]}),
        "events": ok({"items": []}),
        "storageclasses": ok({"items": [storage_class("local")]}),
        "nodes": ok({"items": [node("n1"), node("n2")]}),
        "resourcequotas": ok({"items": []}),
    }


def token(**claims: float) -> dict[str, str]:
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return {"token": f"e30.{payload}.c2VjcmV0LXNpZ25hdHVyZQ"}


HOUR = 3600.0
VALID = token(exp=time.time() + 24 * HOUR)
Found = dict[str, Check]


@pytest.fixture
def diagnose(tmp_path: Path) -> Callable[..., Found]:
    """Return the checks, by name, of a cluster with these answers."""

    def look(
        changes: Mapping[str, Answer] | None = None, *, within_s: float = 20.0, **server: Any
    ) -> Found:
        there = Server(faultless() | dict(changes or {}), **({"user": VALID} | server))
        with served(tmp_path / "kubeconfig", {"here": there}) as config:
            return checked(config, within_s=within_s)

    return look


def checked(config: str, *, context: str | None = None, within_s: float = 20.0) -> Found:
    access = ClusterAccess(
        ConnectionSettings(kubeconfig=config, context=context), "dlion-system", within_s
    )
    results = run_checks(ClusterHealth(access).checks(), within_s)
    found = {each.name: each for each in results}
    assert tuple(found) == NAMES
    return found


def outcomes(found: Found, but: str = "") -> set[CheckOutcome]:
    return {check.outcome for name, check in found.items() if name != but}


def test_a_cluster_without_a_fault_passes(diagnose: Callable[..., Found]) -> None:
    found = diagnose()
    assert outcomes(found) == {OK}, found
    assert "Kubernetes v1.34.0 answers in" in found["api server"].observed
    assert f"image mirror:5000/dlion-operator:{version('dlion')}" in found["operator"].observed
    assert "held by plant-a-7f" in found["lease"].observed


FAULTS: dict[str, tuple[dict[str, Answer], str, CheckOutcome, str]] = {
    "no definition": ({"v1alpha1": (404, "404 page not found")}, "definition", FAIL,
                      "dlionjobs.dlion.dev is not installed"),
    "another definition": ({"v1alpha1": definition(without="minSites")}, "definition", FAIL,
                           "without spec.minSites"),
    "a newer definition": ({"v1alpha1": definition(more="novel")}, "definition", WARN,
                           "with spec.novel"),
    "no operator": ({"deployments": ok({"items": []})}, "operator", FAIL,
                    "there is none in namespace dlion-system"),
    "an unready operator": ({"deployments": deployment(ready=0)}, "operator", FAIL,
                            "no pod is available"),
    "another release": ({"deployments": deployment(release="0.0.1")}, "operator", WARN,
                        "of release 0.0.1"),
    "another image": ({"deployments": deployment(tag="0.0.1")}, "operator", WARN,
                      "dlion-operator:0.0.1"),
    "a named image": ({"deployments": deployment(tag="stable")}, "operator", OK, "stable"),
    "no lease yet": ({"dlion-operator": (404, "{}")}, "lease", OK, "has had no job yet"),
    "an old lease": ({"dlion-operator": lease(ago(minutes=5))}, "lease", FAIL, "7f, renewed"),
    "a free lease": ({"dlion-operator": lease(ago(seconds=1), "")}, "lease", WARN, "no holder"),
    "a foreign lease": ({"dlion-operator": lease([])}, "lease", WARN, "no holder"),
    "a warning": ({"events": warning(60)}, "operator events", WARN, "BackOff: restarting"),
    "an old warning": ({"events": warning(2 * HOUR)}, "operator events", OK, "no warning"),
    "another's warning": ({"events": warning(60, "other")}, "operator events", OK, "no warning"),
    "no storage": ({OPERATOR: settings()}, "storage", WARN, "keepers have no claim"),
    "no class": ({"storageclasses": ok({"items": []})}, "storage", FAIL,
                 "there is no storage class"),
    "no default": ({"storageclasses": ok({"items": [storage_class("a", "false")]})}, "storage",
                   FAIL, "no default class; there are a"),
    "another class": ({OPERATOR: settings(size="1Gi", storageClassName="fast")}, "storage", FAIL,
                      "no class fast; there are local"),
    "a named claim": ({OPERATOR: settings(claimName="c"), "c": ok({"status": {"phase": "Lost"}})},
                      "storage", WARN, "claim c is Lost"),
    "no claim": ({OPERATOR: settings(claimName="c"), "c": (404, "{}")}, "storage", FAIL, ""),
    "no node": ({"nodes": ok({"items": []})}, "nodes", FAIL, "0 of 0 ready"),
    "an unready node": ({"nodes": ok({"items": [node("n1"), node("n2", Ready="Unknown")]})},
                        "nodes", WARN, "n2: not ready"),
    "a full node": ({"nodes": ok({"items": [node("n1", DiskPressure="True")]})}, "nodes", WARN,
                    "n1: DiskPressure"),
    "a cordoned node": ({"nodes": ok({"items": [node("n1", unschedulable=True)]})}, "nodes",
                        WARN, "n1: cordoned"),
    "only unready nodes": ({"nodes": ok({"items": [node("n1", Ready="False")]})}, "nodes", FAIL,
                           "0 of 1 ready"),
    "a used quota": ({"resourcequotas": quota("10", "10")}, "quota", FAIL, "pods 10 of 10"),
    "a nearly used quota": ({"resourcequotas": quota("9", "10")}, "quota", WARN, "pods 9 of 10"),
    "a quota": ({"resourcequotas": quota("1", "1k")}, "quota", OK, "1 limits in ml leave room"),
    "secret nodes": ({"nodes": forbidden("nodes")}, "nodes", UNKNOWN, "may not list nodes"),
    "foreign nodes": ({"nodes": ok({"items": [{}, {"status": {"conditions": 3}}]})}, "nodes",
                      FAIL, "0 of 2 ready"),
    "foreign lists": ({"resourcequotas": ok({"items": "x"})}, "quota", UNKNOWN, "no list of"),
    "foreign items": ({"resourcequotas": ok({"items": [7]})}, "quota", UNKNOWN, "no list of"),
    "no JSON": ({"storageclasses": (200, "<html>")}, "storage", UNKNOWN, "not a JSON document"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_check(diagnose: Callable[..., Found], fault: str) -> None:
    changes, name, outcome, words = FAULTS[fault]
    found = diagnose(changes)
    check = found[name]
    assert (check.outcome, words in check.observed) == (outcome, True), check
    assert check.advice or outcome in (OK, UNKNOWN) or "install" in check.observed.lower(), check
    others = {"storage"} if fault == "no operator" else set()
    assert {each.outcome for each in found.values() if each.name not in {name} | others} == {OK}


@pytest.mark.parametrize(
    ("denied", "outcome", "words"),
    [
        (["create pods/exec"], WARN, "fetch (create pods/exec)"),
        (["list dlionjobs"], FAIL, "get, watch (list dlionjobs.dlion.dev)"),
        (["patch configmaps", "get pods/log"], WARN, "logs (get pods/log)"),
    ],
)
def test_missing_rights_are_named_by_command(
    diagnose: Callable[..., Found], denied: list[str], outcome: CheckOutcome, words: str
) -> None:
    check = diagnose(denied=denied)["rights"]
    assert (check.outcome, words in check.observed) == (outcome, True), check
    assert "role edit" in check.advice


def test_the_rights_are_those_of_the_documentation() -> None:
    """docs/cluster-commands.md names each verb and resource in the row of its command."""
    page = (Path(__file__).parents[3] / "docs" / "cluster-commands.md").read_text()
    rows = re.findall(r"^\| (`[^|]*) \| (.*) \|$", page.partition("## Rights")[2], re.MULTILINE)
    documented = {", ".join(re.findall(r"`([a-z]+)`", each)): text for each, text in rows}
    jobs = documented["get, watch"]
    for command, rights in COMMAND_RIGHTS.items():
        text = documented[command]
        text += jobs if " also " in f" {text}" else ""
        words = {word for each in rights for word in (each.verb, each.resource)}
        assert words <= set(re.findall(r"`([a-z/]+)`", text)), command


CREDENTIALS = [
    (token(exp=time.time() - HOUR), FAIL, "the token expired on"),
    (token(exp=time.time() + HOUR / 2), WARN, "the token is valid until"),
    (token(nbf=time.time() + HOUR, exp=time.time() + 2 * HOUR), FAIL, "is valid only from"),
    (token(), OK, "without a known expiry"),
    (token(exp=1e300), OK, "without a known expiry"),
    ({"token": "opaque"}, OK, "without a known expiry"),
    (None, UNKNOWN, "neither a token nor a client certificate"),
]


@pytest.mark.parametrize(("user", "outcome", "words"), CREDENTIALS)
def test_the_expiry_of_credentials_is_shown_without_the_credentials(
    diagnose: Callable[..., Found], user: dict[str, str] | None, outcome: CheckOutcome, words: str
) -> None:
    found = diagnose(user=user)
    check = found["credentials"]
    assert (check.outcome, words in check.observed) == (outcome, True), check
    if user is not None:
        shown = json.dumps([each.as_json() for each in found.values()])
        assert user["token"] not in shown
        assert user["token"].rpartition(".")[2] not in shown


def test_rejected_credentials_are_reported_once(diagnose: Callable[..., Found]) -> None:
    answers = dict.fromkeys(faultless(), (401, json.dumps({"message": "Unauthorized"})))
    found = diagnose(answers, user=token(exp=time.time() - HOUR))
    assert found["api server"].outcome is FAIL
    assert "rejects your credentials (401" in found["api server"].observed
    assert "Log in again" in found["credentials"].advice
    assert {found[name].outcome for name in AFTER_API} == {UNKNOWN}


def test_a_forbidden_version_hides_nothing(diagnose: Callable[..., Found]) -> None:
    found = diagnose({"version": forbidden("x")})
    assert found["api server"].outcome is OK
    assert outcomes(found, but="clock") == {OK}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((503, '{"message": "etcd is away"}'), "etcd is away"),
        ((200, "<html>"), "not a JSON document"),
    ],
)
def test_a_foreign_server_is_named(
    diagnose: Callable[..., Found], answer: Answer, words: str
) -> None:
    found = diagnose({"version": answer})
    assert found["api server"].outcome is FAIL
    assert words in found["api server"].observed
    assert {found[name].observed for name in AFTER_API} == {
        "not checked: the API server does not answer us"
    }


def test_a_dead_server_is_named(tmp_path: Path) -> None:
    with served(tmp_path / "kubeconfig", {"here": None}) as config:
        found = checked(config)
    assert "nothing listens there" in found["api server"].observed


@pytest.mark.parametrize(
    ("content", "context", "words"),
    [
        (None, None, "no kubeconfig file at"),
        ("a: [", None, "cannot be read"),
        ("[]", None, "contains no mapping"),
        ("{}", "absent", "nothing in the kubeconfig"),
    ],
)
def test_an_unusable_kubeconfig_is_named(
    tmp_path: Path, content: str | None, context: str | None, words: str
) -> None:
    config = tmp_path / "config"
    if content is not None:
        config.write_text(content)
    found = checked(str(config), context=context)
    assert found["kubeconfig"].outcome is FAIL
    assert words in found["kubeconfig"].observed
    assert outcomes(found, but="kubeconfig") == {UNKNOWN}


def test_another_clock_is_a_warning(diagnose: Callable[..., Found]) -> None:
    found = diagnose(ahead_s=300.0)
    assert found["clock"].outcome is WARN
    assert "NTP" in found["clock"].advice


@pytest.mark.parametrize(
    ("given", "trusted", "words", "advice"),
    [
        ({"begins_s": HOUR, "ends_s": 2 * HOUR}, "server", "is not valid yet", "NTP"),
        ({"begins_s": -2 * HOUR, "ends_s": -HOUR}, "server", "has expired", "Renew"),
        ({"host": "192.0.2.1"}, "server", "is for other names", "tls-server-name"),
        ({}, "other", "is not one that the kubeconfig trusts", "Take a new kubeconfig"),
    ],
)
def test_each_fault_of_the_servers_certificate_has_its_message(
    diagnose: Callable[..., Found],
    tmp_path: Path,
    given: dict[str, Any],
    trusted: str,
    words: str,
    advice: str,
) -> None:
    chain = self_signed(tmp_path, "server", **given)
    other = self_signed(tmp_path, "other")
    tls = ServedTls(chain, chain if trusted == "server" else other)
    found = diagnose(tls=tls)
    assert found["api server"].outcome is FAIL
    assert words in found["api server"].observed
    assert advice in found["api server"].observed


def test_a_valid_certificate_passes(diagnose: Callable[..., Found], tmp_path: Path) -> None:
    chain = self_signed(tmp_path, "server")
    assert outcomes(diagnose(tls=ServedTls(chain, chain))) == {OK}


@pytest.mark.parametrize(
    ("begins_s", "ends_s", "outcome", "words"),
    [
        (-HOUR, 24 * HOUR, OK, "the client certificate is valid until"),
        (-2 * HOUR, -HOUR, FAIL, "the client certificate expired on"),
        (HOUR, 2 * HOUR, FAIL, "the client certificate is valid only from"),
    ],
)
def test_the_validity_of_a_client_certificate_is_shown(
    diagnose: Callable[..., Found],
    tmp_path: Path,
    begins_s: float,
    ends_s: float,
    outcome: CheckOutcome,
    words: str,
) -> None:
    path = self_signed(tmp_path, "jane", begins_s=begins_s, ends_s=ends_s)
    server = self_signed(tmp_path, "server")
    user = {"client-certificate": str(path), "client-key": str(path)}
    check = diagnose(user=user, tls=ServedTls(server, server))["credentials"]
    assert (check.outcome, words in check.observed) == (outcome, True), check


def test_a_silent_server_takes_at_most_the_limit(diagnose: Callable[..., Found]) -> None:
    began_s = time.monotonic()
    found = diagnose(silent=["nodes", "v1alpha1"], within_s=3.0)
    assert time.monotonic() - began_s < 10.0
    late = {name for name, check in found.items() if check.outcome is UNKNOWN}
    assert late == {"nodes", "definition"}
    assert {found[name].outcome for name in NAMES if name not in late} == {OK}
