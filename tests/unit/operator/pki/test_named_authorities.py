"""Test runs whose jobs name their own authority.

- Nothing of a job starts without its authority. The status reports it, after a minute as stalled. A
  run that trains continues, with one event.
- The named authority signs for the workers of the job and identifies them. The site's own authority
  and other runs do not affect it.
- Other sites are identified by their report of that run, and until it arrives by the kept one. A
  site that reports no authority, or that of another site, is named.
- Sites that shared an authority before the operator started keep it in that run, with a log line.

Left out: reading Secrets (test_named_secret), gRPC and TLS (tests/local), API servers
(tests/cluster).
"""

from __future__ import annotations

from typing import Any

import pytest

from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.spec import Job, load_job
from dlion_operator.coordinator import CoordinatorServer
from dlion_operator.federation.reports import (
    ReportedWorkers,
    RunReport,
    SpecFingerprint,
    TrainingFigures,
)
from dlion_operator.federation.state import SiteReachability
from dlion_operator.pki.authority import CertificateAuthority, Tokens
from dlion_operator.pki.certificate_issuer import LIFE
from dlion_operator.pki.job_authority import CannotSignError, issuer_of
from dlion_operator.pki.named_authority import NamedAuthority
from dlion_operator.plan.decisions import Apply, Create, OpenRun
from dlion_operator.plan.observed import RunView
from dlion_operator.served_runs.remote_sites import NO_REMOTE_AUTHORITY
from dlion_operator.served_runs.site_runs import SiteRuns
from dlion_worker.security.credentials import WorkerKey
from given_authorities import GivenAuthority
from operator_world import World, condition_statuses, dlion_job, ready_reason

A, B = SiteName("plant-a"), SiteName("plant-b")
TLS = {"mode": "Secret", "secretName": "plant-ca"}
MISSING = NamedAuthority(None, "Secret default/plant-ca: is not there")


def named(given: GivenAuthority | None = None) -> NamedAuthority:
    """Return the given authority or a new one, read for plant A."""
    given = given or GivenAuthority()
    key = job().key
    return NamedAuthority(
        issuer_of(given.certificate_pem, given.key_pem(), life=LIFE, job=key, site=A)
    )


def job(run_id: str = "1", tls: dict[str, str] | None = None) -> Job:
    groups = [{"name": "g", "workers": 1}]
    sites = [{"name": name, "groups": groups} for name in (A, B)]
    return load_job(dlion_job(sites=sites, runId=run_id, tls=tls or TLS))


# ---- decisions


def test_nothing_starts_without_the_authority() -> None:
    world = World(dlion_job(tls=TLS))
    decision = world.look(authority=MISSING)
    assert ready_reason(decision) == ("NoAuthority", MISSING.problem)
    assert condition_statuses(decision)["Reconciling"] == "True"
    assert [type(action) for action in decision.actions] == [OpenRun]
    assert [(n.reason, n.type) for n in decision.events] == [("NoAuthority", "Normal")]
    late = world.look(authority=NamedAuthority(None, MISSING.problem, missing_s=60.0))
    assert condition_statuses(late)["Stalled"] == "True"
    found = world.look(authority=named())
    assert {"Job", "ConfigMap"} <= {
        action.document["kind"] for action in found.actions if isinstance(action, Create | Apply)
    }


def test_a_certificate_is_requested_from_cert_manager() -> None:
    issued = {"mode": "CertManager", "issuerName": "example-pki", "issuerKind": "ClusterIssuer"}
    world = World(dlion_job(tls=issued))
    decision = world.look(authority=MISSING)
    assert ready_reason(decision)[0] == "NoAuthority"
    (asked,) = (a.document for a in decision.actions if isinstance(a, Apply | Create))
    assert (asked["kind"], asked["metadata"]["name"]) == ("Certificate", "digits-authority")
    assert asked["spec"]["secretName"] == "digits-authority"
    assert asked["spec"]["issuerRef"]["kind"] == "ClusterIssuer"
    assert asked["metadata"]["ownerReferences"][0]["kind"] == "DLionJob"
    found = world.look(authority=named())
    kinds = [a.document["kind"] for a in found.actions if isinstance(a, Apply | Create)]
    assert kinds[0] == "Certificate"
    assert "Job" in kinds


def test_an_authority_that_was_never_read_starts_nothing() -> None:
    decision = World(dlion_job(tls=TLS)).look()
    assert ready_reason(decision)[0] == "NoAuthority"


