"""Test the keys that authenticate workers' checkpoints.

A worker gets the same key from a restarted operator and from a renewed authority, and another one
for each rank, run, job, UID and site. Only a trainer with its own token gets it.

Left out: the calls over gRPC (tests/local/test_checkpoint_macs).
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from dlion_api.names import JobKey, KeeperIdentity, Rank, SiteName, WorkerIdentity
from dlion_api.spec import Job, load_job
from dlion_api.wire.coordination_pb2 import SignRequest, Worker
from dlion_operator.coordinator import CoordinatorServer
from dlion_operator.coordinator.events import CallRefusedError
from dlion_operator.pki.authority import CertificateAuthority, Tokens
from dlion_operator.plan.decisions import OpenRun
from dlion_operator.served_runs.site_runs import SiteRuns
from dlion_worker.security.credentials import WorkerKey
from local_run import job_document

SITE = SiteName("plant-a")
KEY = JobKey("default", "digits", "1")
UID = "11111111-2222-3333-4444-555555555555"


def test_a_key_outlasts_the_operator_and_a_renewal() -> None:
    authority = CertificateAuthority(SITE)
    key = authority.checkpoint_key(UID, KEY, Rank(1))
    assert len(key) == 32
    restarted = CertificateAuthority(SITE, stored=authority.to_stored())
    renewed = restarted.renewed(now=datetime.now(UTC) + timedelta(days=300))
    for later in (restarted, renewed):
        assert later.checkpoint_key(UID, KEY, Rank(1)) == key


def test_each_worker_run_job_and_site_has_its_own_key() -> None:
    authority = CertificateAuthority(SITE)
    keys = [
        authority.checkpoint_key(UID, KEY, Rank(1)),
        authority.checkpoint_key(UID, KEY, Rank(11)),
        authority.checkpoint_key("another", KEY, Rank(1)),
        authority.checkpoint_key(UID, JobKey("default", "digits", "2"), Rank(1)),
        authority.checkpoint_key(UID, JobKey("default", "another", "1"), Rank(1)),
        authority.checkpoint_key(UID, JobKey("another", "digits", "1"), Rank(1)),
        CertificateAuthority(SITE).checkpoint_key(UID, KEY, Rank(1)),
    ]
    assert len(set(keys)) == len(keys)


class Site:
    """A coordinator without a port that serves a run of two workers."""

    def __init__(self, *, job_uid: str) -> None:
        self.job: Job = load_job(job_document(2))
        self.tokens = Tokens()
        site = self.job.spec.sites[0].name
        self.authority = CertificateAuthority(SiteName(site))
        self.server = CoordinatorServer("127.0.0.1:0", self.authority)
        runs = SiteRuns(
            self.server, authority=self.authority, tokens=self.tokens, trigger=lambda _: None
        )
        runs.open(OpenRun(self.job, self.job.workers(), spec_hash="", age_s=0.0, job_uid=job_uid))

    def key(self, role: str, rank: int, *, token_of: int | None = None) -> bytes:
        """Return the key that a process of that role gets."""
        worker = self.job.worker(Rank(rank))
        bearer: WorkerIdentity | KeeperIdentity = self.job.worker(
            Rank(rank if token_of is None else token_of)
        )
        if role == "keeper":
            bearer = KeeperIdentity(worker.site)
        request = SignRequest(
            token=self.tokens.issue(bearer, self.job.key),
            run=str(self.job.key),
            worker=Worker(rank=rank, site=worker.site, group=worker.group, index=worker.index),
            role=role,
            csr_pem=WorkerKey().csr_pem(),
        )
        response = asyncio.run(self.server.runs[self.job.key].sign(request))
        assert response.certificate_chain_pem
        return response.checkpoint_key


def test_only_a_trainer_gets_its_key() -> None:
    site = Site(job_uid=UID)
    for rank in range(2):
        expected = site.authority.checkpoint_key(UID, site.job.key, Rank(rank))
        assert site.key("trainer", rank) == expected
    assert site.key("sidecar", 0) == site.key("keeper", 0) == b""
    with pytest.raises(CallRefusedError):
        site.key("trainer", 0, token_of=1)


def test_a_run_without_a_uid_has_no_keys() -> None:
    """As with `dlion run`: its authority lasts as long as one start of it."""
    assert Site(job_uid="").key("trainer", 0) == b""
