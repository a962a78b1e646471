"""`spec.sites`: where a job runs and on how many workers of which kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dlion_api.document import setting
from dlion_api.spec.bounds import (
    GROUP_NAME_LENGTH,
    LABEL,
    LABEL_WORDS,
    MOST_GROUPS,
    MOST_WORKERS,
    SITE_NAME_LENGTH,
    LabelValue,
)


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What each worker's container asks for, as in a pod."""

    requests: Mapping[str, str] = setting(
        "what a worker is sure to get.", default={}, quantity=True, max_items=16
    )
    limits: Mapping[str, str] = setting(
        "what a worker never exceeds.", default={}, quantity=True, max_items=16
    )


@dataclass(frozen=True, kw_only=True)
class Group:
    """Equal workers of one site."""

    name: str = setting(
        "name of the group within its site.",
        pattern=LABEL,
        pattern_words=LABEL_WORDS,
        max_length=GROUP_NAME_LENGTH,
    )
    workers: int = setting(
        "number of workers. Sites may differ in it while a change is rolled out.",
        minimum=1,
        maximum=MOST_WORKERS,
        hashed=False,
    )
    resources: Resources = setting(
        "resources of each worker. A change acts on the next run.",
        default=Resources(),
        hashed=False,
    )
    node_selector: Mapping[str, LabelValue] = setting(
        "labels of the nodes that will do. A change acts on the next run.",
        default={},
        max_items=16,
        hashed=False,
    )


@dataclass(frozen=True, kw_only=True)
class Site:
    """One micro-cloud; the operator there acts on the entry that bears its name."""

    name: str = setting(
        "name of the site.",
        pattern=LABEL,
        pattern_words=LABEL_WORDS,
        max_length=SITE_NAME_LENGTH,
    )
    groups: tuple[Group, ...] = setting(
        "unequal machines: each group becomes one Indexed Job.",
        key="name",
        min_items=1,
        max_items=MOST_GROUPS,
    )


WORKERS_CEL = "self.sites.map(s, s.groups.map(g, g.workers).sum()).sum()"
"""Of a spec, in CEL: what `workers_of` yields."""


def workers_of(sites: tuple[Site, ...]) -> int:
    """Number of workers over all sites and groups."""
    return sum(group.workers for site in sites for group in site.groups)