def test_a_run_that_trains_continues_without_it_and_reports_it_once() -> None:
    world = World(dlion_job(tls=TLS))
    world.look(authority=named())
    world.make_jobs()
    world.train()
    world.look(authority=named())
    decision = world.look(authority=MISSING)
    reason, message = ready_reason(decision)
    assert (reason, condition_statuses(decision)["Ready"]) == ("Training", "True")
    assert MISSING.problem in message
    assert [(n.reason, n.type) for n in decision.events] == [("NoAuthority", "Warning")]
    assert world.look(authority=MISSING).events == ()
    assert MISSING.problem not in ready_reason(world.look(authority=named()))[1]


def test_workers_that_wait_for_certificates_are_reported() -> None:
    world = World(dlion_job(tls=TLS))
    world.look(authority=named())
    world.make_jobs()
    world.run = RunView(open_s=1.0)
    assert ready_reason(world.look(authority=named()))[0] == "WorkersStarting"
    assert ready_reason(world.look(authority=MISSING))[0] == "NoAuthority"


@pytest.mark.parametrize("tls", [{"mode": "Managed"}, {"mode": "Disabled"}])
def test_other_jobs_need_no_authority(tls: dict[str, str]) -> None:
    opened = next(a for a in World(dlion_job(tls=tls)).look().actions if isinstance(a, OpenRun))
    assert opened.authority is None


# ---- served runs


class Others:
    """The reports of other sites."""

    def __init__(self) -> None:
        self.by_site: dict[SiteName, RunReport] = {}
        self.are_trusted = True

    def reports(self, run: object) -> dict[SiteName, RunReport]:
        return self.by_site

    def reachability(self, site: SiteName) -> SiteReachability:
        return SiteReachability(reachable=True, heartbeat_age_s=1.0)

    def problem(self, site: SiteName) -> str:
        return ""

    def has_bundle(self, site: SiteName) -> bool:
        return site == B and self.are_trusted

    def report(self, bundle_pem: bytes) -> None:
        workers = ReportedWorkers((WorkerIdentity(Rank(1), B, "g", 0),), (), settled=True)
        self.by_site[B] = RunReport(
            SpecFingerprint.of(job()), workers, TrainingFigures(), bundle_pem
        )


class Site:
    """The coordinator of plant A, without a port."""

    def __init__(self) -> None:
        self.authority = CertificateAuthority(A)
        self.server = CoordinatorServer("127.0.0.1:0", self.authority)
        self.others = Others()
        self.runs = SiteRuns(
            self.server, authority=self.authority, tokens=Tokens(), trigger=lambda _: None
        )
        self.runs.federate(self.others)

    def open(self, found: NamedAuthority | None, opened: Job | None = None, **kept: Any) -> None:
        opened = opened or job()
        workers = opened.workers()
        self.runs.open(OpenRun(opened, workers, spec_hash="", age_s=0.0, authority=found, **kept))

    def served(self, opened: Job | None = None) -> Any:
        return self.server.runs[(opened or job()).key]

    def trusted_bundles(self, opened: Job | None = None) -> dict[str, bytes]:
        """Return the bundles that the workers of the run trust."""
        bundles: dict[str, bytes] = self.served(opened)._all_bundles()
        return bundles

    def sign(self) -> bytes:
        worker = WorkerIdentity(Rank(0), A, "g", 0)
        signed: bytes = self.served()._authority(A).sign(WorkerKey().csr_pem(), worker, job().key)
        return signed


def test_the_jobs_authority_identifies_its_workers() -> None:
    site, given = Site(), GivenAuthority()
    site.open(named(given))
    assert site.trusted_bundles() == {A: given.own_pem}
    assert site.runs.reports()[job().key].bundle_pem == given.own_pem
    view = site.runs.view(job().key)
    assert view is not None
    assert view.bundles == {A: given.own_pem}


def test_the_sites_own_authority_and_other_bundles_are_not_trusted() -> None:
    site, given = Site(), GivenAuthority()
    managed = job("2", {"mode": "Managed"})
    site.open(named(given))
    site.server.trust({B: b"of all runs"})
    site.runs.replace_authority(site.authority.renewed())
    assert site.trusted_bundles() == {A: given.own_pem}
    site.open(None, managed)
    assert site.trusted_bundles(managed)[B] == b"of all runs"
    assert site.runs.reports()[managed.key].bundle_pem == b""


def test_other_sites_are_identified_by_their_report_of_the_run() -> None:
    site, given, theirs = Site(), GivenAuthority(), GivenAuthority("plant-b ca")
    site.open(named(given))
    site.others.report(theirs.own_pem)
    site.runs.update_remote(job().key)
    assert site.trusted_bundles() == {A: given.own_pem, B: theirs.own_pem}
    site.others.report(b"nonsense")
    site.runs.update_remote(job().key)
    assert site.trusted_bundles() == {A: given.own_pem}


