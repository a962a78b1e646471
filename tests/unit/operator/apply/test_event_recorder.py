"""Test the events that the operator posts on a job, against an API server in memory.

An equal event is not posted again within a minute; a different one is. A refused event is dropped.
An event that cannot be posted now is returned, together with all that follow it.

Left out: which events exist (test_decide), and that a real server accepts them (tests/cluster).
"""

from __future__ import annotations

import asyncio

import pytest

from dlion_operator.apply.event_recorder import EventRecorder
from dlion_operator.kubernetes.client import Document, RequestRefusedError, ServerError
from dlion_operator.plan.decisions import JobEvent
from operator_in_memory import KeptObjects
from operator_world import dlion_job

LOST = JobEvent("PeerLost", "worker 1", "Warning")
SAVED = JobEvent("CheckpointSaved", "saved")


def posted(cluster: KeptObjects, *events: JobEvent) -> list[JobEvent]:
    """Post these events and return those that must wait."""
    recorder = EventRecorder(cluster)  # type: ignore[arg-type] # enough of a client
    return asyncio.run(recorder.post_all(dlion_job(), events))


def test_an_equal_event_is_posted_once() -> None:
    cluster = KeptObjects()
    other = JobEvent("PeerLost", "worker 2", "Warning")
    assert posted(cluster, LOST, LOST, other, LOST) == []
    assert cluster.requests == [("create", "Event")] * 2


@pytest.mark.parametrize(
    ("error", "waiting"),
    [(RequestRefusedError("no", 403), []), (ServerError("later"), [LOST, SAVED])],
)
def test_a_refused_event_is_dropped_and_an_unanswered_one_waits(
    error: Exception, waiting: list[JobEvent]
) -> None:
    cluster = KeptObjects()

    def refuse(_verb: str, _document: Document) -> None:
        raise error

    cluster.refuse = refuse
    assert posted(cluster, LOST, SAVED) == waiting
