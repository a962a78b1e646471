"""A manifest that is wrong, and one that is corrected before its run trains. Pure.

No run ends by a wrong manifest: `decide` reports what is wrong, looks again at each change, and
makes the objects of a run again whose manifest changes before its workers train.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.document import to_document
from dlion_api.errors import Problem
from dlion_api.spec import Job
from dlion_api.status import Reason
from dlion_operator import children
from dlion_operator.children.pods import owner_of
from dlion_operator.cluster import Kind
from dlion_operator.decisions import Action, CloseRun, Delete
from dlion_operator.findings import joined
from dlion_operator.observed import Observed
from dlion_operator.pod_security import restricted_violations
from dlion_operator.run_ends import has_trained, just_opened
from dlion_operator.runs import Run
from dlion_operator.settings import Settings
from dlion_operator.situations import Finding, Situation
from dlion_operator.tidying import without_objects

_NOT_IN_OBJECTS = (
    "runId", "suspend", "managedBy", "activeDeadlineSeconds", "ttlSecondsAfterFinished",
    "checkpoint",
)  # fmt: skip
"""Fields that act on a run as it is; so do the workers of a group."""
MOST_FIELDS = 3


def manifest_digest(job: Job) -> str:
    """Of what a run's objects are made from.

    Without fields that stand at their default: a newer CRD or operator, which may have more of
    them, leaves a waiting run alone.
    """
    spec = to_document(job.spec, without_defaults=True)
    for name in _NOT_IN_OBJECTS:
        spec.pop(name, None)
    for site in spec["sites"]:
        for group in site["groups"]:
            group.pop("workers", None)
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def is_corrected(run: Run, seen: Observed) -> bool:
    """Whether the manifest has changed since this run's Jobs were made, and nobody has trained."""
    made_from = run.manifest_digest
    if not made_from or made_from == manifest_digest(run.job):
        return False
    return not has_trained(run, seen) and not just_opened(run, seen)


def made_again(run: Run) -> Iterator[Action]:
    """The run's objects go, but for its claim; the next look makes them from the new manifest."""
    yield CloseRun()  # workers of the new manifest have another hash
    for view in run.jobs.values():
        yield Delete(Kind.JOB, view.name, view.uid)
    yield from without_objects(run.job.key)


CORRECTED = Finding(
    Situation.WAITING,
    Reason.WORKERS_STARTING,
    "the manifest has changed before the workers train: the run's objects are made again",
)


def wrong_template(run: Run, seen: Observed, settings: Settings) -> str:
    """Why no pod can be made from the manifest's podTemplate; empty: it can."""
    wrong: set[str] = set()
    try:
        for group in run.groups:
            made = children.worker_job(run.job, group, settings, owner_of(seen.document))
            wrong |= set(restricted_violations(made["spec"]["template"]["spec"]))
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        # It is free in form for us; the API server would say more, had it the whole of it.
        return f"podTemplate has not the form of a pod template: {error}"
    if not wrong:
        return ""
    return f"podTemplate does not keep to pod security `restricted`: {'; '.join(sorted(wrong))}"


def unreadable(error: Exception, seen: Observed, run_id: str) -> Finding:
    """A manifest that this operator cannot read."""
    words = [str(error)]
    if any(_run_of(job) == run_id for job in seen.jobs):
        words.insert(0, f"run {run_id} goes on; this operator cannot read the manifest")
    return Finding(Situation.STUCK, Reason.INVALID_SPEC, joined(words))


def _run_of(document: Mapping[str, Any]) -> str:
    return str((document["metadata"].get("labels") or {}).get(names.RUN_LABEL, ""))


def ignored_fields(unknown: list[Problem]) -> str:
    """That fields are ignored which a newer CRD has; empty: there are none."""
    if not unknown:
        return ""
    paths = [problem.path for problem in unknown[:MOST_FIELDS]]
    more = f" and {len(unknown) - MOST_FIELDS} more" if len(unknown) > MOST_FIELDS else ""
    return (
        f"this operator does not know {', '.join(paths)}{more} and ignores it; the CRD is newer:"
        " upgrade the operator"
    )
