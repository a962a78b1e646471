"""Test which problems of a whole job `dlion describe` finds: conditions, sites and links.

- Each reason that an operator writes has advice. Reasons of a newer operator are shown without
  advice. A failed run names its exit code.
- The findings cover unreachable, refused, absent and too few sites, broken links, unreported pairs
  and the slowest link. There are none after the run.
- A job that is unobserved, suspended, queued or in deletion is reported.

The messages are those of the operator's `plan/outcome` and `federation`.

Left out: pods and events (test_pod_findings.py).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from dlion_api.status import Reason
from dlion_cli.findings.condition_advice import ADVICE
from dlion_cli.findings.find_problems import find_problems
from dlion_cli.findings.job_problem import JobProblem
from manifest_table import changed, smallest

NOW = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)
EARLIER = "2026-01-31T12:00:00Z"


def condition(type_: str, reason: str, status: str = "True", message: str = "") -> dict[str, Any]:
    return {"type": type_, "status": status, "reason": reason, "message": message}


def job(*conditions: dict[str, Any], spec: Any = None, metadata: Any = None, **status: Any
        ) -> dict[str, Any]:  # fmt: skip
    made = changed(smallest(), {"spec.runId": "1", **(spec or {})})
    made["metadata"] |= {"name": "digits", "namespace": "default", "generation": 1,
                         "creationTimestamp": EARLIER, **(metadata or {})}  # fmt: skip
    given = {"observedGeneration": 1, "runId": "1", "conditions": list(conditions), **status}
    return made | {"status": given}


def found(document: dict[str, Any]) -> list[JobProblem]:
    return find_problems(document, [], [], NOW)


TRAINS = condition("Ready", "Training")
SITES = [{"name": "plant-a", "state": "Ready"}, {"name": "plant-b", "state": "Ready"}]
UNKNOWN_HERE = "this operator knows no other sites; name them in the chart's values (sites)"


def pair(one: str, other: str, connected: int, rate: str = "") -> dict[str, Any]:
    return {"pair": f"{one} to {other}", "connected": connected, "expected": 4,
            "megabitsPerSecond": rate}  # fmt: skip


def linked(*pairs: dict[str, Any], connected: int = 8) -> dict[str, Any]:
    links = {"connected": connected, "expected": 8, "pairs": list(pairs)}
    return job(TRAINS, sites=SITES, links=links)


def test_every_reason_has_advice() -> None:
    assert set(ADVICE) == set(Reason)
    assert all(advice for advice, _ in ADVICE.values())


@pytest.mark.parametrize("reason", list(Reason))
def test_a_failed_run_has_advice(reason: Reason) -> None:
    (problem,) = found(job(condition("Failed", reason, message="why"), sites=[{"state": "Absent"}]))
    assert (problem.severity, problem.reason) == ("error", reason)
    assert problem.message.endswith(": why")
    assert problem.advice == ADVICE[reason][0]


@pytest.mark.parametrize(
    ("fields", "message", "container"),
    [
        (("model",), "2 of 2 workers download", "model-initializer"),
        (("dataset", "model"), "2 of 2 workers download", "dataset-initializer"),
        (("dataset", "model"), "small-0 (model-initializer)", "model-initializer"),
    ],
)
def test_the_log_of_the_failed_download_is_named(
    fields: tuple[str, ...], message: str, container: str
) -> None:
    download = {"url": "https://example.com/d.npz", "sha256": "0" * 64}
    spec = {"spec.trainer.initializer": dict.fromkeys(fields, download)}
    conditions = (condition("Failed", "InitializerFailed", message=message),)
    (problem,) = found(job(*conditions, spec=spec, sites=[{"state": "Absent"}]))
    workers = "dlion.dev/job-name=digits,app.kubernetes.io/component=worker"
    assert f"kubectl logs -l {workers} -c {container}" in problem.command


def test_a_failed_program_names_its_exit_code_and_log() -> None:
    (problem,) = found(job(condition("Failed", "ProgramFailed", message="small-0: 67 (PROGRAM)")))
    assert "exit code 67" in problem.message
    assert problem.command == "dlion logs digits"


CASES = [
    ("trains", job(TRAINS), None, "", "", ""),
    ("succeeded", job(condition("Succeeded", "Completed"), sites=[{"state": "Absent"}]),
     None, "", "", ""),
    ("not observed", job(observedGeneration=-1), "error", "NotObserved", "no operator",
     "kubectl get pods -A -l app.kubernetes.io/name=dlion"),
    ("not observed yet",
     job(metadata={"creationTimestamp": "2026-01-31T12:29:50Z"}, observedGeneration=-1),
     "note", "NotObserved", "no operator", "kubectl get pods -A"),
    ("a change that is not observed", job(TRAINS, metadata={"generation": 2}),
     "note", "NotObserved", "last change", "kubectl get pods -A"),
    ("managed elsewhere", job(spec={"spec.managedBy": "kueue.x-k8s.io/multikueue"},
                              observedGeneration=-1),
     "note", "ManagedElsewhere", "kueue.x-k8s.io/multikueue", ""),
    ("dispatched", job(TRAINS, spec={"spec.managedBy": "kueue.x-k8s.io/multikueue"},
                       metadata={"generation": 3,
                                 "labels": {"kueue.x-k8s.io/queue-name": "edge"}}),
     "note", "ManagedElsewhere", "no copy",
     "kubectl describe workloads.kueue.x-k8s.io digits-dispatch"),
    ("is being deleted",
     job(TRAINS, metadata={"deletionTimestamp": "2026-01-31T12:20:00Z",
                           "finalizers": ["foregroundDeletion"]}),
     "warning", "Deleting", "foregroundDeletion", "kubectl get all -l dlion.dev/job-name=digits"),
    ("suspended", job(condition("Ready", "Suspended"), condition("Suspended", "Suspended")),
     "note", "Suspended", "", "dlion resume digits"),
    ("queued", job(condition("Ready", "Queued", "False"),
                   condition("Reconciling", "Queued", message="waiting for a place in the queue")),
     "note", "Queued", "place in the queue", "kubectl get workloads"),
    ("waits for peers",
     job(condition("Ready", "WaitingForPeers", "False"),
         condition("Reconciling", "WaitingForPeers", message="3 of 4 workers have joined")),
     "warning", "WaitingForPeers", "3 of 4", "dlion preflight FILE --contexts A,B"),
    ("below its quorum",
     job(condition("Ready", "BelowQuorum", "False"),
         condition("Reconciling", "BelowQuorum", message="1 of at least 2 sites (minSites)"),
         sites=[{"name": "plant-a", "state": "Ready"}], spec={"spec.minSites": 2}),
     "warning", "BelowQuorum", "minSites", "dlion preflight"),
    ("stalled", job(condition("Ready", "NoAuthority", "False"),
                    condition("Stalled", "NoAuthority", message="no Secret digits-authority")),
     "error", "NoAuthority", "digits-authority", "kubectl get secrets"),
    ("degraded", job(TRAINS, condition("Degraded", "PeersLost", message="3 of 4 train here")),
     "warning", "PeersLost", "3 of 4", ""),
    ("another manifest",
     job(TRAINS, condition("SpecConsistent", "SpecDiffers", "False", "trainer.seed: plant-b")),
     "error", "SpecDiffers", "trainer.seed: plant-b", "dlion submit FILE"),
    ("of a newer operator", job(condition("Stalled", "MoonPhase", message="it is full")),
     "error", "MoonPhase", "it is full", ""),
    ("not for this site", job(condition("Ready", "NotSelected", message="spec.sites does not")),
     "note", "NotSelected", "spec.sites", ""),
    ("unreachable", job(TRAINS, sites=[SITES[0], {"name": "plant-b", "state": "Unreachable",
                                                  "message": UNKNOWN_HERE}]),
     "error", "SiteUnreachable", "chart's values (sites)", "dlion preflight"),
    ("refused", job(TRAINS, sites=[SITES[0], {"name": "plant-b", "state": "Refused",
                                              "message": "exchange differs"}]),
     "error", "SiteRefused", "exchange differs", "dlion get digits --context plant-b"),
    ("absent", job(TRAINS, sites=[SITES[0], {"name": "plant-b", "state": "Absent", "message":
                   "its operator does not have this run; apply the manifest there, or resume it"}]),
     "warning", "SiteAbsent", "does not have this run", "dlion submit FILE"),
    ("too few sites", job(TRAINS, sites=[SITES[0]], spec={"spec.minSites": 2}),
     "error", "BelowQuorum", "1 of at least 2 sites", "dlion preflight"),
    ("links down between sites",
     linked(pair("plant-a", "plant-b", 2), pair("plant-b", "plant-a", 4), connected=6),
     "warning", "LinksDown", "2 of 4 links from plant-a to plant-b", "dlion events digits"),
    ("links down in a site", job(TRAINS, links={"connected": 1, "expected": 2}),
     "warning", "LinksDown", "1 of 2 links between workers", ""),
    ("a pair that is missing", linked(pair("plant-a", "plant-b", 4)),
     "warning", "PairMissing", "from plant-b to plant-a", "dlion preflight"),
    ("the slowest link",
     linked(pair("plant-a", "plant-b", 4, "48.9"), pair("plant-b", "plant-a", 4, "9.5")),
     "note", "SlowestLink", "plant-b to plant-a: 9.5 Mbit/s", "--bandwidth"),
    ("the slowest link in a site",
     job(TRAINS, links={"connected": 2, "expected": 2, "slowest": "plant-a to plant-a"}),
     "note", "SlowestLink", "plant-a to plant-a", "--bandwidth"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("document", "severity", "reason", "words", "command"),
    [case[1:] for case in CASES], ids=[case[0] for case in CASES],
)  # fmt: skip
def test_problems_of_a_job_are_found(
    document: dict[str, Any], severity: str | None, reason: str, words: str, command: str
) -> None:
    problems = found(document)
    if severity is None:
        assert not problems
        return
    (problem,) = problems
    assert (problem.severity, problem.reason) == (severity, reason)
    assert words in problem.message
    assert command in problem.command
    assert problem.advice


def test_a_sparse_topology_has_no_missing_pairs() -> None:
    document = changed(linked(pair("plant-a", "plant-b", 4)),
                       {"spec.exchange": {"policy": "dlion", "topology": "ring"}})  # fmt: skip
    assert not found(document)


def test_a_suspended_job_names_no_sites() -> None:
    document = job(condition("Suspended", "Suspended"), state="Suspended",
                   sites=[{"name": "plant-b", "state": "Absent"}])  # fmt: skip
    assert [each.reason for each in found(document)] == ["Suspended"]


@pytest.mark.parametrize(
    "odd",
    [
        {}, {"metadata": [], "spec": 3, "status": {"links": {"pairs": [1, {"connected": "x"}]}}},
        job(TRAINS, links={"connected": "a", "expected": None, "pairs": [{"pair": 3}] * 300}),
        job(TRAINS, links={"pairs": [{"pair": "a", "megabitsPerSecond": rate}
                                     for rate in ("nan", "inf", "-1", "x", 3, [])]}),
        job(TRAINS, sites=[None, {"state": "Ready", "message": "\x1b[2J"}, {"state": {}}]),
        job(condition("Stalled", "\x1b[31m", message="{name} {0}")),
        job(spec={"spec.minSites": "2"}), job(metadata={"deletionTimestamp": "?"}),
    ],
    ids=range(8),
)  # fmt: skip
def test_malformed_documents_cause_no_error(odd: dict[str, Any]) -> None:
    for each in found(odd):
        assert f"{each.object}{each.message}{each.advice}{each.command}{each.reason}".isprintable()