def test_the_report_of_a_site_stays_valid_while_the_site_is_trusted() -> None:
    site, given, theirs = Site(), GivenAuthority(), GivenAuthority("plant-b ca")
    site.open(named(given))
    site.others.report(theirs.own_pem)
    site.runs.update_remote(job().key)
    site.others.by_site.clear()
    site.runs.update_remote(job().key)
    assert site.trusted_bundles() == {A: given.own_pem, B: theirs.own_pem}
    site.others.are_trusted = False
    site.open(named(given))
    assert B not in site.trusted_bundles()


def test_a_run_with_the_sites_own_authority_ignores_reports_of_other_sites() -> None:
    site, managed = Site(), job(tls={"mode": "Managed"})
    site.others.report(GivenAuthority().own_pem)
    site.open(None, managed)
    site.runs.update_remote(managed.key)
    assert site.trusted_bundles(managed) == {A: site.authority.bundle_pem}


def test_a_site_that_reports_no_authority_is_named() -> None:
    site = Site()
    site.open(named())
    site.others.report(b"")
    view = site.runs.view(job().key)
    assert view is not None
    assert view.remote[B].problem == NO_REMOTE_AUTHORITY
    site.others.report(GivenAuthority().own_pem)
    view = site.runs.view(job().key)
    assert view is not None
    assert view.remote[B].problem == ""


def test_two_sites_with_one_authority_do_not_trust_each_other() -> None:
    """Each of them could sign for the workers of the other."""
    site, given = Site(), GivenAuthority()
    site.open(named(given))
    site.others.report(GivenAuthority("another name", key=given.key).own_pem)
    site.runs.update_remote(job().key)
    assert site.trusted_bundles() == {A: given.own_pem}
    view = site.runs.view(job().key)
    assert view is not None
    assert "NoAuthority" in view.remote[B].problem
    assert "has the key of that of plant-a" in view.remote[B].problem
    theirs = GivenAuthority("plant-b ca")
    site.others.report(theirs.own_pem)
    site.runs.update_remote(job().key)
    assert site.trusted_bundles() == {A: given.own_pem, B: theirs.own_pem}
    view = site.runs.view(job().key)
    assert view is not None
    assert view.remote[B].problem == ""


def test_a_run_that_two_sites_began_with_one_authority_continues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Earlier releases allowed it. The next run differs."""
    site, given = Site(), GivenAuthority()
    both = {A: given.own_pem, B: given.own_pem}
    site.others.report(given.own_pem)
    site.open(named(given), kept_bundles=both)
    for _ in range(2):
        site.runs.update_remote(job().key)
        assert site.trusted_bundles() == both
    view = site.runs.view(job().key)
    assert view is not None
    assert view.remote[B].problem == ""
    assert caplog.text.count("plant-b is trusted in this run only") == 1
    site.open(named(given), job("2"))
    site.runs.update_remote(job("2").key)
    assert site.trusted_bundles(job("2")) == {A: given.own_pem}


def test_a_site_that_takes_another_sites_key_during_a_run_is_not_trusted() -> None:
    site, ours, theirs = Site(), GivenAuthority("ours"), GivenAuthority("theirs")
    site.others.report(theirs.own_pem)
    site.open(named(ours), kept_bundles={A: ours.own_pem, B: theirs.own_pem})
    site.open(named(theirs))
    for _ in range(2):
        site.runs.update_remote(job().key)
        assert set(site.trusted_bundles()) == {A}


def test_a_successor_signs_and_its_predecessor_stays_trusted() -> None:
    site, old, new = Site(), GivenAuthority("old"), GivenAuthority("new")
    site.open(named(old))
    site.open(named(new))
    assert site.trusted_bundles() == {A: new.own_pem + old.own_pem}


def test_without_the_authority_workers_keep_their_bundles() -> None:
    site = Site()
    site.open(MISSING)
    assert site.trusted_bundles() == {}
    with pytest.raises(CannotSignError, match="is not there"):
        site.sign()
    site.open(named())
    assert site.sign()


def test_a_restarted_operator_keeps_all_trust() -> None:
    site, old, theirs = Site(), GivenAuthority("old"), GivenAuthority("plant-b ca")
    kept = {A: old.own_pem, B: theirs.own_pem}
    site.open(MISSING, kept_bundles=kept)
    assert site.trusted_bundles() == kept
    new = GivenAuthority("new")
    site.open(named(new), kept_bundles={})
    assert site.trusted_bundles() == {A: new.own_pem + old.own_pem, B: theirs.own_pem}
