"""`DLionRuntime`: what a site's administrators give to jobs that name it, and what those may ask.

It lies in the namespace of the site's operator. `spec.runtime` of a job names it; each site has its
own by that name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

from dlion_api.bounds import (
    IMAGE_LENGTH,
    LABEL_FORM,
    MAX_GROUPS_PER_SITE,
    MAX_WORKERS_PER_GROUP,
    OBJECT_NAME_FORM,
)
from dlion_api.document import Limits, Rule, optional, setting

Override: TypeAlias = Literal["image", "nodeSelector", "podTemplate"]
NamespaceName = Annotated[str, Limits(**LABEL_FORM, max_length=63)]


@dataclass(frozen=True, kw_only=True)
class RuntimeMetadata:
    """Identifies the runtime; other metadata is ignored."""

    name: str = setting("name of the runtime, as spec.runtime of a job has it.", **OBJECT_NAME_FORM)

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "annotations", "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp",
            "finalizers", "generateName", "generation", "labels", "managedFields", "namespace",
            "ownerReferences", "resourceVersion", "selfLink", "uid",
        }
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RuntimeLimits:
    """What a job may ask at this site. A job that asks more does not start here."""

    max_workers: int | None = optional(
        "most workers of one job at this site, over its groups.",
        minimum=1,
        maximum=MAX_GROUPS_PER_SITE * MAX_WORKERS_PER_GROUP,
    )
    max_resources: Mapping[str, str] = setting(
        "most that one worker's pod may use of each resource, without the sidecar. Its containers"
        " need limits of the named ones.",
        default={},
        quantity=True,
        max_items=16,
    )
    may_override: tuple[Override, ...] = setting(
        "fields that a job and its groups may set themselves.",
        default=get_args(Override),
        unique=True,
        max_items=len(get_args(Override)),
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!self.mayOverride.exists(f, f == 'podTemplate') ||"
            " (self.mayOverride.exists(f, f == 'image') &&"
            " self.mayOverride.exists(f, f == 'nodeSelector'))",
            message="who may set podTemplate sets image and nodeSelector by it",
            holds=lambda it: (
                "podTemplate" not in it.may_override
                or {"image", "nodeSelector"} <= set(it.may_override)
            ),
            reads=("mayOverride",),
            advice="Add image and nodeSelector to mayOverride, or leave podTemplate out.",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class RuntimeSpec:
    """Defaults for the pods of jobs that name the runtime, and limits of what those may ask."""

    image: str = setting(
        "container image of workers and keeper; empty: the chart's. A job's own has priority.",
        default="",
        max_length=IMAGE_LENGTH,
    )
    pod_template: Mapping[str, Any] | None = optional(
        "metadata and spec merged into the workers' pods before the fields of job and group; the"
        " keeper takes what schedules its own."
    )
    namespaces: tuple[NamespaceName, ...] = setting(
        "namespaces whose jobs may use it; empty: all.", default=(), unique=True, max_items=256
    )
    limits: RuntimeLimits = setting("what a job may ask.", default=RuntimeLimits())


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """What a site's administrators give to jobs that name it, and what those may ask."""

    api_version: Literal["dlion.dev/v1alpha1"] = setting("version of this schema.")
    kind: Literal["DLionRuntime"] = setting("kind of document.")
    metadata: RuntimeMetadata = setting("what identifies the runtime.")
    spec: RuntimeSpec = setting("defaults and limits.", default=RuntimeSpec())
