"""Test that a real API server and the model accept and refuse the same manifests and changes.

The CRD is established and structural. `kubectl explain`, the short name and the columns work. A
fresh object has a status. The API server and the model judge the same documents: the table of
manifests, every bound kept and broken, and randomly changed documents. The API server names the
field and prints a rule's message. What it accepts is the same job for the model after its defaults.
The same holds for changes to a running and an ended job. Every rule and every bound has an accepted
and a refused document.

Left out: what the operator makes of an accepted manifest.
"""

from __future__ import annotations

import json
import random
import re
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

import manifest_schema
from api_server import Answer, Jobs, jobs_of
from change_rules import change_problems
from dlion_api import bounds
from dlion_api.document import parse
from dlion_api.errors import Problem, SpecError, UnavailableError
from dlion_api.spec import load_job
from dlion_api.spec.failures import ENDS, MAX_GROUPS_PER_RULE, MAX_RULES
from dlion_api.status import Status
from example_counts import examples, factor
from manifest_bounds import CONDITION, Trial, document, trials
from manifest_strategies import changed_documents, values
from manifest_table import ACCEPTED, CASES, GONE, REFUSED, Case, changed, smallest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from testbed.kubectl import Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.root]

CRD = "dlionjobs.dlion.dev"
TRIALS = trials()
RULES = [
    rule
    for _, node in manifest_schema.nodes(manifest_schema.openapi())
    for rule in node.get("x-kubernetes-validations", ())
]
TRANSITIONS = {rule["message"] for rule in RULES if "oldSelf" in rule["rule"]}
ROUTED = ("apiVersion", "kind")
"""For these an API server reports only that the object does not match the address."""
ENDED = CONDITION | {"type": "Succeeded", "reason": "Completed"}


def wait_until_established(kubectl: Kubectl) -> None:
    """`kubectl wait` fails on a definition without conditions."""
    deadline_s = time.monotonic() + 30
    while "Established" not in {
        each["type"]
        for each in kubectl.get("crd", CRD).get("status", {}).get("conditions") or ()
        if each["status"] == "True"
    }:
        assert time.monotonic() < deadline_s, "the CRD is not Established"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def kubectl(control_plane: Kubectl) -> Iterator[Kubectl]:
    """A new namespace in a cluster with the CRD."""
    control_plane.run("create", "-f", str(manifest_schema.CRD))
    namespace = f"dlion-test-{uuid.uuid4().hex[:8]}"
    try:
        wait_until_established(control_plane)
        control_plane.run("create", "namespace", namespace)
        yield replace(control_plane, namespace=namespace)
    finally:
        control_plane.run("delete", "namespace", namespace, "--wait=false", "--ignore-not-found")
        control_plane.run("delete", "crd", CRD, "--wait=false")


@pytest.fixture(scope="module")
def jobs(kubectl: Kubectl) -> Iterator[Jobs]:
    """The jobs there, by a connection that stays open."""
    with jobs_of(kubectl) as made:
        made.wait_until_served()
        yield made


