"""The status of a `DLionJob`: what `kubectl get dlionjob` at any site shows of the whole job.

The CRD's status schema is made from it. Small on purpose: telemetry goes to metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlion_api.document import setting
from dlion_api.spec.bounds import INT32_MAX, MOST_SITES, RUN_ID_LENGTH, SITE_NAME_LENGTH
from dlion_api.status.conditions import TIME_PATTERN, TIME_WORDS, Condition

SHORT = 64
MOST_PAIRS = 256
"""All of up to 16 sites."""
HASH_LENGTH = 64


@dataclass(frozen=True, kw_only=True)
class SiteStatus:
    """One site, as the writing site's operator knows it."""

    name: str = setting("name of the site.", max_length=SITE_NAME_LENGTH)
    state: Literal["Ready", "Starting", "Absent", "Unreachable", "Refused"] = setting(
        "whether it takes part; Absent: its operator does not have this run; Unreachable: its"
        " operator is not heard; Refused: its manifest differs."
    )
    workers: int = setting("workers asked for there.", minimum=0, maximum=INT32_MAX)
    ready_workers: int = setting(
        "workers that train there.", default=0, minimum=0, maximum=INT32_MAX
    )
    spec_hash: str = setting("hash of its manifest.", default="", max_length=HASH_LENGTH)
    iteration: int | None = setting(
        "of its foremost worker.", default=None, minimum=0, maximum=2**53
    )
    samples_per_second: str = setting("of its workers together.", default="", max_length=SHORT)
    last_heartbeat_time: str | None = setting(
        "when its operator was last heard, by this site's clock and to the minute.",
        default=None,
        pattern=TIME_PATTERN,
        pattern_words=TIME_WORDS,
        max_length=SHORT,
    )
    message: str = setting("more, for people.", default="", max_length=1024)


@dataclass(frozen=True, kw_only=True)
class PairStatus:
    """The links from one site's workers to another's, as the first one's operator says."""

    pair: str = setting(
        "the two sites, as in `plant-a to plant-b`.", max_length=2 * SITE_NAME_LENGTH + 4
    )
    connected: int = setting("links that are up.", minimum=0, maximum=INT32_MAX)
    expected: int = setting("links that there should be.", minimum=0, maximum=INT32_MAX)
    megabits_per_second: str = setting(
        "what the slowest of them carries, to a tenth; empty: not known.",
        default="",
        max_length=SHORT,
    )


@dataclass(frozen=True, kw_only=True)
class LinkStatus:
    """The links between workers, taken together."""

    connected: int = setting("links that are up.", minimum=0, maximum=INT32_MAX)
    expected: int = setting("links that there should be.", minimum=0, maximum=INT32_MAX)
    slowest: str = setting(
        "the pair of sites with the least bandwidth.", default="", max_length=2 * SHORT
    )
    pairs: tuple[PairStatus, ...] = setting(
        "from each site to each other; of very many those with links down, and the slowest.",
        default=(),
        key="pair",
        max_items=MOST_PAIRS,
    )


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One figure of the training, as Kubeflow Trainer has it."""

    name: str = setting("name of the figure.", min_length=1, max_length=SHORT)
    value: str = setting("its value as text.", max_length=SHORT)


@dataclass(frozen=True, kw_only=True)
class TrainerStatus:
    """How far training has come; fields are named as Kubeflow Trainer names them."""

    progress_percentage: int | None = setting(
        "of the way to the end; absent where the end is not known.",
        default=None,
        minimum=0,
        maximum=100,
        unit="percent",
    )
    estimated_remaining_seconds: int | None = setting(
        "time to the end.", default=None, minimum=0, maximum=INT32_MAX, unit="seconds"
    )
    metrics: tuple[Metric, ...] = setting(
        "loss, accuracy and the like.", default=(), key="name", max_items=32
    )
    last_updated_time: str | None = setting(
        "when this was written.",
        default=None,
        pattern=TIME_PATTERN,
        pattern_words=TIME_WORDS,
        max_length=SHORT,
    )


@dataclass(frozen=True, kw_only=True)
class Status:
    """Everything that the operator says of a job."""

    observed_generation: int = setting(
        "generation of the manifest that this was said of; -1: not looked at yet.",
        default=-1,
        minimum=-1,
        maximum=2**53,
    )
    state: str = setting("one word, for the column; derived.", default="", max_length=SHORT)
    run_id: str = setting("the run that this was said of.", default="", max_length=RUN_ID_LENGTH)
    spec_hash: str = setting("hash of this site's manifest.", default="", max_length=HASH_LENGTH)
    training_start_time: str | None = setting(
        "when this site's workers were first seen to train in this run; until then every field of"
        " the spec may change, and from then on most may not.",
        default=None,
        pattern=TIME_PATTERN,
        pattern_words=TIME_WORDS,
        max_length=SHORT,
    )
    conditions: tuple[Condition, ...] = setting(
        "what holds of the job.", default=(), key="type", max_items=32
    )
    sites: tuple[SiteStatus, ...] = setting(
        "the sites of the job.", default=(), key="name", max_items=MOST_SITES
    )
    ready_sites: str = setting("sites that take part, of all.", default="", max_length=SHORT)
    ready_workers: str = setting("workers that train, of all.", default="", max_length=SHORT)
    steps_per_second: str = setting("steps of a worker.", default="", max_length=SHORT)
    links: LinkStatus | None = setting("the links between workers.", default=None)
    trainer_status: TrainerStatus | None = setting("how far training has come.", default=None)


FRESH = {"observedGeneration": -1}
"""The default that the CRD gives a new object, so that kstatus does not call it Current."""
