"""`spec.sites`: where a job runs, and the number and resources of its workers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from dlion_api.bounds import (
    GROUP_NAME_LENGTH,
    IMAGE_LENGTH,
    LABEL_FORM,
    MAX_GROUPS_PER_SITE,
    MAX_WORKERS_PER_GROUP,
    SITE_NAME_LENGTH,
)
from dlion_api.document import Limits, optional, setting

LabelValue = Annotated[str, Limits(max_length=63)]


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources of each worker's container, as in a pod."""

    requests: Mapping[str, str] = setting(
        "amounts guaranteed to a worker; of a device (nvidia.com/gpu) also the limit.",
        default={},
        quantity=True,
        max_items=16,
    )
    limits: Mapping[str, str] = setting("upper limits.", default={}, quantity=True, max_items=16)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Workers of one site with equal resources, image and pods."""

    name: str = setting("name of the group.", **LABEL_FORM, max_length=GROUP_NAME_LENGTH)
    workers: int = setting(
        "number of workers.",
        minimum=1,
        maximum=MAX_WORKERS_PER_GROUP,
        hashed=False,
    )
    image: str = setting(
        "container image; empty: trainer.image, else the chart's. A change takes effect in the"
        " next run.",
        default="",
        max_length=IMAGE_LENGTH,
        hashed=False,
    )
    resources: Resources = setting(
        "resources of each worker. A change takes effect in the next run.",
        default=Resources(),
        hashed=False,
    )
    node_selector: Mapping[str, LabelValue] = setting(
        "labels of its nodes. A change takes effect in the next run.",
        default={},
        max_items=16,
        hashed=False,
    )
    pod_template: Mapping[str, Any] | None = optional(
        "metadata and spec merged into its pods, after the job's podTemplate. A change takes"
        " effect in the next run.",
        hashed=False,
    )


@dataclass(frozen=True, kw_only=True)
class Site:
    """One micro-cloud; its operator uses the entry with its name."""

    name: str = setting("name of the site.", **LABEL_FORM, max_length=SITE_NAME_LENGTH)
    groups: tuple[Group, ...] = setting(
        "groups of equal workers; each is one Indexed Job.",
        key="name",
        min_items=1,
        max_items=MAX_GROUPS_PER_SITE,
    )


WORKERS_CEL = "self.sites.map(s, s.groups.map(g, g.workers).sum()).sum()"
"""`workers_of` in CEL, relative to a spec."""


def workers_of(sites: tuple[Site, ...]) -> int:
    """Return the number of workers over all sites and groups."""
    return sum(group.workers for site in sites for group in site.groups)
