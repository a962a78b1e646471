"""A comparison of a job's status in a cluster with docs/conditions.md, for the operator and for the
GitOps tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gitops.documents import ROOT, table
from gitops.judge import VERDICTS, Judge
from gitops.lua import argo_cd_health

_KIT = ROOT / "examples/gitops"


def agree(document: Mapping[str, Any], situation: str) -> None:
    """Assert that conditions, Argo CD, kstatus and Flux agree with that line of the page."""
    row = table()[situation]
    reported = {each["type"]: each["status"] for each in document["status"].get("conditions") or ()}
    assert {name: reported.get(name) for name in row.conditions} == row.conditions
    script = (_KIT / "argocd/health.lua").read_text(encoding="utf-8")
    assert argo_cd_health(script, document)["status"] == row.argo_cd
    program = VERDICTS.built()
    assert program is not None, "run `make testbed-setup`"
    rules = [_KIT / "flux/base/jobs.yaml"]
    judged = Judge(program).verdicts(rules, {"job": document})["job"]
    assert (judged.kstatus, judged.flux) == (row.kstatus, (row.kstatus,))
