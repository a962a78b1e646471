"""A queued run's Workload at a site, by which Kueue admits all of its pods at once.

Each group and the keeper is one of its pod sets. Source: Kueue's API kueue.x-k8s.io/v1beta2.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.names import JobKey
from dlion_api.spec import Job
from dlion_api.spec.sites import Group
from dlion_operator.children.keeper import keeper_objects
from dlion_operator.children.pods import metadata_of
from dlion_operator.children.worker_jobs import worker_job
from dlion_operator.kubernetes.client import Document, Kind
from dlion_operator.model.settings import Settings
from dlion_operator.model.workload_view import PriorityOfQueue

KEEPER_POD_SET = names.KEEPER


def group_pod_set(group: str) -> str:
    """Return the name of a group's pod set, which is never the keeper's.

    >>> group_pod_set("keeper")
    'worker-keeper'
    """
    return f"{names.WORKER}-{group}"


def workload_name(key: JobKey, labels: Mapping[str, str], managed_by: str) -> str:
    """Return the name of the Workload that admits a job's run in this cluster."""
    if managed_by == names.MULTIKUEUE:
        return names.dispatched_workload_name(key.name)
    return labels.get(names.QUEUE_PREBUILT_LABEL) or names.run_name(key)


def rendered_site(job: Job, site: str) -> str:
    """The site for which an operator of `site` renders the job's pods: its own, but for a job that
    MultiKueue dispatches the job's, whose pods run in another cluster."""
    return job.spec.sites[0].name if job.spec.managed_by == names.MULTIKUEUE else site


def workload(
    job: Job,
    groups: Sequence[Group],
    settings: Settings,
    owner: Mapping[str, Any],
    priority: PriorityOfQueue | None,
    kept: Mapping[str, Document] = MappingProxyType({}),
) -> Document:
    """Return the Workload for these groups of the site. `kept`: pod templates of groups whose Jobs
    were made from another manifest.

    Raises: ValueError, TypeError or AttributeError if a podTemplate is malformed.
    """
    pod_sets = [
        _pod_set(
            group_pod_set(each.name),
            each.workers,
            kept.get(each.name) or _template(worker_job(job, each, settings, owner)),
        )
        for each in groups
    ]
    spec: Document = {
        "queueName": job.metadata.labels.get(names.QUEUE_LABEL, ""),
        "podSets": [
            *pod_sets,
            _pod_set(KEEPER_POD_SET, 1, _template(_keeper(job, settings, owner))),
        ],
    }
    if priority is not None:
        spec |= {
            "priority": priority.value,
            "priorityClassRef": {
                "group": priority.group, "kind": priority.kind, "name": priority.name
            },
        }  # fmt: skip
    name = workload_name(job.key, job.metadata.labels, job.spec.managed_by)
    metadata = metadata_of(name, job, owner, site=settings.site)
    # Kueue's messages on preemptions name the job by it.
    metadata["labels"] |= {names.QUEUE_OWNER_LABEL: owner["uid"]} if owner["uid"] else {}
    metadata["annotations"] = {names.WORKLOAD_ANNOTATION: _digest(spec)}
    return Kind.WORKLOAD.document(metadata, spec=spec)


def _pod_set(name: str, count: int, template: Document) -> Document:
    return {"name": name, "count": count, "template": template}


def _template(made: Document) -> Document:
    return dict(made["spec"]["template"])


def pod_priority_class(job: Job, groups: Sequence[Group], settings: Settings) -> str:
    """Return the priority class of the first pod set whose pods have one. Empty: none has.

    Raises: as `workload`.
    """
    owner: Document = {}
    made = [worker_job(job, group, settings, owner) for group in groups]
    specs = (each["spec"]["template"]["spec"] for each in (*made, _keeper(job, settings, owner)))
    found = (spec.get("priorityClassName") for spec in specs)
    return next((name for name in found if isinstance(name, str) and name), "")


def _keeper(job: Job, settings: Settings, owner: Mapping[str, Any]) -> Document:
    made = keeper_objects(job, settings, owner)
    return next(each for each in made if Kind.of(each) is Kind.DEPLOYMENT)


def _digest(spec: Mapping[str, Any]) -> str:
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
