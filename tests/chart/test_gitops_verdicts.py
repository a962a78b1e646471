"""Tests of the verdicts of GitOps tools on a DLionJob against docs/conditions.md, with the tools'
own Go code.

In each situation kstatus, Flux and Fleet have the state of the page. The feedback of Open Cluster
Management returns the state of the job. Every manifest for Flux, Fleet and Open Cluster Management
is valid for the types of these projects.

Left out: Argo CD and Karmada (tests/contract/test_gitops_health.py); these systems themselves.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

import gitops.documents
from gitops.documents import FAILED, ROOT, SUCCEEDED, Case, cases, table

if TYPE_CHECKING:
    from pathlib import Path

    from gitops.judge import Judge, Verdicts

KIT = ROOT / "examples/gitops"
FLUX = (KIT / "flux/base/jobs.yaml", KIT / "flux/after-training.yaml")
FLEET = KIT / "jobs/fleet.yaml"
OCM = KIT / "ocm/manifestwork.yaml"
ROWS = table()
CASES = {case.name: case for case in cases()}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def test_every_manifest_is_valid_for_its_tool(judge: Judge, tmp_path: Path) -> None:
    files = [*KIT.glob("flux/base/[!k]*.yaml"), *FLUX, *KIT.glob("*/fleet.yaml"),
             *KIT.glob("fleet/*.yaml"), OCM]  # fmt: skip
    judge.check(files)
    wrong = tmp_path / FLUX[0].name
    wrong.write_text(FLUX[0].read_text(encoding="utf-8").replace("prune:", "prunes:"))
    with pytest.raises(ValueError, match='unknown field "prunes"'):
        judge.check([wrong])


def test_each_line_of_the_page_is_compared_with_a_job_of_a_real_cluster() -> None:
    """`agree` lets the tools judge a job from an API server. This test only checks that a test of
    `make test` calls it for each line.
    """
    judged: set[str] = set()
    for path in (ROOT / "tests/cluster").glob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if "pytest.mark.slow,\n" in text:
            continue  # all of that file
        calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
        for call in calls:
            if isinstance(call.func, ast.Name) and call.func.id == "agree":
                judged |= {n.id for n in ast.walk(call.args[1]) if isinstance(n, ast.Name)}
    situations = {getattr(gitops.documents, name) for name in judged if name.isupper()}
    assert situations == set(ROWS)


@pytest.fixture(scope="module")
def judged(judge: Judge) -> dict[str, Verdicts]:
    objects = {name: case.document for name, case in CASES.items()}
    return judge.verdicts([*FLUX, FLEET, OCM], objects)


@every_case
def test_kstatus_has_the_state_of_the_page(case: Case, judged: dict[str, Verdicts]) -> None:
    assert judged[case.name].kstatus == ROWS[case.situation].kstatus


@every_case
def test_flux_has_the_state_of_the_page(case: Case, judged: dict[str, Verdicts]) -> None:
    while_training, _ = judged[case.name].flux
    assert while_training == ROWS[case.situation].kstatus


@every_case
def test_flux_waits_for_the_model_on_request(case: Case, judged: dict[str, Verdicts]) -> None:
    _, after_training = judged[case.name].flux
    ends = {SUCCEEDED: "Current", FAILED: "Failed"}
    assert after_training == ends.get(case.situation, "InProgress")


@every_case
def test_fleet_has_the_state_of_the_page(case: Case, judged: dict[str, Verdicts]) -> None:
    words = {"Current": "ready", "InProgress": "transitioning", "Failed": "error"}
    assert judged[case.name].fleet == (words[ROWS[case.situation].kstatus],)


def test_without_its_exception_fleet_would_report_every_job_as_failed(
    judge: Judge, tmp_path: Path
) -> None:
    plain = tmp_path / "fleet.yaml"
    plain.write_text("name: dlion-jobs\n")
    verdicts = judge.verdicts([plain], {"trains": CASES["trains"].document})
    assert verdicts["trains"].fleet == ("error",)


@every_case
def test_feedback_returns_the_state_of_the_job(case: Case, judged: dict[str, Verdicts]) -> None:
    status = case.document["status"]
    found = judged[case.name].feedback
    if "conditions" not in status:
        assert found == {}
        return
    conditions = {each["type"]: each for each in status["conditions"]}
    assert found["ready"] == conditions["Ready"]["status"]
    assert found["reason"] == conditions["Ready"]["reason"]
    assert found["succeeded"] == conditions["Succeeded"]["status"]
    assert found["state"] == status["state"]
    assert found.get("readyWorkers") == status.get("readyWorkers")


def test_a_job_that_is_being_deleted_is_terminating(judge: Judge) -> None:
    document = CASES["trains"].document
    deleted = {**document["metadata"], "deletionTimestamp": "2026-01-31T12:00:00Z"}
    verdicts = judge.verdicts([], {"job": {**document, "metadata": deleted}})
    assert verdicts["job"].kstatus == "Terminating"
