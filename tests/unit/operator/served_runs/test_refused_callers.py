"""Test which jobs learn of a refused caller.

The job that the caller named learns of it, whichever of its runs is served. A refusal of another
site's operator concerns every job of several sites. Regular refusals are not reported. Text of a
caller cannot control a terminal.

Left out: that coordinator and federation report refusals (tests/cluster/test_hostile_connections).
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dlion_api.names import JobKey
from dlion_api.protocol.refusals import RefusalReason
from dlion_api.spec import Job, load_job
from dlion_operator.coordinator.events import CallRefusedError
from dlion_operator.federation.refusals import FederationRefusalReason as SiteRefusalReason
from dlion_operator.federation.refusals import StreamRefusedError
from dlion_operator.kubernetes.store import ObjectName
from dlion_operator.served_runs.refused_callers import RefusedCallers
from dlion_operator.served_runs.worker_events import WorkerEvents
from local_run import job_document


@dataclass
class Run:
    job: Job
    events: WorkerEvents


class Site:
    """A site with two jobs, one of them of two sites."""

    def __init__(self) -> None:
        self.triggered: list[ObjectName] = []
        self.runs = {}
        for name, sites in (("one", ["plant-a"]), ("two", ["plant-a", "plant-b"])):
            document = job_document(dict.fromkeys(sites, 1))
            document["metadata"] = {"name": name, "namespace": "ml"}
            job = load_job(document)
            self.runs[job.key] = Run(job, WorkerEvents(job.workers()))
        self.callers = RefusedCallers(self.runs, self.triggered.append)

    def due_messages(self) -> dict[str, list[str]]:
        """Return the new messages by job."""
        due = {key.name: run.events.pop_due(0.0) for key, run in self.runs.items()}
        return {name: [each.message for each in events] for name, events in due.items() if events}


@pytest.mark.parametrize("run", ["ml/one#1", "ml/one#of-last-week"])
def test_the_named_job_learns_of_the_refusal(run: str) -> None:
    site = Site()
    site.callers.at_coordinator(run, CallRefusedError(RefusalReason.BAD_TOKEN, "not its own"))
    assert site.triggered == [ObjectName("ml", "one")]
    assert site.due_messages() == {"one": ["coordinator: BadToken: not its own"]}


@pytest.mark.parametrize("run", ["", "one#1", "other/one#1", "ml/three#1", "ml/one"])
def test_a_refusal_for_a_job_that_is_not_served_is_not_reported(run: str) -> None:
    site = Site()
    site.callers.at_coordinator(run, CallRefusedError(RefusalReason.WRONG_RUN, "not here"))
    assert (site.triggered, site.due_messages()) == ([], {})


def test_other_operators_concern_the_jobs_of_several_sites() -> None:
    site = Site()
    site.callers.at_federation(
        StreamRefusedError(SiteRefusalReason.BAD_CERTIFICATE, "of no authority")
    )
    assert site.due_messages() == {"two": ["federation: BadCertificate: of no authority"]}


def test_a_keeper_concerns_its_run_only() -> None:
    site = Site()
    for run in (*list(site.runs)[:1], JobKey("ml", "three", "1")):
        site.callers.at_keeper(run, "NotItsOwn", "another's file")
    assert site.due_messages() == {"one": ["keeper: NotItsOwn: another's file"]}


def test_regular_refusals_are_not_reported() -> None:
    site = Site()
    for key in site.runs:
        for orderly in ("NotJoined", "Finished", "NoAuthority"):
            site.callers.at_coordinator(str(key), CallRefusedError(RefusalReason(orderly), "words"))
    for reason in (SiteRefusalReason.REPLACED, SiteRefusalReason.SILENT):
        site.callers.at_federation(StreamRefusedError(reason, "words"))
    assert (site.triggered, site.due_messages()) == ([], {})


def test_messages_are_printable_and_a_flood_triggers_once() -> None:
    site = Site()
    for _ in range(3):
        site.callers.at_coordinator(
            "ml/one#1", CallRefusedError(RefusalReason.MALFORMED, "a\x1b[2Jb\nc")
        )
    assert site.triggered == [ObjectName("ml", "one")]
    assert site.due_messages() == {"one": ["coordinator: Malformed: a?[2Jb?c"]}
