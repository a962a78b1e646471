"""GitOps tools say of a DLionJob what docs/conditions.md says, and take the examples made for them.

Proves, by the tools' own Go code: kstatus, Flux and Fleet say of a job in each situation what the
page says; Open Cluster Management's feedback brings back how it stands; every manifest for Flux,
Fleet and Open Cluster Management is what these projects' types allow.
Left out: Argo CD and Karmada (tests/contract/test_gitops_health.py), and these systems themselves.
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


def test_every_manifest_is_what_its_tool_takes(judge: Judge, tmp_path: Path) -> None:
    files = [*KIT.glob("flux/base/[!k]*.yaml"), *FLUX, *KIT.glob("*/fleet.yaml"),
             *KIT.glob("fleet/*.yaml"), OCM]  # fmt: skip
    judge.check(files)
    wrong = tmp_path / FLUX[0].name
    wrong.write_text(FLUX[0].read_text(encoding="utf-8").replace("prune:", "prunes:"))
    with pytest.raises(ValueError, match='unknown field "prunes"'):
        judge.check([wrong])


def test_each_line_of_the_page_is_held_against_a_job_of_a_real_cluster() -> None:
    """`agree` has the tools judge a job as an API server has it; here it is but looked up that each
    line has one such place in a test that `make test` runs."""
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
def test_kstatus_says_what_the_page_says(case: Case, judged: dict[str, Verdicts]) -> None:
    assert judged[case.name].kstatus == ROWS[case.situation].kstatus


@every_case
def test_flux_says_what_the_page_says(case: Case, judged: dict[str, Verdicts]) -> None:
    while_training, _ = judged[case.name].flux
    assert while_training == ROWS[case.situation].kstatus


@every_case
def test_flux_waits_for_the_model_where_it_is_told_to(
    case: Case, judged: dict[str, Verdicts]
) -> None:
    _, after_training = judged[case.name].flux
    ends = {SUCCEEDED: "Current", FAILED: "Failed"}
    assert after_training == ends.get(case.situation, "InProgress")


@every_case
def test_fleet_says_what_the_page_says(case: Case, judged: dict[str, Verdicts]) -> None:
    words = {"Current": "ready", "InProgress": "transitioning", "Failed": "error"}
    assert judged[case.name].fleet == (words[ROWS[case.situation].kstatus],)


def test_fleet_would_take_every_job_for_failed_without_its_exception(
    judge: Judge, tmp_path: Path
) -> None:
    plain = tmp_path / "fleet.yaml"
    plain.write_text("name: dlion-jobs\n")
    said = judge.verdicts([plain], {"trains": CASES["trains"].document})
    assert said["trains"].fleet == ("error",)


@every_case
def test_feedback_brings_back_how_the_job_stands(case: Case, judged: dict[str, Verdicts]) -> None:
    status = case.document["status"]
    found = judged[case.name].feedback
    if "conditions" not in status:
        assert found == {}
        return
    said = {each["type"]: each for each in status["conditions"]}
    assert found["ready"] == said["Ready"]["status"]
    assert found["reason"] == said["Ready"]["reason"]
    assert found["succeeded"] == said["Succeeded"]["status"]
    assert found["state"] == status["state"]
    assert found.get("readyWorkers") == status.get("readyWorkers")


def test_a_job_that_is_being_deleted_is_terminating(judge: Judge) -> None:
    document = CASES["trains"].document
    deleted = {**document["metadata"], "deletionTimestamp": "2026-01-31T12:00:00Z"}
    said = judge.verdicts([], {"job": {**document, "metadata": deleted}})
    assert said["job"].kstatus == "Terminating"
