"""One Indexed Job of ours, as the API has it, and how it writes times and indexes. Pure.

Made from documents by whoever reads them; `observed` holds what else there is of a job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.spec import BY_GROUP, RANKS_ANNOTATION

Document = Mapping[str, Any]


class JobView:
    """One Indexed Job of ours."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.name = str(document["metadata"]["name"])
        self.uid = str(document["metadata"].get("uid", ""))
        self.labels: Mapping[str, str] = document["metadata"].get("labels") or {}
        self.annotations: Mapping[str, str] = document["metadata"].get("annotations") or {}
        self._spec: Document = document.get("spec") or {}
        self._status: Document = document.get("status") or {}

    @property
    def group(self) -> str:
        return self.labels.get(names.GROUP_LABEL, "")

    @property
    def run_id(self) -> str:
        return self.labels.get(names.RUN_LABEL, "")

    @property
    def workers(self) -> int:
        """How many it is to run."""
        return int(self._spec.get("parallelism") or 0)

    @property
    def first_workers(self) -> int:
        """How many it was made with: what its pods were told of their group."""
        text = str(self.annotations.get(names.WORKERS_ANNOTATION, ""))
        return int(text) if text.isdecimal() else self.workers

    @property
    def ranks_by_group(self) -> bool:
        """How its workers are numbered: a run goes on as it began, whichever operator made it."""
        return self.annotations.get(RANKS_ANNOTATION) == BY_GROUP

    @property
    def spec_hash(self) -> str:
        """Of the manifest that it was made from, by the operator that made it."""
        return str(self.annotations.get(names.SPEC_HASH_ANNOTATION, ""))

    @property
    def suspended(self) -> bool:
        return bool(self._spec.get("suspend"))

    @property
    def queued(self) -> bool:
        """Whether somebody else says when it starts."""
        return names.QUEUE_LABEL in self.labels

    @property
    def is_emptied(self) -> bool:
        """Whether it waits out a break in its queue, or is over, with no pods to run."""
        return self.queued and not self.workers

    @property
    def completed_indexes(self) -> tuple[int, ...]:
        """Workers that ended well."""
        return tuple(expanded(str(self._status.get("completedIndexes") or "")))

    @property
    def failed_indexes(self) -> tuple[int, ...]:
        """Workers that ended for good."""
        return tuple(expanded(str(self._status.get("failedIndexes") or "")))

    @property
    def over_indexes(self) -> frozenset[int]:
        """Workers that need no pod any more: they ended well, or for good."""
        return frozenset((*self.completed_indexes, *self.failed_indexes))

    @property
    def made_at(self) -> datetime | None:
        """When it was made."""
        return moment(self.document["metadata"].get("creationTimestamp"))

    @property
    def started_at(self) -> datetime | None:
        """When it began to run, or went on after a break; None: it does not run.

        While a Job is suspended, and a moment longer, its `startTime` is that before the break. One
        in a queue is emptied for a break: Kueue may start it then, with nothing to run.
        """
        if self.is_emptied:
            return None
        conditions = self._status.get("conditions") or ()
        halted = any(c.get("type") == "Suspended" and c.get("status") == "True" for c in conditions)
        if self.suspended or halted or (started := moment(self._status.get("startTime"))) is None:
            return None
        # The controller writes it by its own clock, which may be behind the API server's.
        return max(started, self.made_at) if self.made_at else started

    @property
    def ended_at(self) -> datetime | None:
        """When it came to its end; None: it has not."""
        for condition in self._status.get("conditions") or ():
            is_end = condition.get("type") in ("Complete", "Failed")
            if is_end and condition.get("status") == "True":
                return moment(condition.get("lastTransitionTime"))
        return None

    @property
    def failure(self) -> str:
        """In Kubernetes' words, why it failed as a whole; empty: it did not."""
        for condition in self._status.get("conditions") or ():
            if condition.get("type") == "Failed" and condition.get("status") == "True":
                return f"{condition.get('reason', '')}: {condition.get('message', '')}"
        return ""


def expanded(indexes: str) -> Iterator[int]:
    """A Job's way to write indexes, one by one.

    >>> list(expanded("1,3-5"))
    [1, 3, 4, 5]
    """
    for part in filter(None, indexes.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def moment(text: object) -> datetime | None:
    """A time as Kubernetes writes it."""
    if not isinstance(text, str) or not text:
        return None
    return datetime.fromisoformat(text).astimezone(UTC)
