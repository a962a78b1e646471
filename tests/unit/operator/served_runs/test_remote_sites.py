"""Test how reports of other sites act on a job.

- The status shows present and absent sites with reasons, differing manifests, and the links of each
  pair of sites. A site reports the number of its workers.
- The quorum counts sites that have this run with this manifest. A site with a silent operator takes
  part while links to its workers exist. Heartbeats alone write no status.
- Each rank belongs to one worker. New workers of a site with another manifest are excluded.
- The target is evaluated over workers that train or may still train. A run ends if too few sites
  can continue.

Left out: how reports arrive (tests/unit/operator/federation, tests/local/test_federated_runs).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dlion_api.bounds import MAX_PAIRS
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import Membership, MemberState
from dlion_api.spec import load_job
from dlion_api.status import LinkStatus
from dlion_operator.apply.status_patch import is_telemetry, merge_patch
from dlion_operator.federation.reports import (
    LinksTo,
    ReportedWorkers,
    RunReport,
    SpecFingerprint,
    TrainingFigures,
)
from dlion_operator.federation.state import SiteReachability
from dlion_operator.plan.decisions import Decision
from dlion_operator.plan.observed import RemoteView, RunView
from dlion_operator.served_runs.remote_sites import RemoteReports
from federated import JOB, member, report, worker
from operator_world import STAGED, World, condition_statuses, dlion_job, ready_reason

A, B, C = SiteName("plant-a"), SiteName("plant-b"), SiteName("plant-c")
HEARD = RemoteView(is_reachable=True, heartbeat_age_s=1.0, has_run=True, spec_hash="h", workers=2)
DRIFT = "the manifest of plant-b differs from that of plant-a in trainer.seed"


GROUPS = [{"name": "small", "workers": 2}]


def world(**spec: Any) -> World:
    """Return a job with two workers here, which have joined, and two at plant B."""
    groups = [{"name": "small", "workers": 2}]
    sites = [{"name": name, "groups": groups} for name in (A, B)]
    document = dlion_job(sites=sites, **spec)
    made = World(document)
    made.look()
    made.make_jobs()
    return made


def look(at: World, there: RemoteView, *, ready: int = 0, **view: Any) -> Decision:
    at.run = RunView(open_s=3600.0, ready={A: 2, B: ready}, remote={B: there}, **view)
    return at.look()


def site(decision: Decision) -> dict[str, Any]:
    assert decision.status is not None
    return dict(decision.status["sites"][1])


def test_the_status_shows_the_state_of_each_site() -> None:
    at = world()
    training: dict[str, Any] = {"training": True, "ready": 2, "samples_per_s": 12.34567}
    decision = look(at, replace(HEARD, iteration=7, samples_per_s=98.765), iteration=9, **training)
    assert decision.status is not None
    assert decision.status["readyWorkers"] == "4/4"
    assert decision.status["readySites"] == "2/2"
    assert condition_statuses(decision)["SpecConsistent"] == "True"
    assert condition_statuses(decision)["Degraded"] == "False"
    own, there = decision.status["sites"]
    assert (own["iteration"], own["samplesPerSecond"]) == (9, "12.35")
    assert there == {
        "name": "plant-b",
        "state": "Ready",
        "workers": 2,
        "readyWorkers": 2,
        "specHash": "h",
        "message": "",
        "iteration": 7,
        "samplesPerSecond": "98.77",
        "lastHeartbeatTime": "2026-01-31T11:59:59Z",
    }


def test_the_status_shows_the_links_of_each_pair_of_sites() -> None:
    """Each site reports its own links. Links to a site that the manifest does not name are
    ignored.
    """
    job = load_job(dlion_job(sites=[{"name": each, "groups": GROUPS} for each in (A, B)]))
    own = (LinksTo(B, 3, 4, 6.25e6),)

    def report_of(*links: LinksTo) -> RunReport:
        return replace(report(B, 1), figures=TrainingFigures(links=links))

    reports = {
        B: report_of(LinksTo(A, 4, 4), LinksTo(C, 1, 1, 9.0)),
        C: report_of(LinksTo(A, 1, 1, 9.0)),
    }
    links = RemoteReports(A, job, OWN, reports).with_site_pairs(
        LinkStatus(connected=3, expected=4), own
    )
    at = world()
    decision = look(at, HEARD, ready=2, training=True, links=links)
    assert decision.status is not None
    assert decision.status["links"] == {
        "connected": 3,
        "expected": 4,
        "slowest": "",
        "pairs": [
            {"pair": "plant-a to plant-b", "connected": 3, "expected": 4,
             "megabitsPerSecond": "50"},
            {"pair": "plant-b to plant-a", "connected": 4, "expected": 4, "megabitsPerSecond": ""},
        ],
    }  # fmt: skip
    assert RemoteReports(A, job, OWN, {}).with_site_pairs(None, ()) is None
    there = RemoteReports(A, job, OWN, reports).with_site_pairs(None, ())
    assert there is not None
    assert [each.pair for each in there.pairs] == ["plant-b to plant-a"]


def test_the_most_important_of_very_many_pairs_are_shown() -> None:
    sites = [SiteName(f"s{number}") for number in range(20)]
    job = load_job(dlion_job(sites=[{"name": each, "groups": GROUPS} for each in sites]))
    reports = {
        site: replace(
            report(site, 1),
            figures=TrainingFigures(links=tuple(LinksTo(each, 1, 1, 1e6) for each in sites)),
        )
        for site in sites[1:]
    }
    own = [LinksTo(sites[18], 0, 1), LinksTo(sites[19], 1, 1, 5e5)]
    links = RemoteReports(sites[0], job, OWN, reports).with_site_pairs(None, own)
    assert links is not None
    assert len(links.pairs) == MAX_PAIRS
    assert {"s0 to s18", "s0 to s19"} <= {each.pair for each in links.pairs}


def test_the_status_shows_why_a_site_is_absent() -> None:
    at = world()
    cases = [
        (RemoteView(problem="no route"), "Unreachable", "no route"),
        (RemoteView(is_reachable=True, heartbeat_age_s=0.0, problem="gone"), "Absent", "gone"),
        (replace(HEARD, workers=2), "Starting", ""),
        (replace(HEARD, agrees=False, workers=None), "Refused", DRIFT),
    ]
    for there, state, message in cases:
        shown = site(look(at, there, drift="" if there.agrees else DRIFT))
        assert (shown["state"], shown["message"], shown["workers"]) == (state, message, 2)


def test_a_suspended_site_shows_the_states_of_the_others() -> None:
    at = world()
    at.document["spec"]["suspend"] = True
    there = replace(HEARD, iteration=7, workers=3)
    decision = at.look(remote_view=RunView(open_s=0.0, ready={B: 3}, remote={B: there}))
    shown = site(decision)
    assert (shown["state"], shown["readyWorkers"], shown["workers"]) == ("Ready", 3, 3)
    assert (shown["iteration"], shown["message"]) == (7, "")
    assert condition_statuses(decision)["Suspended"] == "True"
    assert decision.requeue_after_s is not None
    silent = RemoteView(heartbeat_age_s=99.0, problem="nothing for long", has_run=True)
    gone = site(at.look(remote_view=RunView(open_s=0.0, remote={B: silent})))
    assert (gone["state"], gone["message"]) == ("Unreachable", "nothing for long")


def test_a_suspended_job_of_this_site_only_is_not_looked_at() -> None:
    at = World(dlion_job(suspend=True))
    assert at.look().requeue_after_s is None


def test_the_quorum_counts_sites_that_have_this_run_with_this_manifest() -> None:
    at = world(minSites=2)
    for there in (RemoteView(problem="gone"), replace(HEARD, agrees=False)):
        reason, message = ready_reason(look(at, there))
        assert reason == "BelowQuorum"
        assert message.startswith("1 of at least 2 sites (minSites) have this run; 2 of 4 workers")
    reason, message = ready_reason(look(at, HEARD))
    assert (reason, message) == ("WaitingForPeers", "2 of 4 workers have joined")


def test_drift_is_a_condition_with_an_event_once() -> None:
    at = world()
    decision = look(at, HEARD, training=True, ready=2, drift=DRIFT)
    assert decision.status is not None
    (condition,) = [c for c in decision.status["conditions"] if c["type"] == "SpecConsistent"]
    assert (condition["status"], condition["reason"], condition["message"]) == (
        "False",
        "SpecDiffers",
        DRIFT,
    )
    assert [n.reason for n in decision.events if n.type == "Warning"] == ["SpecDiffers"]
    assert condition_statuses(decision)["Ready"] == "True"  # workers that have joined continue
    assert not look(at, HEARD, training=True, ready=2, drift=DRIFT).events
    unheard = look(at, RemoteView(), training=True)
    assert condition_statuses(unheard)["SpecConsistent"] == "Unknown"


def test_a_silent_site_takes_part_while_its_links_exist() -> None:
    at = world(minSites=2)
    silent = replace(HEARD, is_reachable=False, heartbeat_age_s=50.0, problem="silent for 50 s")
    linked = look(at, silent, training=True, ready=2, linked={B: 2})
    assert ready_reason(linked) == ("Training", "4 workers train; plant-b: silent for 50 s")
    assert site(linked)["state"] == "Unreachable"
    alone = look(at, silent, training=True, ready=2)
    assert ready_reason(alone)[0] == "BelowQuorum"
    at = world()
    alone = look(at, silent, training=True, ready=2)
    assert ready_reason(alone) == (
        "PeersLost",
        "2 of 2 workers train here, 0 of 2 elsewhere; plant-b: silent for 50 s",
    )
    assert condition_statuses(alone)["Degraded"] == "True"


def test_links_count_while_no_operator_knows_the_workers() -> None:
    """Both operators have restarted: no training worker has joined or is reported yet."""
    at = world(minSites=2)
    silent = RemoteView(problem="its operator has sent no report yet")
    early = replace(HEARD, knows_all=False)
    opened_late = RemoteView(is_reachable=True, heartbeat_age_s=1.0, problem="not there")
    for there in (silent, early, opened_late):
        linked = look(at, there, training=True, ready=0, linked={A: 1, B: 2})
        assert ready_reason(linked)[0] == "Training"
        assert ready_reason(linked)[1].startswith("4 workers train")
        some = look(at, there, training=True, ready=0, linked={B: 1})
        assert ready_reason(some)[0] == "PeersLost"
        assert ready_reason(look(at, there, training=True, ready=0))[0] == "BelowQuorum"
    known = look(at, replace(HEARD, knows_all=True), training=True, ready=0, linked={B: 2})
    assert ready_reason(known)[0] == "BelowQuorum"  # a report of the operator overrides old links


def test_heartbeats_alone_write_no_status() -> None:
    at = world()
    first = look(at, HEARD).status
    for _ in range(11):
        at.advance(5.0)
        assert look(at, HEARD).status == first
    at.advance(10.0)
    later = look(at, HEARD).status
    assert first is not None
    assert later is not None
    patch = merge_patch(first, later)
    assert patch.keys() == {"sites"}
    assert is_telemetry(first, patch)


def test_a_site_reports_the_number_of_its_workers() -> None:
    at = world()
    decision = look(at, replace(HEARD, workers=5), ready=3, training=True)
    assert decision.status is not None
    assert decision.status["readyWorkers"] == "5/7"
    assert ready_reason(decision)[1] == "2 of 2 workers train here, 3 of 5 elsewhere"


OWN = SpecFingerprint.of(load_job(dlion_job()))


def report_from(of: SiteName, *workers: WorkerIdentity, agrees: bool = True) -> RunReport:
    reported = report(of, 9)
    spec_fingerprint = (
        OWN if agrees else replace(reported.spec, fields={**OWN.fields, "trainer.seed": b"7"})
    )
    return replace(
        reported, spec=spec_fingerprint, workers=replace(reported.workers, wanted=workers)
    )


def test_workers_are_those_that_their_own_sites_report() -> None:
    own, listed, extra = worker(A, 0), worker(B, 1), replace(worker(B, 2), index=1)
    job = load_job(dlion_job())
    assert RemoteReports(A, job, OWN, {}).all_workers((own, listed)) == (own, listed)
    grown = {B: report_from(B, listed, extra)}
    assert RemoteReports(A, job, OWN, grown).all_workers((own, listed)) == (own, listed, extra)
    other = {B: report_from(B, listed, extra, agrees=False)}
    assert RemoteReports(A, job, OWN, other).all_workers((own, listed)) == (own, listed)
    thief = {B: report_from(B, replace(listed, rank=Rank(0)))}
    assert RemoteReports(A, job, OWN, thief).all_workers((own, listed)) == (own,)


def test_a_site_is_trusted_about_its_own_workers_only() -> None:
    sites = [{"name": name, "groups": [{"name": "small", "workers": 1}]} for name in (A, B)]
    job = load_job(dlion_job(sites=sites))
    for mode, right_rank in ((job.with_counted_ranks(), 1), (job.with_group_ranks(), 1)):
        right, stolen = member(B, right_rank), member(B, 0, incarnation=2**40)
        unknown = replace(right, identity=replace(right.identity, group="other"))
        workers = ReportedWorkers(
            tuple(each.identity for each in (right, stolen, unknown)),
            (right, stolen, unknown),
            settled=True,
            accuracies={Rank(0): 1.0, Rank(right_rank): 0.5},
            left=frozenset({Rank(0), Rank(right_rank), Rank(5)}),
        )
        reported = replace(report_from(B), workers=workers)
        found = (
            RemoteReports(A, mode, OWN, {A: reported, B: reported, C: reported}).trusted().by_site
        )
        assert set(found) == {B}
        assert found[B].workers.wanted == (right.identity,)
        assert found[B].workers.members == (right,)
        assert found[B].workers.accuracies == {Rank(right_rank): 0.5}
        assert found[B].workers.left == {Rank(right_rank)}


def test_new_workers_of_a_site_that_differs_are_excluded() -> None:
    job, membership = load_job(dlion_job()), Membership(1, JOB, 2, (member(A, 0),))
    right, wrong = report_from(B), report_from(B, agrees=False)
    assert RemoteReports(A, job, OWN, {B: right}).members(membership) == [member(B, 9)]
    assert RemoteReports(A, job, OWN, {B: wrong}).members(membership) == []
    inside = replace(membership, members=(member(A, 0), member(B, 9)))
    assert RemoteReports(A, job, OWN, {B: wrong}).members(inside) == [member(B, 9)]
    (lost,) = RemoteReports(A, job, OWN, {}).members(inside)
    assert lost == member(B, 9, state=MemberState.LOST)


def test_drift_concerns_sites_that_name_each_other() -> None:
    job = load_job(dlion_job())
    stranger = report_from(C, agrees=False)
    drift = RemoteReports(A, job, OWN, {C: stranger}).spec_drift()
    assert "trainer.seed" in drift  # the other manifest names this site
    elsewhere = {k: v for k, v in stranger.spec.fields.items() if "plant-a" not in k}
    unrelated = replace(stranger, spec=replace(stranger.spec, fields=elsewhere))
    assert RemoteReports(A, job, OWN, {C: unrelated}).spec_drift() == ""


WORKERS = (worker(A, 0), worker(A, 2), worker(B, 1))


def evaluated_ranks(
    *members: Any, reports: dict[SiteName, RunReport], gone: set[SiteName]
) -> list[int]:
    job, membership = load_job(dlion_job()), Membership(1, JOB, 3, members)
    return [
        *RemoteReports(A, job, OWN, reports).counted_replicas(WORKERS, membership, frozenset(gone))
    ]


def test_the_target_is_evaluated_over_workers_that_train_or_may_train() -> None:
    there = report_from(B, worker(B, 1))
    # Nothing is known about the other site.
    assert evaluated_ranks(reports={}, gone=set()) == [0, 2, 1]
    assert evaluated_ranks(reports={B: there}, gone=set()) == [0, 2, 1]
    assert evaluated_ranks(
        member(B, 1, state=MemberState.LOST), reports={B: there}, gone=set()
    ) == [0, 2, 1]
    # The run is suspended or deleted there, or its worker has ended or failed permanently.
    assert evaluated_ranks(member(B, 1, state=MemberState.LOST), reports={}, gone={B}) == [0, 2]
    assert evaluated_ranks(
        member(B, 1, state=MemberState.FINISHED), reports={B: there}, gone=set()
    ) == [0, 2]
    over = replace(there, workers=replace(there.workers, left=frozenset({Rank(1)})))
    assert evaluated_ranks(member(B, 1), reports={B: over}, gone=set()) == [0, 2]
    # Its manifest differs: a joined worker counts, an excluded one does not.
    other = report_from(B, worker(B, 1), agrees=False)
    assert evaluated_ranks(reports={B: other}, gone=set()) == [0, 2]
    assert evaluated_ranks(member(B, 1), reports={B: other}, gone=set()) == [0, 2, 1]


def test_a_site_lacks_the_run_once_it_has_named_all_its_runs() -> None:
    sites = [{"name": name, "groups": [{"name": "small", "workers": 1}]} for name in (A, B, C)]
    job, heard = load_job(dlion_job(sites=sites)), SiteReachability(True, 1.0, named_all=True)
    cases = [
        (heard, {B, C}),
        (replace(heard, named_all=False), set()),
        (replace(heard, reachable=False), set()),
        (SiteReachability(), set()),
    ]
    for reachability, gone in cases:
        assert (
            RemoteReports(A, job, OWN, {}).sites_without_run(lambda _, it=reachability: it) == gone
        )
    assert RemoteReports(A, job, OWN, {B: report_from(B)}).sites_without_run(lambda _: heard) == {C}


def test_a_run_ends_here_once_too_few_sites_can_continue() -> None:
    sites = [{"name": name, "groups": [{"name": "small", "workers": 1}]} for name in (A, B, C)]
    job = load_job(dlion_job(sites=sites, minSites=2))
    at_work = {B: report_from(B, worker(B, 1)), C: report_from(C, worker(C, 2))}
    assert RemoteReports(A, job, OWN, {}).over_reason() == ""
    assert RemoteReports(A, job, OWN, at_work).over_reason() == ""
    failed = replace(at_work[B].workers, left=frozenset({Rank(1)}))
    one_over = {**at_work, B: replace(at_work[B], workers=failed)}
    assert RemoteReports(A, job, OWN, one_over).over_reason() == ""
    ended = replace(at_work[C].workers, members=(member(C, 2, state=MemberState.FINISHED),))
    over = {**one_over, C: replace(at_work[C], workers=ended)}
    assert RemoteReports(A, job, OWN, over).over_reason() == (
        "it is over at plant-b, plant-c: 1 sites are left (minSites 2)"
    )
    alone = load_job(dlion_job(sites=sites))
    assert RemoteReports(A, alone, OWN, over).over_reason() == ""


def test_sensors_end_here_once_the_only_training_worker_has_left() -> None:
    sites = [{"name": name, "groups": [{"name": "small", "workers": 2}]} for name in (A, B)]
    staged = load_job(dlion_job(sites=sites, **STAGED))
    others = load_job(dlion_job(sites=sites))
    there = report_from(A, worker(A, 0), worker(A, 1))
    for rank, reason in (
        (1, ""),
        (0, "worker 0 has left, and no other worker trains (topology staged)"),
    ):
        heard = {A: replace(there, workers=replace(there.workers, left=frozenset({Rank(rank)})))}
        assert RemoteReports(B, staged, OWN, heard).over_reason() == reason
        assert RemoteReports(B, others, OWN, heard).over_reason() == ""
