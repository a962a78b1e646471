"""Facts: what other sites say shows in a job's status: who is there, who is not and why, where
manifests differ, how the links of each pair of sites are; the quorum counts sites that have this
run by this manifest; a site whose operator is silent takes part while links to its workers stand;
heartbeats alone write no status; a site says how many workers it has; a rank is one worker's; new
workers of a site that differs are kept out; the target is judged on who trains along or may yet; a
run that may go on at too few sites is over.

Left out: how it comes here (tests/unit/operator/federation, tests/local/test_federated_runs).
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
from operator_world import STAGED, World, dlion_job, ready_reason, truths

A, B, C = SiteName("plant-a"), SiteName("plant-b"), SiteName("plant-c")
HEARD = RemoteView(is_reachable=True, heartbeat_age_s=1.0, has_run=True, spec_hash="h", workers=2)
DRIFT = "the manifest of plant-b differs from that of plant-a in trainer.seed"


GROUPS = [{"name": "small", "workers": 2}]


def world(**spec: Any) -> World:
    """A job of two workers here and two at plant B, whose workers here have joined."""
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


def test_each_site_shows_how_it_is() -> None:
    at = world()
    training: dict[str, Any] = {"training": True, "ready": 2, "samples_per_s": 12.34567}
    decision = look(at, replace(HEARD, iteration=7, samples_per_s=98.765), iteration=9, **training)
    assert decision.status is not None
    assert decision.status["readyWorkers"] == "4/4"
    assert decision.status["readySites"] == "2/2"
    assert truths(decision)["SpecConsistent"] == "True"
    assert truths(decision)["Degraded"] == "False"
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


def test_each_pair_of_sites_shows_how_its_links_are() -> None:
    """As each site says of its own; what one that the manifest does not name says is left."""
    job = load_job(dlion_job(sites=[{"name": each, "groups": GROUPS} for each in (A, B)]))
    own = (LinksTo(B, 3, 4, 6.25e6),)

    def said(*links: LinksTo) -> RunReport:
        return replace(report(B, 1), figures=TrainingFigures(links=links))

    told = {B: said(LinksTo(A, 4, 4), LinksTo(C, 1, 1, 9.0)), C: said(LinksTo(A, 1, 1, 9.0))}
    links = RemoteReports(A, job, OWN, told).with_site_pairs(
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
    there = RemoteReports(A, job, OWN, told).with_site_pairs(None, ())
    assert there is not None
    assert [each.pair for each in there.pairs] == ["plant-b to plant-a"]


def test_of_very_many_pairs_those_that_matter_are_shown() -> None:
    sites = [SiteName(f"s{number}") for number in range(20)]
    job = load_job(dlion_job(sites=[{"name": each, "groups": GROUPS} for each in sites]))
    told = {
        site: replace(
            report(site, 1),
            figures=TrainingFigures(links=tuple(LinksTo(each, 1, 1, 1e6) for each in sites)),
        )
        for site in sites[1:]
    }
    own = [LinksTo(sites[18], 0, 1), LinksTo(sites[19], 1, 1, 5e5)]
    links = RemoteReports(sites[0], job, OWN, told).with_site_pairs(None, own)
    assert links is not None
    assert len(links.pairs) == MAX_PAIRS
    assert {"s0 to s18", "s0 to s19"} <= {each.pair for each in links.pairs}


def test_why_a_site_is_not_there() -> None:
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


def test_a_suspended_site_shows_how_the_others_are() -> None:
    at = world()
    at.document["spec"]["suspend"] = True
    there = replace(HEARD, iteration=7, workers=3)
    decision = at.look(remote_view=RunView(open_s=0.0, ready={B: 3}, remote={B: there}))
    shown = site(decision)
    assert (shown["state"], shown["readyWorkers"], shown["workers"]) == ("Ready", 3, 3)
    assert (shown["iteration"], shown["message"]) == (7, "")
    assert truths(decision)["Suspended"] == "True"
    assert decision.requeue_after_s is not None
    silent = RemoteView(heartbeat_age_s=99.0, problem="nothing for long", has_run=True)
    gone = site(at.look(remote_view=RunView(open_s=0.0, remote={B: silent})))
    assert (gone["state"], gone["message"]) == ("Unreachable", "nothing for long")


def test_a_job_of_this_site_alone_is_not_looked_at_while_it_is_suspended() -> None:
    at = World(dlion_job(suspend=True))
    assert at.look().requeue_after_s is None


def test_the_quorum_counts_sites_that_have_this_run_by_this_manifest() -> None:
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
    (said,) = [c for c in decision.status["conditions"] if c["type"] == "SpecConsistent"]
    assert (said["status"], said["reason"], said["message"]) == ("False", "SpecDiffers", DRIFT)
    assert [n.reason for n in decision.events if n.type == "Warning"] == ["SpecDiffers"]
    assert truths(decision)["Ready"] == "True"  # those that are in go on
    assert not look(at, HEARD, training=True, ready=2, drift=DRIFT).events
    unheard = look(at, RemoteView(), training=True)
    assert truths(unheard)["SpecConsistent"] == "Unknown"


def test_a_silent_site_takes_part_while_links_stand() -> None:
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
    assert truths(alone)["Degraded"] == "True"


def test_links_count_where_no_operator_knows_the_workers_yet() -> None:
    """Both operators have started anew: nobody has joined, or told of it, that trains along."""
    at = world(minSites=2)
    silent = RemoteView(problem="its operator has said nothing yet")
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
    assert ready_reason(known)[0] == "BelowQuorum"  # its operator knows better than old links


def test_heartbeats_alone_write_no_status() -> None:
    at = world()
    first = look(at, HEARD).status
    for _ in range(11):
        at.pass_by(5.0)
        assert look(at, HEARD).status == first
    at.pass_by(10.0)
    later = look(at, HEARD).status
    assert first is not None
    assert later is not None
    patch = merge_patch(first, later)
    assert patch.keys() == {"sites"}
    assert is_telemetry(first, patch)


def test_a_site_says_how_many_workers_it_has() -> None:
    at = world()
    decision = look(at, replace(HEARD, workers=5), ready=3, training=True)
    assert decision.status is not None
    assert decision.status["readyWorkers"] == "5/7"
    assert ready_reason(decision)[1] == "2 of 2 workers train here, 3 of 5 elsewhere"


OWN = SpecFingerprint.of(load_job(dlion_job()))


def told(of: SiteName, *workers: WorkerIdentity, agrees: bool = True) -> RunReport:
    said = report(of, 9)
    spec_fingerprint = (
        OWN if agrees else replace(said.spec, fields={**OWN.fields, "trainer.seed": b"7"})
    )
    return replace(said, spec=spec_fingerprint, workers=replace(said.workers, wanted=workers))


def test_workers_are_as_their_own_sites_say() -> None:
    own, listed, extra = worker(A, 0), worker(B, 1), replace(worker(B, 2), index=1)
    job = load_job(dlion_job())
    assert RemoteReports(A, job, OWN, {}).all_workers((own, listed)) == (own, listed)
    grown = {B: told(B, listed, extra)}
    assert RemoteReports(A, job, OWN, grown).all_workers((own, listed)) == (own, listed, extra)
    other = {B: told(B, listed, extra, agrees=False)}
    assert RemoteReports(A, job, OWN, other).all_workers((own, listed)) == (own, listed)
    thief = {B: told(B, replace(listed, rank=Rank(0)))}
    assert RemoteReports(A, job, OWN, thief).all_workers((own, listed)) == (own,)


def test_a_site_is_believed_of_its_own_workers_alone() -> None:
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
        said = replace(told(B), workers=workers)
        found = RemoteReports(A, mode, OWN, {A: said, B: said, C: said}).trusted().by_site
        assert set(found) == {B}
        assert found[B].workers.wanted == (right.identity,)
        assert found[B].workers.members == (right,)
        assert found[B].workers.accuracies == {Rank(right_rank): 0.5}
        assert found[B].workers.left == {Rank(right_rank)}


def test_new_workers_of_a_site_that_differs_are_kept_out() -> None:
    job, membership = load_job(dlion_job()), Membership(1, JOB, 2, (member(A, 0),))
    right, wrong = told(B), told(B, agrees=False)
    assert RemoteReports(A, job, OWN, {B: right}).members(membership) == [member(B, 9)]
    assert RemoteReports(A, job, OWN, {B: wrong}).members(membership) == []
    inside = replace(membership, members=(member(A, 0), member(B, 9)))
    assert RemoteReports(A, job, OWN, {B: wrong}).members(inside) == [member(B, 9)]
    (lost,) = RemoteReports(A, job, OWN, {}).members(inside)
    assert lost == member(B, 9, state=MemberState.LOST)


def test_drift_concerns_sites_that_name_each_other() -> None:
    job = load_job(dlion_job())
    stranger = told(C, agrees=False)
    drift = RemoteReports(A, job, OWN, {C: stranger}).spec_drift()
    assert "trainer.seed" in drift  # its manifest names this site
    elsewhere = {k: v for k, v in stranger.spec.fields.items() if "plant-a" not in k}
    unrelated = replace(stranger, spec=replace(stranger.spec, fields=elsewhere))
    assert RemoteReports(A, job, OWN, {C: unrelated}).spec_drift() == ""


WORKERS = (worker(A, 0), worker(A, 2), worker(B, 1))


def judged(*members: Any, told: dict[SiteName, RunReport], gone: set[SiteName]) -> list[int]:
    job, membership = load_job(dlion_job()), Membership(1, JOB, 3, members)
    return [
        *RemoteReports(A, job, OWN, told).counted_replicas(WORKERS, membership, frozenset(gone))
    ]


def test_the_target_is_judged_on_who_trains_along_or_may_yet() -> None:
    there = told(B, worker(B, 1))
    assert judged(told={}, gone=set()) == [0, 2, 1]  # nothing is known of the other site
    assert judged(told={B: there}, gone=set()) == [0, 2, 1]
    assert judged(member(B, 1, state=MemberState.LOST), told={B: there}, gone=set()) == [0, 2, 1]
    # It is suspended or deleted there, or its worker has ended, or failed for good.
    assert judged(member(B, 1, state=MemberState.LOST), told={}, gone={B}) == [0, 2]
    assert judged(member(B, 1, state=MemberState.FINISHED), told={B: there}, gone=set()) == [0, 2]
    over = replace(there, workers=replace(there.workers, left=frozenset({Rank(1)})))
    assert judged(member(B, 1), told={B: over}, gone=set()) == [0, 2]
    # Its manifest differs: who is in counts, who is kept out does not.
    other = told(B, worker(B, 1), agrees=False)
    assert judged(told={B: other}, gone=set()) == [0, 2]
    assert judged(member(B, 1), told={B: other}, gone=set()) == [0, 2, 1]


def test_a_site_is_without_the_run_once_it_has_named_all_that_it_has() -> None:
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
    assert RemoteReports(A, job, OWN, {B: told(B)}).sites_without_run(lambda _: heard) == {C}


def test_a_run_ends_here_once_it_may_go_on_at_too_few_sites() -> None:
    sites = [{"name": name, "groups": [{"name": "small", "workers": 1}]} for name in (A, B, C)]
    job = load_job(dlion_job(sites=sites, minSites=2))
    at_work = {B: told(B, worker(B, 1)), C: told(C, worker(C, 2))}
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


def test_sensors_end_here_once_the_only_worker_that_trains_has_left() -> None:
    sites = [{"name": name, "groups": [{"name": "small", "workers": 2}]} for name in (A, B)]
    staged = load_job(dlion_job(sites=sites, **STAGED))
    others = load_job(dlion_job(sites=sites))
    there = told(A, worker(A, 0), worker(A, 1))
    for rank, reason in (
        (1, ""),
        (0, "worker 0 has left, and no other worker trains (topology staged)"),
    ):
        heard = {A: replace(there, workers=replace(there.workers, left=frozenset({Rank(rank)})))}
        assert RemoteReports(B, staged, OWN, heard).over_reason() == reason
        assert RemoteReports(B, others, OWN, heard).over_reason() == ""