@pytest.fixture(scope="module")
def keep(jobs: Jobs) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Yield a function that returns a stored job with this spec, created at its first call.

    Its workers train.
    """
    kept: dict[str, dict[str, Any]] = {}

    def found(spec: dict[str, Any]) -> dict[str, Any]:
        key = json.dumps(spec)
        if key not in kept:
            name = f"kept-{len(kept)}"
            made = changed(smallest(), {"metadata.name": name, "spec": spec})
            answer = jobs.create(made, dry_run=False)
            assert answer.accepted, answer.message
            kept[key] = trains(jobs, name)
        return kept[key]

    return found


def trains(jobs: Jobs, name: str) -> dict[str, Any]:
    """Return that job once its status reports that the workers of its run train."""
    kept = jobs.get(name)
    status = {"runId": kept["spec"]["runId"], "trainingStartTime": "2026-01-31T12:00:00Z"}
    assert jobs.replace_status(name, kept | {"status": status}, dry_run=False).accepted
    return jobs.get(name)


@pytest.fixture
def running(jobs: Jobs) -> Iterator[dict[str, Any]]:
    """A stored job as the API server has it; its workers train."""
    answer = jobs.create(document(), dry_run=False)
    assert answer.accepted, answer.message
    yield trains(jobs, "digits")
    jobs.delete("digits")


def problems(manifest: object) -> tuple[Problem, ...]:
    """Return the errors of the model about a manifest and its status."""
    found: tuple[Problem, ...] = ()
    try:
        load_job(manifest)
    except SpecError as error:
        found += error.problems
    return found


def status_problems(manifest: dict[str, Any]) -> tuple[Problem, ...]:
    """Return the errors of the model about a status."""
    try:
        parse(Status, manifest["status"], root="status")
    except SpecError as error:
        return error.problems
    return ()


def sent(manifest: Any) -> Any:
    """Return the document as kubectl sends it: 2.0 as 2, in the test's namespace.

    (An API server calls an integer that arrives as 2.0 no integer where a rule reads it.)
    """
    match manifest:
        case {"metadata": {"namespace": "default" | "ml", **rest}}:
            return sent(manifest | {"metadata": rest})
        case dict():
            return {key: sent(value) for key, value in manifest.items()}
        case list():
            return [sent(value) for value in manifest]
        case float() if manifest.is_integer() and abs(manifest) < 1e21:
            return int(manifest)
        case _:
            return manifest


def is_json(manifest: object) -> bool:
    """Report whether it can be sent: NaN cannot."""
    try:
        json.dumps(manifest, allow_nan=False)
    except ValueError:
        return False
    return True


def names(answer: Answer, path: str) -> bool:
    """Report whether the error names the field, a field inside it, or the list that contains it."""
    last = re.sub(r"\[[0-9]+\]", "", path).rsplit(".", 1)[-1]
    blamed = [field for field in answer.fields if field]
    near = [f for f in blamed if path.startswith(f) or f.startswith(path)]
    return bool(near) or (not blamed and last.lower() in answer.message.lower())


def explained(kubectl: Kubectl, *what: str) -> str:
    """Return the output of `kubectl explain`; a new schema is published after a delay."""
    deadline_s = time.monotonic() + 30
    while True:
        try:
            return kubectl.run("explain", *what)
        except UnavailableError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.5)


def test_the_definition_is_established_and_structural(kubectl: Kubectl) -> None:
    found = kubectl.get("crd", CRD)
    conditions = {c["type"]: c["status"] for c in found["status"]["conditions"]}
    assert conditions["Established"] == conditions["NamesAccepted"] == "True"
    assert "NonStructuralSchema" not in conditions
    assert len(json.dumps(found["spec"])) < 200_000
    # Nothing was dropped or added: it is stored as it is in the repository.
    kept = found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert kept == manifest_schema.openapi()


def test_explain_describes_every_field(kubectl: Kubectl, jobs: Jobs) -> None:
    assert jobs
    text = explained(kubectl, "dlionjob.spec", "--recursive")
    for name in manifest_schema.openapi()["properties"]["spec"]["properties"]:
        assert f"\n  {name}\t" in text, name
    rate = explained(kubectl, "dlj.spec.trainer.optimizer.learningRate")
    assert "Size of a step." in rate


def test_a_fresh_job_is_reported_as_not_observed(running: dict[str, Any]) -> None:
    assert running["status"]["observedGeneration"] == -1
    assert running["metadata"]["generation"] == 1
    assert running["status"]["conditions"] == []  # conditions in the manifest are ignored
    assert running["spec"] == load_job(smallest()).to_document()["spec"]
    assert load_job(running).spec == load_job(smallest()).spec


def test_columns_show_the_status(kubectl: Kubectl, jobs: Jobs, running: dict[str, Any]) -> None:
    header, fresh = kubectl.run("get", "dlj").splitlines()
    assert header.split() == [
        "NAME", "STATE", "PROGRESS", "SITES", "WORKERS", "STEPS/S", "AGE",
    ]  # fmt: skip
    assert fresh.split()[0] == "digits"
    status = {
        "observedGeneration": 1, "state": "Training", "readySites": "2/2", "readyWorkers": "4/4",
        "stepsPerSecond": "3.5",
        "trainerStatus": {
            "progressPercentage": 42, "estimatedRemainingSeconds": 90,
            "metrics": [{"name": "accuracy", "value": "0.9000"}], "accuracyName": "R²",
        },
        "conditions": [
            {"type": "Failed", "status": "False", "reason": "Training",
             "lastTransitionTime": "2026-01-31T12:00:00Z", "message": ""},
            {"type": "Ready", "status": "False", "reason": "WaitingForPeers",
             "lastTransitionTime": "2026-01-31T12:00:00Z", "message": ""},
        ],
    }  # fmt: skip
    assert jobs.replace_status("digits", running | {"status": status}, dry_run=False).accepted
    row = kubectl.run("get", "dlionjobs").splitlines()[1].split()
    assert row[:6] == ["digits", "Training", "42", "2/2", "4/4", "3.5"]
    assert re.fullmatch(r"[0-9]+s", row[6])
    header, wide = kubectl.run("get", "dlj", "-o", "wide").splitlines()
    assert header.split()[7:] == [
        "RUN", "POLICY", "LOSS", "ACCURACY", "ETA-SECONDS", "REASON",
    ]  # fmt: skip
    assert wide.split()[7:] == ["1", "adaptive", "0.9000", "90", "WaitingForPeers"]  # no loss yet
    assert jobs.get("digits")["metadata"]["generation"] == 1


def test_the_status_is_written_only_through_its_subresource(
    jobs: Jobs, running: dict[str, Any]
) -> None:
    both = changed(running, {"status.state": "Failed", "spec.suspend": True})
    spec = jobs.replace("digits", both).document
    assert (spec["spec"]["suspend"], spec["status"]["state"]) == (True, "")
    status = jobs.replace_status("digits", both).document
    assert (status["spec"]["suspend"], status["status"]["state"]) == (False, "Failed")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_table_is_judged_as_by_the_model(jobs: Jobs, case: Case) -> None:
    answer = jobs.create(sent(case.document))
    assert answer.accepted == (not case.path), answer.message
    if answer.accepted:
        assert load_job(answer.document).spec == load_job(case.document).spec
    if case.path not in ("", *ROUTED) and is_json(case.document):
        assert names(answer, case.path), answer
    if case.judge == "rule":
        assert problems(case.document)[0].message in answer.message


def test_metadata_that_an_api_server_stores_is_read(jobs: Jobs) -> None:
    """Metadata of others must not keep the operator from its job."""
    others = {
        "metadata.labels": {f"example.com/l{i}": "v" * 63 for i in range(100)},
        "metadata.annotations": {f"example.com/a{i}": "v" * 2000 for i in range(100)}
        | {"big": "v" * 60_000},
        "metadata.finalizers": ["example.com/f"],
        "metadata.ownerReferences": [
            {"apiVersion": "v1", "kind": "ConfigMap", "name": "c", "uid": "1"}
        ],
    }
    answer = jobs.create(changed(smallest(), others))
    assert answer.accepted, answer.message
    assert load_job(answer.document).metadata.labels == others["metadata.labels"]
    too_much = {"metadata.annotations": {"big": "v" * 256 * 1024}}
    assert not jobs.create(changed(smallest(), too_much)).accepted


def test_a_generated_name_is_within_its_bounds(jobs: Jobs) -> None:
    made_up = changed(smallest(), {"metadata.name": GONE, "metadata.generateName": "j" * 27})
    assert jobs.create(made_up).accepted
    answer = jobs.create(changed(made_up, {"metadata.generateName": "j" * 28}))
    assert "metadata.name" in answer.fields


def test_kubectl_sends_an_integral_float_as_an_integer(kubectl: Kubectl, jobs: Jobs) -> None:
    assert jobs
    manifest = changed(smallest(), {"spec.minSites": 2.0})
    assert "minSites: 2.0" in yaml.safe_dump(manifest)
    kubectl.run("create", "--dry-run=server", "-f", "-", text=yaml.safe_dump(manifest))


@pytest.fixture(scope="module")
def agreed() -> set[str]:
    """Manifests accepted in a trial: most trials begin with the same one."""
    return set()


def to_be_refused(trial: Trial) -> list[dict[str, Any]]:
    """Return its refused documents, with a random share of values of wrong types for each bound."""
    if trial.keyword != "type":
        return list(trial.refused)
    share = max(1, round(len(trial.refused) * min(factor(), 1)))
    return random.Random(trial.name).sample(trial.refused, share)


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)
def test_every_bound_is_kept_as_by_the_model(
    jobs: Jobs,
    keep: Callable[[dict[str, Any]], dict[str, Any]],
    agreed: set[str],
    trial: Trial,
) -> None:
    of_status = trial.path.startswith("status")
    judged = status_problems if of_status else problems

    def offered(manifest: dict[str, Any]) -> Answer:
        if not of_status:
            return jobs.create(manifest)
        kept = keep(smallest()["spec"])
        name = kept["metadata"]["name"]
        return jobs.replace_status(name, kept | {"status": manifest["status"]})

    for manifest in (trial.base, *trial.accepted):
        text = json.dumps([of_status, manifest])
        if text in agreed:
            continue
        assert judged(manifest) == ()
        answer = offered(manifest)
        assert answer.accepted, answer.message
        agreed.add(text)
    for manifest in to_be_refused(trial):
        assert judged(manifest) != ()
        answer = offered(manifest)
        assert not answer.accepted, manifest
        assert trial.field in ROUTED or names(answer, trial.field), answer


KEPT = {
    "exactly one of builtin, module, file, configMap must be given": "a program in a module",
    "only one of name, path may be given": "files by path",
    "path and format go together": "files by path",
    "evaluationPath needs path": "a held-out path",
    "siteClasses are for the bySite partition": "classes by site",
    "only a path can be watched": "a watched path",
    "watch needs evaluationPath": "a watched path",
    "nesterov needs name: sgd and a momentum above 0": "nesterov with momentum",
    "a run needs a stop rule": "an endless run",
    "a built-in program needs a data set": "nothing but what is required",
    "a built-in program has no optimizer of its own": "an optimizer of the program's own",
    "initial must not be above max": "an initial batch at its maximum",
    "warmupFraction must not be above maxFraction": "a warm-up until growth ends",
    "policy adaptive needs topology allToAll": "a ring",
    "policy dlion-published weights by dlion_ratio": "the published form",
    "exposure beyond the pod network needs TLS, else anyone could take part": "exposure by"
    " a gateway",
    "residual is for policy dlion": "error feedback",
    "selective propagation is for policy dlion": "selective propagation",
    "selective propagation takes residual none or perLink": "selective propagation",
    "topology randomRegular needs a degree": "a random graph",
    "degree is for topologies randomRegular and bipartite": "two sides",
    "mode backup needs at least one backup worker": "backup workers",
    "secretName is required in mode Secret, and not allowed in others": "a CA in a secret",
    "issuerName is required in mode CertManager, and not allowed in others": "a cert-manager"
    " issuer",
    "minSites must not be above the number of sites": "a quorum of all sites",
    "the initial global batch needs a sample for every worker": "a batch of a sample each",
    "backupWorkers must be below the number of workers": "all but one are backup workers",
    "batching policy goodput needs the mean of whole gradients": "goodput of whole gradients",
    "siteClasses must name every site once": "classes by site",
    "a topology other than allToAll needs at least two workers": "a ring of two",
    "degree must be below the number of workers": "a random graph",
    "degree or the number of workers must be even": "a random graph",
    "with degree 1 only two workers are connected": "a single pair",
    "degree must not be above half the number of workers, the size of the other side": "two sides",
    "bipartite with a degree needs an even number of workers": "two sides",
    "failureRules may name groups of spec.sites only": "a failure rule for a group of one site",
    "after RestartsExceeded there are no restarts left": "restarts after errors of the program, and"
    " the run's end after too many",
    "maxRetries needs a job of one site: sites do not agree on retries": "retries at one site",
    "robustness clip, trimmed and krum need a policy that combines the contributions of all workers"
    " at once": "clipping in rounds, whatever the mode",
    "robustness clip, trimmed and krum need mode synchronous with this policy, since late"
    " contributions are added without them": "clipping on a ring",
    "robustness clip, trimmed and krum need propagation all: else a peer gets the sum of several"
    " gradients at once": "clipping on a ring",
    "robustness trimmed and krum need topology allToAll: neighbours are too few": "clipping on a"
    " ring",
    "too few workers for this robustness": "krum of four",
    "quarantine majority needs the warnings that robustness off does not give": "a quarantine",
    "grouping learned is for topology clustered": "groups by predicted links",
    "topology staged and policy staged belong together": "sensors and a decoder",
    "topology staged needs an encoder": "sensors and a decoder",
    "initializer.dataset needs dataset.path, and does not grow": "a downloaded data set",
    "initializer.model needs startFrom or encoder": "a downloaded model",
    "a URL must not have a user or a password: anyone who reads the job would": "a downloaded data"
    " set",
    "credentials need https": "a downloaded encoder, with a Secret",
    "an s3:// address needs secretName": "a data set in S3",
    "a noiseMultiplier below 0.01 protects nothing": "privacy",
    "a clipNorm below 1e-09 is lost in rounding": "privacy",
    "privacy needs knowledgeTransfer none: it shares losses without noise": "privacy",
    "privacy is not for topology staged, whose sensors send features of samples": "privacy",
    "privacy needs data that neither grow nor lose near-duplicates: else a sample would decide"
    " about others": "privacy",
    "with an encoder, training starts from a new model and its data do not grow": "sensors and a"
    " decoder",
}
"""Accepted manifests of the table by the message of the rule that they test."""


def test_every_rule_has_an_accepted_and_a_refused_manifest() -> None:
    of_manifests = {rule["message"] for rule in RULES} - TRANSITIONS
    refused = {problems(case.document)[0].message for case in REFUSED if case.judge == "rule"}
    assert set(KEPT) == refused == of_manifests
    assert set(KEPT.values()) <= {case.name for case in ACCEPTED}


def largest(class_count: int, entries: int) -> dict[str, Any]:
    """Return a manifest with as much as the schema allows in the fields that rules read."""
    names = [f"{i:x>40}" for i in range(bounds.MAX_SITES)]
    mapping = {f"example.com/k{k}": "1" * 32 for k in range(entries)}
    group = {"workers": 1, "resources": {"limits": mapping, "requests": mapping},
             "nodeSelector": mapping}  # fmt: skip
    groups = [group | {"name": f"{g:x>16}"} for g in range(bounds.MAX_GROUPS_PER_SITE)]
    # The rule on failure rules reads every group of every site before it finds theirs.
    last = [each | {"name": f"{g:y>16}"} for g, each in enumerate(groups)]
    rule = {"onEnds": list(ENDS), "groups": [each["name"] for each in last[:MAX_GROUPS_PER_RULE]],
            "action": "FailRun"}  # fmt: skip
    classes = list(range(class_count))
    dataset = {"name": "digits", "partition": "bySite", "keepClasses": classes,
               "siteClasses": [{"site": name, "classes": classes} for name in names]}  # fmt: skip
    return changed(smallest(), {
        "spec.sites": [{"name": name, "groups": groups} for name in names[:-1]]
        + [{"name": names[-1], "groups": last}],
        "spec.failureRules": [rule] * MAX_RULES,
        "spec.batching": {"globalBatchSize": {"initial": 1000}},
        "spec.trainer.dataset": dataset,
        "spec.trainer.freeze": [f"{i:x>256}" for i in range(64)],
    })  # fmt: skip


def test_the_largest_manifest_is_within_the_cost_limit_of_rules(jobs: Jobs) -> None:
    answer = jobs.create(largest(bounds.MAX_CLASSES, 16))
    assert answer.accepted, answer.message
    answer = jobs.create(largest(100, 4), dry_run=False)  # etcd stores at most 1.5 MiB
    assert answer.accepted, answer.message
    answer = jobs.replace("digits", answer.document)
    jobs.delete("digits")
    assert answer.accepted, answer.message


@given(changed_documents())
@settings(max_examples=examples(500), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_documents_changed_at_random_are_judged_as_by_the_model(jobs: Jobs, manifest: Any) -> None:
    found = problems(manifest)
    answer = jobs.create(sent(manifest))
    assert answer.accepted == (not found), (found, answer.message)
    if answer.accepted:
        assert load_job(answer.document).spec == load_job(manifest).spec


@given(values)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_document_that_is_not_a_manifest_is_refused(jobs: Jobs, anything: Any) -> None:
    assert problems(anything)
    assert not jobs.create(anything).accepted


# ---- changes


ORDERED = {
    "spec.trainer.freeze": ["a", "b"],
    "spec.trainer.dataset.keepClasses": [1, 2],
    "spec.trainer.dataset.siteClasses": [
        {"site": "plant-a", "classes": [0, 1]},
        {"site": "plant-b", "classes": [2]},
    ],
    "spec.trainer.dataset.siteClasses.0.classes": [0, 1],
    "spec.sites": smallest()["spec"]["sites"],
    "spec.sites.0.groups": [{"name": "g", "workers": 1}, {"name": "h", "workers": 1}],
}
"""Lists that API servers treat as sets and maps; the sites agree on their order."""
FREE = [
    ("spec.exchange.parameters", {}, {"a": 1}),
    ("spec.exchange.parameters", {"a": {"b": 1}}, {"a": {"b": 2}}),
    ("spec.exchange.parameters", {"a": [1, 2]}, {"a": [2, 1]}),
    ("spec.exchange.parameters", {"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}),
    ("spec.podTemplate", {"spec": {"a": 1}}, {"spec": {"a": 2}}),
    ("spec.sites.0.groups.0.podTemplate", {"spec": {"a": 1}}, {"spec": {"a": 2}}),
]
"""Fields whose content the schema leaves open."""


def _differing(path: str, before: Any, after: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    scene: dict[str, Any] = {}
    if "siteClasses" in path:
        whole = ORDERED["spec.trainer.dataset.siteClasses"]
        scene = {"spec.trainer.dataset": {
            "name": "digits", "partition": "bySite", "siteClasses": whole}}  # fmt: skip
    base = changed(smallest(), scene)
    return changed(base, {path: before}), changed(base, {path: after})


CHANGES = [
    pytest.param(trial.base, new, id=f"{trial.name}-{number}")
    for trial in TRIALS
    if trial.path.startswith("spec")
    for number, new in enumerate(trial.accepted)
    if new != trial.base
]
CHANGES += [pytest.param(smallest(), case.document, id=case.name) for case in ACCEPTED]
CHANGES += [
    pytest.param(*_differing(path, whole, whole[::-1]), id=f"{path}-order")
    for path, whole in ORDERED.items()
]
CHANGES += [
    pytest.param(*_differing(path, old, new), id=f"{path}-{number}")
    for number, (path, old, new) in enumerate(FREE)
]


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_a_running_job_allows_the_changes_of_the_model(
    jobs: Jobs,
    keep: Callable[[dict[str, Any]], dict[str, Any]],
    old: dict[str, Any],
    new: dict[str, Any],
) -> None:
    """Change every field from one valid value to another during the run."""
    kept = keep(old["spec"])
    name = kept["metadata"]["name"]
    before, after = (load_job(changed(d, {"metadata.name": name})) for d in (old, new))
    found = change_problems(before, after, run_ended=False)
    answer = jobs.replace(name, kept | {"spec": sent(new["spec"])})
    assert answer.accepted == (not found), (found, answer.message)
    for problem in found:
        assert problem.message in answer.message
        assert problem.path in answer.fields
    both = {"spec": changed(new, {"spec.runId": "another"})["spec"]}
    early = jobs.replace(name, kept | both)
    assert not early.accepted
    assert "runId may change only after the job has succeeded or failed" in early.message


@pytest.mark.parametrize(
    ("type_", "status", "free"),
    [
        ("Succeeded", "True", True),
        ("Failed", "True", True),
        ("Succeeded", "False", False),
        ("Failed", "Unknown", False),
        ("Stalled", "True", False),
        ("Ready", "True", False),
    ],
)
def test_a_new_run_begins_only_after_the_end_of_the_last(
    jobs: Jobs, running: dict[str, Any], type_: str, status: str, free: bool
) -> None:
    ended = running["status"] | {"conditions": [ENDED | {"type": type_, "status": status}]}
    assert jobs.replace_status("digits", running | {"status": ended}, dry_run=False).accepted
    kept = jobs.get("digits")
    fresh = changed(kept, {"spec.runId": "2"})
    assert jobs.replace("digits", fresh).accepted == free
    # With a new run everything may change, without one no more than before.
    everything = {
        "spec.trainer.seed": 7, "spec.exchange.codec": "int8", "spec.tls.mode": "Disabled",
        "spec.sites.0.name": "elsewhere",
    }  # fmt: skip
    assert jobs.replace("digits", changed(fresh, everything)).accepted == free
    same_run = jobs.replace("digits", changed(kept, everything))
    assert {"spec.trainer", "spec.exchange", "spec.tls", "spec.sites"} == set(same_run.fields)
    # A status never blocks the next one.
    assert jobs.replace_status("digits", kept | {"status": {"observedGeneration": 2}}).accepted


@pytest.mark.parametrize(
    "status",
    [
        {"observedGeneration": -1},
        {"runId": "1", "conditions": [CONDITION | {"type": "Stalled", "status": "True"}]},
        {"runId": "0", "trainingStartTime": "2026-01-31T12:00:00Z"},
    ],
    ids=["not looked at", "stalled", "an earlier run trained"],
)
def test_all_fields_may_change_until_workers_train(jobs: Jobs, status: dict[str, Any]) -> None:
    """One commit corrects a wrong manifest at every site, in any state."""
    assert jobs.create(document(), dry_run=False).accepted
    kept = jobs.get("digits")
    assert jobs.replace_status("digits", kept | {"status": status}, dry_run=False).accepted
    kept = jobs.get("digits")
    everything = {
        "spec.trainer.seed": 7, "spec.exchange.codec": "int8", "spec.tls.mode": "Disabled",
        "spec.sites.0.name": "elsewhere",
    }  # fmt: skip
    same_run = jobs.replace("digits", changed(kept, everything))
    other_run = jobs.replace("digits", changed(kept, everything | {"spec.runId": "2"}))
    jobs.delete("digits")
    assert same_run.accepted, same_run.message
    assert other_run.accepted, other_run.message


def test_every_rule_about_changes_is_broken_by_some_change() -> None:
    broken = {"once its workers train, runId may change only after the job has succeeded or failed"}
    for change in CHANGES:
        old, new = change.values
        pair = (load_job(changed(d, {"metadata.name": "same"})) for d in (old, new))  # type: ignore[arg-type]
        broken |= {problem.message for problem in change_problems(*pair, run_ended=False)}
    assert broken == TRANSITIONS


def test_workers_suspension_and_deadlines_change_during_a_run(
    jobs: Jobs, running: dict[str, Any]
) -> None:
    changes = {"spec.sites.0.groups.0.workers": 5, "spec.suspend": True, "spec.minSites": 2,
               "spec.checkpoint.everySeconds": 60, "spec.activeDeadlineSeconds": 600}  # fmt: skip
    assert jobs.replace("digits", changed(running, changes), dry_run=False).accepted
    kept = jobs.get("digits")
    assert kept["metadata"]["generation"] == 2
    assert kept["spec"]["sites"][0]["groups"][0]["workers"] == 5
