"""Events on a job, against an API server in memory.

Proves: an equal event is not posted again within a minute, another one is; what is refused is
dropped; what cannot be posted now is returned with all that follow. Left out: which events there
are (test_decide), and that a real server takes them (tests/cluster).
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
    """Post these. Return what has to wait."""
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
def test_what_is_refused_is_dropped_and_what_is_unanswered_waits(
    error: Exception, waiting: list[JobEvent]
) -> None:
    cluster = KeptObjects()

    def refuse(_verb: str, _document: Document) -> None:
        raise error

    cluster.refuse = refuse
    assert posted(cluster, LOST, SAVED) == waiting
