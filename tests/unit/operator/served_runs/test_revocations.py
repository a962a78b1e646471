"""Test revocations in served runs.

- A revocation by the worker's own site acts at every site that learns of it. That of another site
  acts there only, and the others are informed.
- A run does not wait for a revoked worker, and does not count it for target, figures and speed.
- Revocations survive a restart of the operator and the end of the run at their site. Each change is
  one event.
- With `quarantine: majority` a site revokes a worker that most of the others name there. A user
  lifts it. One faulty worker cannot cause a quarantine.
- Hostile reports are refused as a whole.

Left out: the coordinator's own rules (tests/unit/operator/coordinator/test_revocations.py), gRPC
and API servers (tests/cluster/test_federation.py).
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from dlion_api.errors import ContractError
from dlion_api.names import Rank, SiteName
from dlion_api.protocol.membership import Member, MemberState
from dlion_api.protocol.progress import EvaluationRecord, EventRecord, StepRecord
from dlion_api.protocol.revocation import (
    MAX_REVOCATIONS,
    Revocation,
    RevocationInEffect,
)
from dlion_api.spec import Job, load_job
from dlion_api.wire import federation_pb2 as wire
from dlion_operator.coordinator import CoordinatorServer
from dlion_operator.coordinator.events import JoinRequested
from dlion_operator.federation.messages import statement_of, to_wire
from dlion_operator.federation.node import FederationNode
from dlion_operator.federation.outbound_reports import OutboundReports
from dlion_operator.federation.reports import (
    ReportedWorkers,
    RunReport,
    RunReported,
    SpecFingerprint,
    TrainingFigures,
)
from dlion_operator.federation.state import FederationState
from dlion_operator.model.settings import RemoteSite
from dlion_operator.pki.authority import CertificateAuthority, Tokens
from dlion_operator.pki.token_bindings import Bearer
from dlion_operator.plan.decisions import OpenRun
from dlion_operator.served_runs.revocations import RunRevocations
from dlion_operator.served_runs.site_runs import SiteRuns

A, B, C = SiteName("plant-a"), SiteName("plant-b"), SiteName("plant-c")
STOLEN = Revocation("plant-b/g-0", "stolen")


def report_of(*revocations: Revocation) -> RunReport:
    return RunReport(
        SpecFingerprint("0" * 64, {}),
        ReportedWorkers((), (), settled=True),
        TrainingFigures(),
        revocations=revocations,
    )


def names(revocations: Any) -> list[str]:
    return [each.name for each in revocations]


def test_a_site_revokes_its_own_workers_at_all_sites() -> None:
    run = RunRevocations(A, ())
    run.set_remote({B: report_of(STOLEN), C: report_of()})
    assert names(run.effective()) == [STOLEN.name]
    run.set_remote({B: report_of(Revocation("plant-b")), C: report_of()})
    assert names(run.effective()) == ["plant-b"]


def test_a_site_revokes_other_workers_for_itself_only() -> None:
    run = RunRevocations(A, ())
    run.set_remote({B: report_of(Revocation("plant-a"), Revocation("plant-c/g-0"))})
    assert run.effective() == ()
    assert names(run.all()) == ["plant-a", "plant-c/g-0"]
    first, second = run.changes()
    assert "plant-b refuses plant-a, and this site does not" in first.message
    assert "revoke it here, too, or at plant-c" in second.message
    run.set_own((Revocation("plant-c/g-0"),))
    assert names(run.effective()) == ["plant-c/g-0"]
    assert names(run.own) == ["plant-c/g-0"]


def test_each_change_is_one_event() -> None:
    run = RunRevocations(A, ())
    run.set_remote({B: report_of(STOLEN)})
    (revoked,) = run.changes()
    assert (revoked.reason, revoked.type) == ("WorkerRevoked", "Warning")
    assert revoked.message == "plant-b/g-0 is revoked at plant-b (stolen): no worker accepts it"
    assert run.changes() == ()
    run.set_remote({B: report_of()})
    (restored,) = run.changes()
    assert (restored.reason, restored.type) == ("WorkerRestored", "Normal")


def test_earlier_revocations_stay_until_their_site_reports() -> None:
    kept = (RevocationInEffect(STOLEN.name, "stolen", by=B),)
    run = RunRevocations(A, kept)
    run.set_own(())
    run.set_remote({C: report_of()})
    assert names(run.effective()) == [STOLEN.name]
    assert run.changes() == ()
    run.set_remote({})  # the run is suspended there
    assert names(run.effective()) == [STOLEN.name]
    run.set_remote({B: report_of()})
    assert run.effective() == ()


def test_only_the_annotation_gives_revocations_of_this_site() -> None:
    run = RunRevocations(A, (RevocationInEffect("plant-c", by=A),))
    run.set_own(())
    assert run.all() == ()


# ---- a served run ----------------------------------------------------------------------------


def job(workers: int = 2, sites: tuple[SiteName, ...] = (A,), **exchange: str) -> Job:
    group = {"name": "g", "workers": workers}
    return load_job(
        {
            "apiVersion": "dlion.dev/v1alpha1",
            "kind": "DLionJob",
            "metadata": {"name": "digits"},
            "spec": {
                "sites": [{"name": site, "groups": [group]} for site in sites],
                "exchange": exchange,
                "trainer": {
                    "program": {"builtin": "digits"},
                    "dataset": {"name": "digits"},
                    "stop": {"targetAccuracy": 0.5},
                },
            },
        }
    )


def opened(*revocations: Revocation) -> OpenRun:
    return OpenRun(job(), job().workers(), spec_hash="", age_s=0.0, revocations=revocations)


def site() -> tuple[SiteRuns, CoordinatorServer]:
    authority = CertificateAuthority(A)
    server = CoordinatorServer("127.0.0.1:0", authority)
    return SiteRuns(server, authority=authority, tokens=Tokens(), trigger=lambda _: None), server


def step(rank: int, iteration: int) -> StepRecord:
    return StepRecord(
        time_s=float(iteration), rank=Rank(rank), incarnation=1, iteration=iteration,
        loss=10.0**rank, local_batch_size=8, global_batch_size=16, samples=8 * iteration,
        wall_s=1.0, compute_s=1.0, waited_s=0.0, learning_rate=0.1, cpu_s=1.0, exchange_cpu_s=0.0,
    )  # fmt: skip


def test_the_run_does_not_wait_for_a_revoked_worker_or_count_its_figures() -> None:
    runs, server = site()
    runs.open(opened())
    run = server.runs[job().key]
    for iteration in (1, 2):
        for rank in (0, 1):
            run.take(step(rank, iteration))
    run.take(EvaluationRecord(1.0, Rank(0), 1, 10, 0.9, 1.0, 10))
    before = runs.view(job().key)
    assert before is not None
    assert before.trainer_status is not None
    assert before.samples_per_s == pytest.approx(16.0)
    assert before.stop_reason == ""
    runs.open(opened(Revocation("plant-a/g-1")))
    assert server.membership(job().key).expected_count == 1
    after = runs.view(job().key)
    assert after is not None
    assert after.trainer_status is not None
    metrics = {each.name: each.value for each in after.trainer_status.metrics}
    assert metrics["loss"] == "1"
    assert after.samples_per_s == pytest.approx(8.0)
    assert after.stop_reason == "targetAccuracy 0.5 reached: mean over 1 replicas 0.9000"
    assert [(each.name, each.by) for each in after.revocations] == [("plant-a/g-1", A)]
    assert names(runs.reports()[job().key].revocations) == ["plant-a/g-1"]
    assert [each.reason for each in runs.events(job().key)] == ["WorkerRevoked"]
    runs.open(opened())
    assert server.membership(job().key).expected_count == 2


def test_a_worker_of_another_site_returns_without_a_report_of_its_site() -> None:
    runs, server = site()
    its = job(1, (A, B))
    node = FederationNode(
        CertificateAuthority(A),
        (RemoteSite(name=B, address="b:1", bundle_file="/nowhere/b.pem"),),
        certificate_life=timedelta(days=1),
        reports=dict,
        on_run_changed=runs.update_remote,
        on_bundles=lambda _: None,
    )
    runs.federate(node)
    opening = OpenRun(its, its.workers(), spec_hash=its.hash(), age_s=0.0)
    runs.open(opening)
    (theirs,) = (worker for worker in its.workers() if worker.site == B)
    there = Member(theirs, 1, MemberState.READY, "b:2")
    workers = ReportedWorkers((theirs,), (there,), settled=True)
    state = node._state
    state.open_stream(1, B, A, 0.0)
    state.receive(1, RunReported(its.key, SpecFingerprint.of(its), workers, TrainingFigures()), 0.0)
    runs.update_remote(its.key)
    assert server.membership(its.key).ready() == (there,)
    runs.open(replace(opening, revocations=(Revocation(theirs.name),)))
    assert server.membership(its.key).ready() == ()
    runs.open(opening)
    assert server.membership(its.key).ready() == (there,)


# ---- quarantine ------------------------------------------------------------------------------


def warning(by: int, accused: int, reason: str = "UnusualValues") -> EventRecord:
    text = f"worker {accused} contributes values with the norm 100, 30 times that of others"
    return EventRecord(1.0, Rank(by), 5, reason, text, warning=True)


def joined(**exchange: str) -> tuple[SiteRuns, CoordinatorServer, Job]:
    """Return a run whose three workers have joined."""
    runs, server = site()
    its = job(3, **exchange)
    runs.open(OpenRun(its, its.workers(), spec_hash=its.hash(), age_s=0.0))
    for stream, worker in enumerate(its.workers()):
        request = JoinRequested(stream, worker, Bearer(), 1, "a:1", "", its.hash(), 0)
        server.runs[its.key].state.join(request)
    return runs, server, its


def test_an_accused_worker_is_quarantined_if_the_manifest_asks() -> None:
    runs, server, its = joined(quarantine="majority")
    server.runs[its.key].take(warning(0, 2))
    assert len(server.membership(its.key).ready()) == 3
    server.runs[its.key].take(warning(1, 2))
    assert [member.revoked for member in server.membership(its.key).members] == [
        False, False, True
    ]  # fmt: skip
    view = runs.view(its.key)
    assert view is not None
    (made,) = view.revocations
    assert (made.name, made.by, made.is_automatic) == ("plant-a/g-2", A, True)
    assert "30 times that of others" in made.reason
    assert names(runs.reports()[its.key].revocations) == ["plant-a/g-2"]
    messages = {each.reason: each.message for each in runs.events(its.key)}
    assert messages["WorkerRevoked"].startswith("plant-a/g-2 is quarantined (most workers here")


def test_no_worker_is_quarantined_without_the_manifest_field() -> None:
    _, server, its = joined()
    for by in (0, 1):
        server.runs[its.key].take(warning(by, 2))
    assert len(server.membership(its.key).ready()) == 3


def test_a_quarantine_survives_a_restart_and_ends_when_a_user_lifts_it() -> None:
    _, _, its = joined(quarantine="majority")
    runs, server = site()
    kept = (RevocationInEffect("plant-a/g-2", "worker 2 ...", by=A, is_automatic=True),)
    opening = OpenRun(its, its.workers(), spec_hash="", age_s=0.0, kept_revocations=kept)
    runs.open(opening)
    assert server.membership(its.key).expected_count == 2
    trusted = (Revocation("plant-a/g-2", is_lifted=True),)
    runs.open(replace(opening, revocations=trusted))
    assert server.membership(its.key).expected_count == 3
    run = RunRevocations(A, kept)
    run.set_own(trusted)
    assert not run.quarantine("plant-a/g-2", "again")
    assert run.own == ()


def test_a_confirmed_quarantine_does_not_return_once_it_is_lifted() -> None:
    kept = (RevocationInEffect("plant-a/g-2", "worker 2 ...", by=A, is_automatic=True),)
    for first in (Revocation("plant-a/g-2", "seen"), Revocation("plant-a/g-2", is_lifted=True)):
        run = RunRevocations(A, kept)
        run.set_own((first,))
        run.set_own((Revocation("plant-a/g-2", "again"),))
        assert [each.is_automatic for each in run.effective()] == [False]
        run.set_own(())
        assert run.effective() == ()


def test_a_site_reports_no_more_than_the_others_accept() -> None:
    run = RunRevocations(A, ())
    by_people = tuple(Revocation(f"plant-a/g-{at}") for at in range(MAX_REVOCATIONS))
    run.set_own(by_people)
    assert run.quarantine("plant-a/h-0", "bad")
    assert run.own == by_people
    assert len(run.effective()) == MAX_REVOCATIONS + 1


# ---- the wire --------------------------------------------------------------------------------


def sent(revocations: tuple[Revocation, ...] | None) -> RunReported:
    whole = report_of()
    reported = RunReported(job().key, whole.spec, whole.workers, whole.figures, None, revocations)
    statement = statement_of(wire.Statement.FromString(to_wire(reported).SerializeToString()), B)
    assert isinstance(statement, RunReported)
    return statement


def test_only_a_changed_report_contains_revocations() -> None:
    assert sent((STOLEN, Revocation("plant-c"))).revocations == (STOLEN, Revocation("plant-c"))
    assert sent(()).revocations == ()
    assert sent(None).revocations is None


def test_revocations_are_sent_immediately_and_lifted_by_an_empty_list() -> None:
    outbound, run = OutboundReports(), job().key
    state = FederationState(A, [B])
    state.open_stream(1, B, A, 0.0)
    heard = []
    for now_s, report in enumerate([report_of(STOLEN), report_of(STOLEN), report_of()]):
        for statement in outbound.pending({run: report}, float(now_s)):
            state.receive(1, statement, float(now_s))
        heard.append(names(state.reports(run)[B].revocations))
    assert heard == [[STOLEN.name], [STOLEN.name], []]


def test_a_revocation_lifted_while_a_site_was_unreachable_ends_at_its_return() -> None:
    run, state = job().key, FederationState(A, [B])
    for stream, report in enumerate([report_of(STOLEN), report_of()]):
        state.open_stream(stream, B, A, float(stream))
        for statement in OutboundReports().pending({run: report}, float(stream)):
            heard = statement_of(
                wire.Statement.FromString(to_wire(statement).SerializeToString()), B
            )
            state.receive(stream, heard, float(stream))
    assert state.reports(run)[B].revocations == ()


def hostile(*revoked: wire.RevokedName) -> wire.Statement:
    statement = to_wire(RunReported(job().key))
    statement.run.revocations.revoked.extend(revoked)
    return statement


@pytest.mark.parametrize(
    "revoked",
    [
        [wire.RevokedName(name="../plant-b")],
        [wire.RevokedName(name="")],
        [wire.RevokedName(name="p" * 10_000)],
        [wire.RevokedName(name="plant-b"), wire.RevokedName(name="plant-b")],
        [wire.RevokedName(name="plant-b", reason="x" * 100_000)],
        [wire.RevokedName(name=f"site-{at}") for at in range(MAX_REVOCATIONS + 1)],
    ],
)
def test_a_hostile_report_is_refused(revoked: list[wire.RevokedName]) -> None:
    with pytest.raises(ContractError):
        statement_of(hostile(*revoked), B)


def test_control_characters_of_another_site_reach_no_terminal() -> None:
    statement = statement_of(hostile(wire.RevokedName(name="plant-b", reason="\x1b[2J")), B)
    assert isinstance(statement, RunReported)
    assert statement.revocations == (Revocation("plant-b", "?[2J"),)
