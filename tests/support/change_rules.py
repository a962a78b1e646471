"""The rules for changes of a job in training, in Python: an oracle for the CEL rules.

`dlion_api.spec.transitions` declares the rules, which only an API server evaluates.
"""

from __future__ import annotations

from typing import Any

from dlion_api.errors import Problem
from dlion_api.spec import Job
from dlion_api.spec.transitions import JOB_TRANSITIONS

ATTRIBUTES = {
    "knowledgeTransfer": "knowledge_transfer",
    "managedBy": "managed_by",
    "failureRules": "failure_rules",
}


def change_problems(old: Job, new: Job, *, run_ended: bool) -> list[Problem]:
    """Return why the manifest may not change from `old` to `new`; empty if it may."""
    return [
        Problem(rule.path, rule.message)
        for rule in JOB_TRANSITIONS
        if not _holds(rule.path.removeprefix("spec."), old, new, run_ended=run_ended)
    ]


def _holds(field: str, old: Job, new: Job, *, run_ended: bool) -> bool:
    same_run = old.spec.run_id == new.spec.run_id
    if field == "runId":
        return same_run or run_ended
    if field == "sites":
        return not same_run or _places(old) == _places(new)
    before, after = (getattr(job.spec, ATTRIBUTES.get(field, field)) for job in (old, new))
    return not same_run or before == after


def _places(job: Job) -> list[Any]:
    return [
        (site.name, [(g.name, g.image, g.resources, g.node_selector) for g in site.groups])
        for site in job.spec.sites
    ]
