"""The size of each group at each site when a run began, as stored on its Jobs. Pure.

Counted ranks follow from these sizes. They may change during the run, so a restarted operator needs
the initial ones.
"""

import json
from collections.abc import Mapping
from dataclasses import replace

from dlion_api.bounds import MAX_WORKERS_PER_GROUP
from dlion_api.spec import Job

GroupSizes = Mapping[str, Mapping[str, int]]
"""Site → group → workers."""


def to_json(job: Job) -> str:
    """Encode that job's group sizes for an annotation, in at most about 16 KB."""
    counts = {
        site.name: {group.name: group.workers for group in site.groups} for site in job.spec.sites
    }
    return json.dumps(counts, separators=(",", ":"))


def from_json(text: str) -> GroupSizes:
    """Decode the output of `to_json`. Annotations can be edited: return {} for anything else."""
    try:
        counts: GroupSizes = json.loads(text)
        return {
            site: {
                group: count
                for group, count in groups.items()
                if type(count) is int and 0 < count <= MAX_WORKERS_PER_GROUP
            }
            for site, groups in counts.items()
        }
    except (ValueError, AttributeError, RecursionError):
        return {}


def with_group_sizes(job: Job, counts: GroupSizes) -> Job:
    """Return the job with these sizes; other groups keep theirs."""
    sites = tuple(
        replace(
            site,
            groups=tuple(
                replace(group, workers=counts.get(site.name, {}).get(group.name) or group.workers)
                for group in site.groups
            ),
        )
        for site in job.spec.sites
    )
    return replace(job, spec=replace(job.spec, sites=sites))
