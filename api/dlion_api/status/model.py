"""The status of a `DLionJob`, which describes the whole job at any site.

The CRD's status schema is generated from it. It is small; telemetry goes to metrics.
"""

from dataclasses import dataclass
from typing import Literal

from dlion_api.bounds import INT32_MAX, MAX_PAIRS, MAX_SITES, RUN_ID_LENGTH, SITE_NAME_LENGTH
from dlion_api.document import optional, setting
from dlion_api.protocol.revocation import MAX_REASON_CHARACTERS
from dlion_api.status.conditions import TIME, Condition

SHORT = 64
HASH_LENGTH = 64
MAX_REVOKED = 256


@dataclass(frozen=True, kw_only=True)
class SiteStatus:
    """One site, as known to the operator that writes the status."""

    name: str = setting("name of the site.", max_length=SITE_NAME_LENGTH)
    state: Literal["Ready", "Starting", "Absent", "Unreachable", "Refused"] = setting(
        "whether it takes part; Absent: its operator does not have this run; Unreachable: its"
        " operator cannot be reached; Refused: its manifest differs."
    )
    workers: int = setting("workers requested there.", minimum=0, maximum=INT32_MAX)
    ready_workers: int = setting(
        "workers that train there.", default=0, minimum=0, maximum=INT32_MAX
    )
    spec_hash: str = setting("hash of its manifest.", default="", max_length=HASH_LENGTH)
    iteration: int | None = optional(
        "the highest iteration of its workers.", minimum=0, maximum=2**53
    )
    samples_per_second: str = setting("sum over its workers.", default="", max_length=SHORT)
    last_heartbeat_time: str | None = optional(
        "when its operator last reported, by this site's clock, to the minute.", **TIME
    )
    message: str = setting("more detail.", default="", max_length=1024)


@dataclass(frozen=True, kw_only=True)
class PairStatus:
    """The links from one site's workers to another's, as reported by the first site's operator."""

    pair: str = setting(
        "the two sites, as in `plant-a to plant-b`.", max_length=2 * SITE_NAME_LENGTH + 4
    )
    connected: int = setting("links that are up.", minimum=0, maximum=INT32_MAX)
    expected: int = setting("expected links.", minimum=0, maximum=INT32_MAX)
    megabits_per_second: str = setting(
        "rate of the slowest of them, to a tenth; empty: unknown.", default="", max_length=SHORT
    )


@dataclass(frozen=True, kw_only=True)
class LinkStatus:
    """Summary of the links between workers."""

    connected: int = setting("links that are up.", minimum=0, maximum=INT32_MAX)
    expected: int = setting("expected links.", minimum=0, maximum=INT32_MAX)
    slowest: str = setting(
        "the pair of sites with the least bandwidth.", default="", max_length=2 * SHORT
    )
    pairs: tuple[PairStatus, ...] = setting(
        "from each site to each other; if very many, those with broken links and the slowest.",
        default=(),
        key="pair",
        max_items=MAX_PAIRS,
    )


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One training metric, in the form of Kubeflow Trainer."""

    name: str = setting("name of the metric.", min_length=1, max_length=SHORT)
    value: str = setting("its value as text.", max_length=SHORT)


@dataclass(frozen=True, kw_only=True)
class TrainerStatus:
    """Training progress, with Kubeflow Trainer's field names."""

    progress_percentage: int | None = optional(
        "progress towards the end; absent if the end is unknown.",
        minimum=0,
        maximum=100,
        unit="percent",
    )
    estimated_remaining_seconds: int | None = optional(
        "time to the end.", minimum=0, maximum=INT32_MAX, unit="seconds"
    )
    metrics: tuple[Metric, ...] = setting(
        "loss, accuracy and the like.", default=(), key="name", max_items=32
    )
    accuracy_name: str | None = optional(
        "what the metric `accuracy` is, if it is not an accuracy: `R²` for targets.",
        max_length=SHORT,
    )
    last_updated_time: str | None = optional("when this was written.", **TIME)


@dataclass(frozen=True, kw_only=True)
class AttemptStatus:
    """A later attempt at a run that failed before (`spec.maxRetries`)."""

    number: int = setting("counted from 1.", minimum=2, maximum=INT32_MAX)
    start_time: str = setting("when this attempt begins, or began.", **TIME)
    run_start_time: str = setting("when the first attempt began.", **TIME)
    last_failure: str = setting(
        "reason and message of the end of the attempt before.", default="", max_length=1024
    )


@dataclass(frozen=True, kw_only=True)
class RevokedStatus:
    """A revoked worker or site (`dlion trust revoke`)."""

    name: str = setting(
        "the worker as `site/group-index`, or the site.", min_length=1, max_length=SHORT
    )
    by: str = setting("the site at which it was revoked.", max_length=SITE_NAME_LENGTH)
    effective: bool = setting(
        "whether this site refuses it: a site decides about its own workers for all, about those of"
        " others for itself."
    )
    automatic: bool = setting(
        "whether that site's operator did it (`spec.exchange.quarantine`).", default=False
    )
    reason: str = setting("why, for people.", default="", max_length=MAX_REASON_CHARACTERS)


@dataclass(frozen=True, kw_only=True)
class Status:
    """Everything that the operator reports about a job."""

    observed_generation: int = setting(
        "generation of the manifest that this refers to; -1: not processed yet.",
        default=-1,
        minimum=-1,
        maximum=2**53,
    )
    state: str = setting("one word, for the column; derived.", default="", max_length=SHORT)
    run_id: str = setting("the run that this refers to.", default="", max_length=RUN_ID_LENGTH)
    spec_hash: str = setting("hash of this site's manifest.", default="", max_length=HASH_LENGTH)
    training_start_time: str | None = optional(
        "when this site's workers started to train in this run, or in its latest attempt;"
        " before, every field of the spec may change; afterwards, most may not.",
        **TIME,
    )
    attempt: AttemptStatus | None = optional("the current attempt, from the second on.")
    conditions: tuple[Condition, ...] = setting(
        "the job's conditions.", default=(), key="type", max_items=32
    )
    sites: tuple[SiteStatus, ...] = setting(
        "the sites of the job.", default=(), key="name", max_items=MAX_SITES
    )
    revoked: tuple[RevokedStatus, ...] = setting(
        "revoked workers and sites, by name; if very many, the first.",
        default=(),
        max_items=MAX_REVOKED,
    )
    ready_sites: str = setting("sites that take part, out of all.", default="", max_length=SHORT)
    ready_workers: str = setting("workers that train, out of all.", default="", max_length=SHORT)
    steps_per_second: str = setting("steps per second of a worker.", default="", max_length=SHORT)
    links: LinkStatus | None = optional("the links between workers.")
    trainer_status: TrainerStatus | None = optional("training progress.")


INITIAL_STATUS = {"observedGeneration": -1}
"""The CRD's default status for a new object, so that kstatus does not report it as Current."""
