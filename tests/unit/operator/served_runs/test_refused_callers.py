"""Whom a refusal by the operator is told: the job that the caller named, whichever of its runs is
served; of another site's operator every job of several sites. Orderly refusals are not told, and
what a caller says cannot do anything to a terminal.

Left out: that coordinator and federation call this (tests/cluster/test_hostile_connections).
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
    """Two jobs, one of them of two sites."""

    def __init__(self) -> None:
        self.triggered: list[ObjectName] = []
        self.runs = {}
        for name, sites in (("one", ["plant-a"]), ("two", ["plant-a", "plant-b"])):
            document = job_document(dict.fromkeys(sites, 1))
            document["metadata"] = {"name": name, "namespace": "ml"}
            job = load_job(document)
            self.runs[job.key] = Run(job, WorkerEvents(job.workers()))
        self.callers = RefusedCallers(self.runs, self.triggered.append)

    def told(self) -> dict[str, list[str]]:
        """Messages by job, which are not given again."""
        due = {key.name: run.events.pop_due(0.0) for key, run in self.runs.items()}
        return {name: [each.message for each in told] for name, told in due.items() if told}


@pytest.mark.parametrize("run", ["ml/one#1", "ml/one#of-last-week"])
def test_the_job_that_was_named_is_told(run: str) -> None:
    site = Site()
    site.callers.at_coordinator(run, CallRefusedError(RefusalReason.BAD_TOKEN, "not its own"))
    assert site.triggered == [ObjectName("ml", "one")]
    assert site.told() == {"one": ["coordinator: BadToken: not its own"]}


@pytest.mark.parametrize("run", ["", "one#1", "other/one#1", "ml/three#1", "ml/one"])
def test_nobody_is_told_of_a_job_that_is_not_served(run: str) -> None:
    site = Site()
    site.callers.at_coordinator(run, CallRefusedError(RefusalReason.WRONG_RUN, "not here"))
    assert (site.triggered, site.told()) == ([], {})


def test_other_operators_concern_the_jobs_of_several_sites() -> None:
    site = Site()
    site.callers.at_federation(
        StreamRefusedError(SiteRefusalReason.BAD_CERTIFICATE, "of no authority")
    )
    assert site.told() == {"two": ["federation: BadCertificate: of no authority"]}


def test_a_keeper_concerns_its_run_alone() -> None:
    site = Site()
    for run in (*list(site.runs)[:1], JobKey("ml", "three", "1")):
        site.callers.at_keeper(run, "NotItsOwn", "another's file")
    assert site.told() == {"one": ["keeper: NotItsOwn: another's file"]}


def test_what_happens_in_an_orderly_life_is_not_told() -> None:
    site = Site()
    for key in site.runs:
        for orderly in ("NotJoined", "Finished", "NoAuthority"):
            site.callers.at_coordinator(str(key), CallRefusedError(RefusalReason(orderly), "words"))
    for reason in (SiteRefusalReason.REPLACED, SiteRefusalReason.SILENT):
        site.callers.at_federation(StreamRefusedError(reason, "words"))
    assert (site.triggered, site.told()) == ([], {})


def test_words_are_made_fit_to_print_and_a_flood_triggers_once() -> None:
    site = Site()
    for _ in range(3):
        site.callers.at_coordinator(
            "ml/one#1", CallRefusedError(RefusalReason.MALFORMED, "a\x1b[2Jb\nc")
        )
    assert site.triggered == [ObjectName("ml", "one")]
    assert site.told() == {"one": ["coordinator: Malformed: a?[2Jb?c"]}
