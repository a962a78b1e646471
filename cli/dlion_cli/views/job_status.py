"""Reads a job's document from a cluster; any field may be missing or unknown.

Called by the commands that show jobs. Other versions of the operator may write other fields than
`dlion_api.status`.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from dlion_api.cluster_names import MULTIKUEUE, QUEUE_LABEL
from dlion_api.exit_codes import ExitCode
from dlion_api.status_names import ACCURACY, R_SQUARED, ConditionType, Reason, is_of_program
from dlion_cli.cluster.documents import mapping_of, mappings_in
from dlion_cli.terminal.formatting import UNKNOWN, format_remaining, printable

TO_TARGET: Final = "secondsToTarget"
MAX_FIGURE: Final = 1e9
_TIME_FIGURE: Final = re.compile(r"[a-z]+Fraction|waitedFor(Fraction|Rank)")
FAILURE_CODES: Final = {
    Reason.INVALID_SPEC: ExitCode.SPEC,
    Reason.PROGRAM_FAILED: ExitCode.PROGRAM,
    Reason.DEADLINE_EXCEEDED: ExitCode.DEADLINE,
    Reason.MODEL_LOST: ExitCode.MODEL_LOST,
    Reason.ENDED_EARLY: ExitCode.ENDED_EARLY,
    Reason.PARTIAL: ExitCode.PARTIAL,
}


@dataclass(frozen=True)
class ConditionView:
    """One condition, as text."""

    type: str
    status: str
    reason: str
    message: str
    since: str

    @property
    def is_true(self) -> bool:
        return self.status == "True"


class JobStatus:
    """The content of one job's document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        self._metadata = metadata = mapping_of(document.get("metadata"))
        self._spec = spec = mapping_of(document.get("spec"))
        self._status = status = mapping_of(document.get("status"))
        self._trainer = mapping_of(status.get("trainerStatus"))
        self._links = mapping_of(status.get("links"))
        self.name = text(metadata.get("name"))
        self.namespace = text(metadata.get("namespace"))
        self.uid = str(metadata.get("uid", ""))
        """Distinguishes the job from a later one of the same name."""
        self.version = str(metadata.get("resourceVersion", ""))
        self.finalizers = [text(each) for each in metadata.get("finalizers") or ()]
        self.run_id = text(spec.get("runId"))
        number = mapping_of(status.get("attempt")).get("number")
        self.attempt = number if isinstance(number, int) else 1
        """Which attempt at its run, from 1."""
        self.is_suspended = spec.get("suspend") is True
        """Whether the manifest requests suspension."""
        self.was_ever_observed = status.get("observedGeneration", -1) != -1
        """Whether an operator has observed any generation."""
        self.state = text(status.get("state"))
        self.ready_sites = text(status.get("readySites"))
        """Participating sites of all sites, such as 2/3."""
        self.ready_workers = text(status.get("readyWorkers"))
        """Training workers of all workers, such as 5/6."""
        self.steps_per_second = text(status.get("stepsPerSecond"))
        """Per worker."""

    @property
    def is_dispatched(self) -> bool:
        """Whether Kueue's MultiKueue runs a copy of it in another cluster."""
        labels = mapping_of(self._metadata.get("labels"))
        return bool(self._spec.get("managedBy") == MULTIKUEUE and labels.get(QUEUE_LABEL))

    @property
    def is_observed(self) -> bool:
        """Whether an operator has observed the current generation."""
        if self.is_dispatched:  # the status has the generation of the copy
            return bool(self.was_ever_observed)
        observed = self._status.get("observedGeneration")
        generation = self._metadata.get("generation")
        return isinstance(observed, int) and isinstance(generation, int) and observed >= generation

    @property
    def progress_percentage(self) -> int | None:
        value = self._trainer.get("progressPercentage")
        return min(100, max(0, value)) if isinstance(value, int) else None

    @property
    def progress(self) -> str:
        """The percentage, as text."""
        return UNKNOWN if self.progress_percentage is None else f"{self.progress_percentage} %"

    @property
    def remaining_s(self) -> int | None:
        value = self._trainer.get("estimatedRemainingSeconds")
        return value if isinstance(value, int) else None

    def eta(self, passed_s: float = 0.0) -> str:
        """The time that is left, `passed_s` after this status was written, as text."""
        ends = re.fullmatch(r"(\d{1,10}) to (\d{1,10})", self._all_metrics.get(TO_TARGET, ""))
        target_s = (float(ends[1]) - passed_s, float(ends[2]) - passed_s) if ends else None
        left_s = None if self.remaining_s is None else self.remaining_s - passed_s
        stop = mapping_of(mapping_of(self._spec.get("trainer")).get("stop"))
        return format_remaining(left_s, target_s, has_target="targetAccuracy" in stop)

    @property
    def metrics(self) -> dict[str, str]:
        """Values such as loss and accuracy, by name."""
        return {
            name: value
            for name, value in self._all_metrics.items()
            if name != TO_TARGET and not _TIME_FIGURE.fullmatch(name)
        }

    @property
    def accuracy_name(self) -> str:
        """What the metric `accuracy` is; empty or unknown: an accuracy."""
        return R_SQUARED if self._trainer.get("accuracyName") == R_SQUARED else ACCURACY

    @property
    def named_metrics(self) -> dict[str, str]:
        """As `metrics`, with R² by that name."""
        return {
            self.accuracy_name if name == ACCURACY else name: value
            for name, value in self.metrics.items()
        }

    @property
    def policy(self) -> str:
        """Policy of the exchange; empty: unknown."""
        return text(mapping_of(self._spec.get("exchange")).get("policy"), "")

    @property
    def program_metrics(self) -> dict[str, str]:
        """Metrics of the program's `compile()`, by name."""
        return {name: value for name, value in self._all_metrics.items() if is_of_program(name)}

    @property
    def time_figures(self) -> dict[str, float]:
        """Shares of the workers' time, and the peer that was waited for most, by metric."""
        found = {}
        for name, value in self._all_metrics.items():
            with suppress(ValueError):
                number = float(value)
                if _TIME_FIGURE.fullmatch(name) and 0 <= number <= MAX_FIGURE:
                    found[name] = number
        return found

    @property
    def _all_metrics(self) -> dict[str, str]:
        items = mappings_in(self._trainer.get("metrics"))
        return {text(item.get("name")): text(item.get("value")) for item in items}

    @property
    def sites(self) -> list[tuple[str, str, str, str]]:
        """Name, state, workers and message of all sites; from the manifest without a status."""
        reported = mappings_in(self._status.get("sites"))
        if not reported:
            return [
                (text(site.get("name")), UNKNOWN, f"{UNKNOWN}/{_workers(site)}", "")
                for site in mappings_in(self._spec.get("sites"))
            ]
        return [
            (
                text(site.get("name")),
                text(site.get("state")),
                f"{text(site.get('readyWorkers', 0))}/{text(site.get('workers'))}",
                text(site.get("message"), ""),
            )
            for site in reported
        ]

    @property
    def conditions(self) -> list[ConditionView]:
        return [
            ConditionView(
                type=text(item.get("type")),
                status=text(item.get("status")),
                reason=text(item.get("reason")),
                message=text(item.get("message"), ""),
                since=str(item.get("lastTransitionTime", "")),
            )
            for item in mappings_in(self._status.get("conditions"))
        ]

    def condition(self, type_: str) -> ConditionView | None:
        return next((each for each in self.conditions if each.type == type_), None)

    @property
    def links(self) -> str:
        """Connected links of all links, and the slowest pair of sites."""
        if not self._links:
            return UNKNOWN
        slowest = text(self._links.get("slowest"), "")
        return f"{_counts(self._links)}, slowest {slowest}" if slowest else _counts(self._links)

    @property
    def link_pairs(self) -> list[tuple[str, str, str]]:
        """Names, links and Mbit/s of each ordered pair of sites."""
        return [
            (text(pair.get("pair")), _counts(pair), text(pair.get("megabitsPerSecond") or None))
            for pair in mappings_in(self._links.get("pairs"))
        ]

    @property
    def outcome(self) -> ConditionView | None:
        """The condition that ended the manifest's run; None while it runs."""
        ran = self._status.get("runId")
        if ran and ran != self._spec.get("runId"):
            return None  # the status still describes the previous run
        for type_ in (ConditionType.SUCCEEDED, ConditionType.FAILED):
            condition = self.condition(type_)
            if condition is not None and condition.is_true:
                return condition
        return None

    def age(self, now: datetime) -> str:
        """Time since creation, formatted as by kubectl."""
        return age_of(str(self._metadata.get("creationTimestamp", "")), now)


