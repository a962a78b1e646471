"""Test the events that `dlion events -w` follows for a long time.

Left out: a server, and Ctrl-C (test_describe.py).
"""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from dlion_cli.cluster.cluster_jobs import RelatedEvents
from dlion_cli.views.event_table import follow_events

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlion_cli.cluster.cluster_jobs import JobClient

JOB = {"metadata": {"namespace": "default", "name": "digits", "uid": "u"}}
EARLIER = {"involvedObject": {"kind": "DLionJob", "name": "digits", "uid": "before"}}
EVENTS = 40
"""The server keeps so many."""


def event(number: int) -> dict[str, Any]:
    about = {"kind": "DLionJob", "namespace": "default", "name": "digits"}
    metadata = {"uid": f"{number:036}", "resourceVersion": f"{number:012}"}
    return {"metadata": metadata, "involvedObject": about}


@dataclass
class ChangingEvents:
    """Half of the events are new at each request. By each watch comes one more, and one of an
    earlier job of that name."""

    first: int = 0

    def related_events(self, _job: object, _run_id: str) -> RelatedEvents:
        self.first += EVENTS // 2
        return RelatedEvents([event(self.first + i) for i in range(EVENTS)], "1")

    def watch_events(self, _version: str, *, within_s: int) -> Iterator[dict[str, Any]]:
        assert within_s > 0
        yield {"type": "ADDED", "object": event(self.first - 1) | EARLIER}
        yield {"type": "ADDED", "object": event(self.first + EVENTS)}


def test_events_that_the_cluster_has_dropped_take_no_memory() -> None:
    jobs = cast("JobClient", ChangingEvents())
    followed = follow_events(jobs, JOB, "1", on_disconnect=lambda _: None, sleep=lambda _: None)
    numbers = (int(each["metadata"]["uid"]) for each in followed)
    expected = range(EVENTS // 2, EVENTS // 2 + 200)
    assert list(itertools.islice(numbers, 200)) == [*expected], "each appears once"
    tracemalloc.start()
    try:
        for _ in itertools.islice(followed, 20_000):
            pass
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown_bytes < 20 * 20_000
