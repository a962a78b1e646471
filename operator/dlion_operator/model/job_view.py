"""Views of Kubernetes objects, and parsers of conditions, times and index lists. Pure."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.names import JobKey
from dlion_api.spec import BY_GROUP, RANKS_ANNOTATION

Document = Mapping[str, Any]


class ObjectView:
    """What is common to the objects of a run."""

    def __init__(self, document: Document) -> None:
        metadata = document["metadata"]
        self.document = document
        self.name = str(metadata["name"])
        self.uid = str(metadata.get("uid", ""))
        self.labels: Mapping[str, str] = metadata.get("labels") or {}
        self.annotations: Mapping[str, str] = metadata.get("annotations") or {}
        self.component = self.labels.get(names.COMPONENT_LABEL, "")
        self.group = self.labels.get(names.GROUP_LABEL, "")
        self.run_id = self.labels.get(names.RUN_LABEL, "")
        self._spec: Document = document.get("spec") or {}
        self._status: Document = document.get("status") or {}

    @property
    def created_at(self) -> datetime | None:
        return parse_time(self.document["metadata"].get("creationTimestamp"))


class WorkerJobView(ObjectView):
    @property
    def workers(self) -> int:
        """Desired number of workers."""
        return int(self._spec.get("parallelism") or 0)

    @property
    def initial_workers(self) -> int:
        """Its initial number of workers, from which its pods got their group's size."""
        text = str(self.annotations.get(names.WORKERS_ANNOTATION, ""))
        return int(text) if text.isdecimal() else self.workers

    @property
    def ranks_by_group(self) -> bool:
        """How its workers are numbered. That never changes during a run."""
        return self.annotations.get(RANKS_ANNOTATION) == BY_GROUP

    @property
    def spec_hash(self) -> str:
        """Hash of its manifest, by the operator that created it."""
        return str(self.annotations.get(names.SPEC_HASH_ANNOTATION, ""))

    @property
    def attempt(self) -> int:
        """Which attempt at its run it is of, from 1."""
        text = str(self.annotations.get(names.ATTEMPT_ANNOTATION, ""))
        return int(text) if text.isdecimal() else 1

    @property
    def suspended(self) -> bool:
        return bool(self._spec.get("suspend"))

    @property
    def queued(self) -> bool:
        """Whether a queue decides when it starts, apart from the run's other Jobs. So it is for the
        Jobs of an older operator, and for those that Kueue's webhook put into a default queue."""
        return names.QUEUE_LABEL in self.labels

    @property
    def is_scaled_to_zero(self) -> bool:
        """Whether it is paused in its queue, or over, and runs no pods."""
        return self.queued and not self.workers

    @property
    def completed_indexes(self) -> tuple[int, ...]:
        return tuple(expand_indexes(str(self._status.get("completedIndexes") or "")))

    @property
    def failed_indexes(self) -> tuple[int, ...]:
        """Workers that failed permanently."""
        return tuple(expand_indexes(str(self._status.get("failedIndexes") or "")))

    @property
    def finished_indexes(self) -> frozenset[int]:
        """Workers that need no pod any more."""
        return frozenset((*self.completed_indexes, *self.failed_indexes))

    @property
    def started_at(self) -> datetime | None:
        """When it started or resumed. None: it does not run.

        A suspended Job keeps the `startTime` from before its suspension, also shortly after it
        resumes. A queued Job is scaled to zero for a pause: Kueue may start it then, with nothing
        to run.
        """
        if self.is_scaled_to_zero:
            return None
        halted = self.suspended or is_true(self.document, "Suspended")
        if halted or (started := parse_time(self._status.get("startTime"))) is None:
            return None
        # The controller's clock may be behind the API server's.
        return max(started, self.created_at) if self.created_at else started

    @property
    def has_start_time(self) -> bool:
        """Whether its status has a start time. Its pod template cannot change then."""
        return bool(self._status.get("startTime"))

    @property
    def ended_at(self) -> datetime | None:
        """When it ended. None: it has not."""
        for type_ in ("Complete", "Failed"):
            if is_true(self.document, type_):
                return parse_time(condition(self.document, type_).get("lastTransitionTime"))
        return None

    @property
    def failure(self) -> str:
        """Why the Job as a whole failed, as Kubernetes reports it. Empty: it did not."""
        return condition_text(self.document, "Failed")


def job_key(document: Document) -> JobKey:
    """The run that a DLionJob requests, whose manifest may be invalid otherwise."""
    metadata, spec = document["metadata"], document.get("spec") or {}
    return JobKey(metadata["namespace"], metadata["name"], str(spec.get("runId", "")))


def generation_of(document: Document) -> int:
    return int(document["metadata"].get("generation") or 0)


def condition(document: Document, type_: str) -> Document:
    """The condition of that type in an object's status. Empty: it has none."""
    conditions = (document.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each.get("type") == type_), {})


def is_true(document: Document, type_: str) -> bool:
    return condition(document, type_).get("status") == "True"


def condition_text(document: Document, type_: str) -> str:
    """Reason and message of that condition. Empty: it is not True."""
    found = condition(document, type_)
    text = f"{found.get('reason', '')}: {found.get('message', '')}"
    return text if found.get("status") == "True" else ""


def expand_indexes(indexes: str) -> Iterator[int]:
    """Expand a Job's list of indexes.

    >>> list(expand_indexes("1,3-5"))
    [1, 3, 4, 5]
    """
    for part in filter(None, indexes.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def parse_time(text: object) -> datetime | None:
    if not isinstance(text, str) or not text:
        return None
    return datetime.fromisoformat(text).astimezone(UTC)


def format_time(time: datetime) -> str:
    """Format a time for Kubernetes: UTC, in whole seconds."""
    return time.replace(microsecond=0).isoformat().replace("+00:00", "Z")