def outcome_exit_code(outcome: ConditionView) -> ExitCode:
    """The exit code of a command that waited for this outcome."""
    if outcome.type == ConditionType.SUCCEEDED:
        return ExitCode.OK
    return next((c for r, c in FAILURE_CODES.items() if r == outcome.reason), ExitCode.FAILED)


def age(seconds: float) -> str:
    """A time span in one or two units, formatted as by kubectl.

    >>> [age(s) for s in (-3, 42, 150, 600, 3 * 3600 + 5 * 60, 90 * 3600, 400 * 86400)]
    ['0s', '42s', '2m30s', '10m', '3h5m', '3d18h', '400d']
    """
    left = max(0, int(seconds))
    if left < 120:
        return f"{left}s"
    minutes, hours, days = left // 60, left // 3600, left // 86400
    if minutes < 10:
        return f"{minutes}m{left % 60}s" if left % 60 else f"{minutes}m"
    if hours < 3:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    return f"{days}d{hours % 24}h" if days < 8 and hours % 24 else f"{days}d"


def age_of(value: str, now: datetime) -> str:
    """The time since a Kubernetes time."""
    try:
        time = datetime.fromisoformat(value)
    except ValueError:
        return UNKNOWN
    return age((now - (time if time.tzinfo else time.replace(tzinfo=UTC))).total_seconds())


def text(value: object, absent: str = UNKNOWN) -> str:
    """The value as one printable line."""
    return absent if value is None or value == "" else printable(str(value))


def _counts(links: Mapping[str, Any]) -> str:
    return f"{text(links.get('connected'))}/{text(links.get('expected'))}"


def _workers(site: Mapping[str, Any]) -> int:
    counts = (group.get("workers", 1) for group in mappings_in(site.get("groups")))
    return sum(count for count in counts if isinstance(count, int))
