"""What a job's document in a cluster says, read with patience: any field may be missing or new.

Called by the commands that show jobs. `dlion_api.status` is what our own operator writes; a newer
or a foreign one may write more, and this must show it nonetheless.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from dlion_api.exit_codes import ExitCode
from dlion_api.status import ConditionType, Reason
from dlion_cli.figures import NOT_KNOWN, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

_FAILURES = {
    Reason.INVALID_SPEC: ExitCode.SPEC,
    Reason.PROGRAM_FAILED: ExitCode.PROGRAM,
    Reason.DEADLINE_EXCEEDED: ExitCode.DEADLINE,
    Reason.MODEL_LOST: ExitCode.MODEL_LOST,
    Reason.ENDED_EARLY: ExitCode.ENDED_EARLY,
    Reason.PARTIAL: ExitCode.PARTIAL,
}


@dataclass(frozen=True)
class Said:
    """One condition as it is shown."""

    type: str
    status: str
    reason: str
    message: str
    since: str

    @property
    def holds(self) -> bool:
        """Whether it is True."""
        return self.status == "True"


@dataclass(frozen=True)
class SiteRow:
    """One site as it is shown."""

    name: str
    state: str
    workers: str
    message: str


@dataclass(frozen=True)
class PairRow:
    """The links from one site to another as they are shown."""

    pair: str
    links: str
    mbit_per_s: str


class JobStatus:
    """The words and figures of one document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        self._metadata = _mapping(document.get("metadata"))
        self._spec = _mapping(document.get("spec"))
        self._status = _mapping(document.get("status"))
        self._trainer = _mapping(self._status.get("trainerStatus"))

    @property
    def name(self) -> str:
        """The job's name."""
        return text(self._metadata.get("name"))

    @property
    def namespace(self) -> str:
        """The job's namespace."""
        return text(self._metadata.get("namespace"))

    @property
    def uid(self) -> str:
        """What tells the job from a later one of the same name."""
        return str(self._metadata.get("uid", ""))

    @property
    def version(self) -> str:
        """The resource version."""
        return str(self._metadata.get("resourceVersion", ""))

    @property
    def run_id(self) -> str:
        """The run that the manifest asks for."""
        return text(self._spec.get("runId"))

    @property
    def is_suspended(self) -> bool:
        """Whether the manifest says so."""
        return self._spec.get("suspend") is True

    @property
    def is_seen(self) -> bool:
        """Whether an operator has looked at the manifest as it is now."""
        seen, generation = self._status.get("observedGeneration"), self._metadata.get("generation")
        return bool(isinstance(seen, int) and isinstance(generation, int) and seen >= generation)

    @property
    def was_ever_seen(self) -> bool:
        """Whether an operator has looked at the job at all."""
        return bool(self._status.get("observedGeneration", -1) != -1)

    @property
    def state(self) -> str:
        """The one word."""
        return text(self._status.get("state"))

    @property
    def progress_percentage(self) -> int | None:
        """Of the way to the end."""
        value = self._trainer.get("progressPercentage")
        return min(100, max(0, value)) if isinstance(value, int) else None

    @property
    def remaining_s(self) -> int | None:
        """Seconds to the end."""
        value = self._trainer.get("estimatedRemainingSeconds")
        return value if isinstance(value, int) else None

    @property
    def ready_sites(self) -> str:
        """Sites that take part, of all."""
        return text(self._status.get("readySites"))

    @property
    def ready_workers(self) -> str:
        """Workers that train, of all."""
        return text(self._status.get("readyWorkers"))

    @property
    def steps_per_second(self) -> str:
        """Of a worker."""
        return text(self._status.get("stepsPerSecond"))

    @property
    def metrics(self) -> dict[str, str]:
        """Loss, accuracy and the like."""
        found = (_mapping(item) for item in _items(self._trainer.get("metrics")))
        return {text(item.get("name")): text(item.get("value")) for item in found}

    @property
    def sites(self) -> list[SiteRow]:
        """Each site; those of the manifest where the status names none yet."""
        rows = [_site(_mapping(item)) for item in _items(self._status.get("sites"))]
        if rows:
            return rows
        return [
            SiteRow(text(site.get("name")), NOT_KNOWN, f"{NOT_KNOWN}/{_workers(site)}", "")
            for site in map(_mapping, _items(self._spec.get("sites")))
        ]

    @property
    def conditions(self) -> list[Said]:
        """All that is said of the job."""
        return [
            Said(
                type=text(item.get("type")),
                status=text(item.get("status")),
                reason=text(item.get("reason")),
                message=text(item.get("message"), ""),
                since=str(item.get("lastTransitionTime", "")),
            )
            for item in map(_mapping, _items(self._status.get("conditions")))
        ]

    def condition(self, type_: str) -> Said | None:
        """That condition."""
        return next((said for said in self.conditions if said.type == type_), None)

    @property
    def links(self) -> str:
        """Links that are up, of all, and the slowest pair of sites."""
        links = _mapping(self._status.get("links"))
        if not links:
            return NOT_KNOWN
        slowest = text(links.get("slowest"), "")
        counts = f"{text(links.get('connected'))}/{text(links.get('expected'))}"
        return f"{counts}, slowest {slowest}" if slowest else counts

    @property
    def link_pairs(self) -> list[PairRow]:
        """From each site to each other."""
        links = _mapping(self._status.get("links"))
        return [
            PairRow(
                text(pair.get("pair")),
                f"{text(pair.get('connected'))}/{text(pair.get('expected'))}",
                text(pair.get("megabitsPerSecond") or None),
            )
            for pair in map(_mapping, _items(links.get("pairs")))
        ]

    @property
    def outcome(self) -> Said | None:
        """The condition that ended the run that the manifest asks for; None while it lasts."""
        ran = self._status.get("runId")
        if ran and ran != self._spec.get("runId"):
            return None  # what is said is of the run before
        for type_ in (ConditionType.SUCCEEDED, ConditionType.FAILED):
            said = self.condition(type_)
            if said is not None and said.holds:
                return said
        return None

    def age(self, now: datetime) -> str:
        """Since the job was made, as kubectl has it."""
        made = parsed_time(str(self._metadata.get("creationTimestamp", "")))
        return NOT_KNOWN if made is None else age((now - made).total_seconds())


def exit_code_of(outcome: Said) -> ExitCode:
    """What a command says that waited for this end."""
    if outcome.type == ConditionType.SUCCEEDED:
        return ExitCode.OK
    return next((c for r, c in _FAILURES.items() if r == outcome.reason), ExitCode.FAILED)


def age(seconds: float) -> str:
    """A time span in one or two units, as kubectl has it.

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


def parsed_time(value: str) -> datetime | None:
    """A Kubernetes time; None where it is none."""
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def text(value: object, absent: str = NOT_KNOWN) -> str:
    """A value of the document as one line that a terminal may show."""
    return absent if value is None or value == "" else printable(str(value))


def _site(item: Mapping[str, Any]) -> SiteRow:
    workers = f"{text(item.get('readyWorkers', 0))}/{text(item.get('workers'))}"
    return SiteRow(
        text(item.get("name")), text(item.get("state")), workers, text(item.get("message"), "")
    )


def _workers(site: Mapping[str, Any]) -> int:
    counts = (_mapping(group).get("workers", 1) for group in _items(site.get("groups")))
    return sum(count for count in counts if isinstance(count, int))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
