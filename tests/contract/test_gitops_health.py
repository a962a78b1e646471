"""Tests of the health checks of Argo CD and Karmada for a DLionJob against docs/conditions.md.

Each line of the page's table has the conditions that the operator writes, in all jobs made for it.
The health script runs in Lua 5.1 without the libraries that Argo CD withholds, and gives the page's
state for each line. Its message has the reason and the lost sites. The ConfigMap has that script.
Karmada's script reports as healthy the jobs that are Current by the page.

Left out: deletion, which Argo CD handles; the Lua of these tools, another implementation of 5.1.
"""

from __future__ import annotations

import pytest
import yaml

from dlion_api.status import ConditionType
from gitops import lua
from gitops.documents import ROOT, UNSEEN, Case, cases, table
from operator_world import dlion_job

KIT = ROOT / "examples/gitops"
ARGO_CD = KIT / "argocd"
SCRIPT = (ARGO_CD / "health.lua").read_text(encoding="utf-8")
ROWS = table()
CASES = {case.name: case for case in cases()}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def test_every_line_of_the_page_has_a_job() -> None:
    assert {case.situation for case in CASES.values()} == set(ROWS)


@every_case
def test_the_operator_writes_the_conditions_of_the_page(case: Case) -> None:
    if case.situation == UNSEEN:
        assert (
            case.document["status"]["observedGeneration"] < case.document["metadata"]["generation"]
        )
        return
    written = {each["type"]: each["status"] for each in case.document["status"]["conditions"]}
    page = ROWS[case.situation].conditions
    assert {name: written[name] for name in page} == page
    marked = {ConditionType.DEGRADED, ConditionType.SUSPENDED, ConditionType.FAILED}
    assert {name for name in marked if written[name] == "True"} == marked & set(page)


@every_case
def test_argo_cd_has_the_state_of_the_page(case: Case) -> None:
    health = lua.argo_cd_health(SCRIPT, case.document)
    assert health["status"] == ROWS[case.situation].argo_cd
    if case.situation == UNSEEN:
        assert health["message"] == "not looked at yet"
    else:
        (ready,) = [c for c in case.document["status"]["conditions"] if c["type"] == "Ready"]
        assert health["message"].startswith(f"{ready['reason']}: {ready['message']}")


def test_argo_cd_names_lost_sites() -> None:
    health = lua.argo_cd_health(SCRIPT, CASES["lost_a_site"].document)
    assert health["message"].endswith("; not complete: plant-b")


@pytest.mark.parametrize("status", [None, {}, {"observedGeneration": 1}])
def test_argo_cd_accepts_a_missing_status(status: object) -> None:
    document = {**CASES["fresh"].document, "status": status}
    assert lua.argo_cd_health(SCRIPT, document)["status"] == "Progressing"


def test_a_script_gets_no_library_that_argo_cd_withholds() -> None:
    for call in ('string.format("%d", 1)', '("x"):upper()', 'io.open("f")', "math.huge"):
        with pytest.raises(Exception, match="attempt to index"):
            lua.argo_cd_health(f"return {{status = {call}}}", {})


def test_the_config_map_has_the_script() -> None:
    config = yaml.safe_load((ARGO_CD / "argocd-cm.yaml").read_text(encoding="utf-8"))
    assert config["data"] == {"resource.customizations.health.dlion.dev_DLionJob": SCRIPT}


@pytest.fixture(scope="module")
def interpreter() -> dict[str, str]:
    """Karmada's scripts by their purpose."""
    document = yaml.safe_load((KIT / "karmada/interpreter.yaml").read_text(encoding="utf-8"))
    customizations = document["spec"]["customizations"]
    return {name: each["luaScript"] for name, each in customizations.items()}


@every_case
def test_karmada_reports_current_jobs_as_healthy(case: Case, interpreter: dict[str, str]) -> None:
    health = lua.call(interpreter["healthInterpretation"], "InterpretHealth", case.document)
    assert health is (ROWS[case.situation].kstatus == "Current")


def test_karmada_propagates_the_program_too(interpreter: dict[str, str]) -> None:
    script = interpreter["dependencyInterpretation"]
    program = {"configMap": {"name": "our-program", "key": "program.py"}}
    document = dlion_job()
    assert lua.call(script, "GetDependencies", document) == []
    document["spec"]["trainer"]["program"] = program
    (found,) = lua.call(script, "GetDependencies", document)
    assert found == {"apiVersion": "v1", "kind": "ConfigMap", "namespace": "default",
                     "name": "our-program"}  # fmt: skip
