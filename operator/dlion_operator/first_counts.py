"""How many workers each group of each site had when a run began, as the run's Jobs keep it. Pure.

Where ranks are counted they follow from the counts of all sites. These may change in mid-run, in
the manifest here too: an operator that starts anew has to find those of the beginning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from dlion_api.spec import Job
from dlion_api.spec.bounds import MOST_WORKERS

Counts = Mapping[str, Mapping[str, int]]
"""Site → group → workers."""


def written(job: Job) -> str:
    """That job's counts, for an annotation; at most some 16 KB."""
    counts = {
        site.name: {group.name: group.workers for group in site.groups} for site in job.spec.sites
    }
    return json.dumps(counts, separators=(",", ":"))


def read(text: str) -> Counts:
    """What `written` made; empty where there is nothing of the kind: annotations can be edited."""
    try:
        counts: Counts = json.loads(text)
        return {
            site: {group: count for group, count in groups.items() if _is_count(count)}
            for site, groups in counts.items()
        }
    except (ValueError, AttributeError, RecursionError):
        return {}


def with_counts(job: Job, counts: Counts) -> Job:
    """The job with so many workers in those groups; others as they are."""
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


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_WORKERS
