"""Test the renewal of a worker's certificate, with a real coordinator, client and mutual TLS.

The certificate is replaced repeatedly at half of its life. Links are notified each time, and the
newest certificate is stored on disk. The worker stays joined on new connections, and its reports
arrive once. While the coordinator is away or refuses, the worker reports that, uses its present
certificate, and renews it later. A trainer that restarts meanwhile uses the stored certificate
until its end, and the stored key of checkpoints.

Left out: links (test_renewed_links.py), whole runs (test_renewals.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from dlion_api.names import Rank, WorkerIdentity
from dlion_api.protocol.progress import EventRecord
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.reasons import EventReason
from dlion_operator.pki.authority import CertificateAuthority
from dlion_worker.coordination import CoordinationClient
from dlion_worker.security.credential_store import load_credentials, store_credentials
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey
from dlion_worker.trainer.background import certificate_renewal as renewing_module
from dlion_worker.trainer.background.certificate_renewal import (
    CertificateRenewer,
    initial_credentials,
)
from dlion_worker.trainer.signal_handler import Interrupted
from linked_workers import until
from local_run import job_document
from pod_run import UID, PodRun, pod_run

LIFE = timedelta(seconds=6)


@dataclass
class Renewed:
    """One worker that renews its certificate, and what it reports."""

    run: PodRun
    config: WorkerConfig
    client: CoordinationClient
    credentials: WorkerCredentials = field(init=False)
    links: list[bytes] = field(default_factory=list)
    reports: list[tuple[EventReason, str, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.credentials = initial_credentials(
            self.config, self.run.job, self.client, is_restart=False, interrupted=lambda: False
        )
        self.renewing = CertificateRenewer(
            self.config,
            self.run.job.key,
            credentials=self.credentials,
            coordination=self.client,
            migrate_links=lambda: self.links.append(self.credentials.key_and_chain()[1]),
            trust_changed=lambda: None,
            report=lambda reason, message, *, warning=False: self.reports.append(
                (reason, message, warning)
            ),
        )
        self.client.join("127.0.0.1:1", "", lambda _: None, self.renewing.trust)

    def reasons(self) -> list[EventReason]:
        """Return the reasons of its reports."""
        return [reason for reason, *_ in self.reports]

    def close(self) -> None:
        """End its threads."""
        self.renewing.close()
        self.client.close()


def config(run: PodRun, worker: WorkerIdentity) -> WorkerConfig:
    folder = run.folder
    (folder / "token").write_text(run.tokens.issue(worker, run.job.key))
    (folder / "ca.pem").write_bytes(run.coordinator.authority_pem)
    return WorkerConfig(
        job_document=run.job.to_document(),
        rank=worker.rank,
        coordinator_address=f"{run.address(100)}:{run.coordinator_port}",
        authority_pem_path=str(folder / "ca.pem"),
        token_path=str(folder / "token"),
        state_dir=str(folder),
        socket_path=str(folder / "s"),
        listen_host="127.0.0.1",
        advertise_host="127.0.0.1",
        data_root="",
        results_dir=str(folder),
    )


@pytest.fixture
def renewed(tmp_path: Path) -> Iterator[Renewed]:
    with pod_run(tmp_path, job_document(1), subnet=35, life=LIFE) as run:
        worker = run.job.worker(Rank(0))
        given = config(run, worker)
        client = CoordinationClient(
            given, job=run.job.key, worker=worker, spec_hash=run.job.hash(), incarnation=1
        )
        made = Renewed(run, given, client)
        try:
            yield made
        finally:
            made.close()


def joins(run: PodRun) -> int:
    return run.calls().get("Join", 0)


def test_a_worker_stays_joined_across_renewals(renewed: Renewed) -> None:
    run, client = renewed.run, renewed.client
    until(client.connected)
    first = renewed.credentials.key_and_chain()[1]
    renewed.renewing.start()
    for count in range(1, 4):
        until(lambda count=count: len(renewed.links) >= count and joins(run) > count)  # type: ignore[misc]
        client.report([EventRecord(0.0, Rank(0), count, "Test", f"report {count}")])
    renewed.renewing.close()
    chains = [first, *renewed.links]
    serials = [x509.load_pem_x509_certificate(chain).serial_number for chain in chains]
    assert len(set(serials)) == len(chains)
    assert set(renewed.reasons()) == {EventReason.CERTIFICATE_RENEWED}
    kept = load_credentials(renewed.config.state_dir, run.job.key)
    assert kept is not None
    assert kept.key_and_chain() == renewed.credentials.key_and_chain()
    until(client.connected)  # the coordinator counts a join before its answer arrives
    lost_before = sum(
        r.reason == "WorkerLost" for r in run.progress_records if isinstance(r, EventRecord)
    )
    assert client.close()
    messages = [
        record.message for record in run.progress_records if isinstance(record, EventRecord)
    ]
    assert [words for words in messages if words.startswith("report")] == [
        f"report {count}" for count in range(1, 4)
    ]
    assert lost_before == 0


def test_a_missing_coordinator_is_reported_and_awaited(
    renewed: Renewed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewing_module, "SIGNING_TIMEOUT_S", 3.0)
    run = renewed.run
    run.coordinator.close()
    renewed.renewing.start()
    until(lambda: EventReason.CERTIFICATE_NOT_RENEWED in renewed.reasons())
    assert renewed.links == []
    run.start_coordinator()
    until(lambda: EventReason.CERTIFICATE_RENEWED in renewed.reasons())  # reported after the links
    assert renewed.links


def test_a_refusal_is_reported_and_changes_nothing(renewed: Renewed) -> None:
    Path(renewed.config.token_path).write_text("of somebody else")
    before = renewed.credentials.key_and_chain()
    renewed.renewing.start()
    until(lambda: bool(renewed.reports))
    reason, words, warning = renewed.reports[0]
    assert reason is EventReason.CERTIFICATE_NOT_RENEWED
    assert warning
    assert "no certificate" in words
    assert renewed.credentials.key_and_chain() == before


DAY = timedelta(hours=24)


def store_certificate(renewed: Renewed, ago: timedelta) -> WorkerCredentials:
    """Store credentials as an earlier process of this worker did, with a certificate for a day."""
    run, worker = renewed.run, renewed.run.job.worker(Rank(0))
    authority = CertificateAuthority(worker.site, life=DAY, now=datetime.now(UTC) - ago)
    key = WorkerKey()
    chain = authority.sign(key.csr_pem(), worker, run.job.key, now=datetime.now(UTC) - ago)
    credentials = WorkerCredentials(key, chain, {worker.site: authority.bundle_pem})
    store_credentials(renewed.config.state_dir, run.job.key, credentials)
    return credentials


def credentials_after_restart(renewed: Renewed, within_s: float = 60.0) -> WorkerCredentials:
    """Request credentials as the next trainer process does; give up after a while."""
    give_up_s = time.monotonic() + within_s
    return initial_credentials(
        renewed.config,
        renewed.run.job,
        renewed.client,
        is_restart=True,
        interrupted=lambda: time.monotonic() > give_up_s,
    )


@pytest.mark.parametrize("hours", [15, 17, 23.9])
def test_stored_credentials_are_used_to_their_end_without_a_coordinator(
    renewed: Renewed, monkeypatch: pytest.MonkeyPatch, hours: float
) -> None:
    monkeypatch.setattr(renewing_module, "SIGNING_TIMEOUT_S", 1.0)
    kept = store_certificate(renewed, timedelta(hours=hours))
    renewed.run.coordinator.close()
    found = credentials_after_restart(renewed)
    assert found.key_and_chain() == kept.key_and_chain()
    authority, job = renewed.run.authorities[renewed.run.site], renewed.run.job
    assert found.checkpoint_key == authority.checkpoint_key(UID, job.key, Rank(0))


def test_a_worker_with_expired_stored_credentials_waits_for_new_ones(renewed: Renewed) -> None:
    store_certificate(renewed, timedelta(hours=24, seconds=1))
    renewed.run.coordinator.close()
    with pytest.raises(Interrupted):
        credentials_after_restart(renewed, within_s=2.0)


def test_stored_credentials_that_are_due_are_replaced(renewed: Renewed) -> None:
    old = store_certificate(renewed, timedelta(hours=17))
    new = credentials_after_restart(renewed)
    assert new.key_and_chain() != old.key_and_chain()
    kept = load_credentials(renewed.config.state_dir, renewed.run.job.key)
    assert kept is not None
    assert kept.key_and_chain() == new.key_and_chain()


def test_credentials_that_were_due_are_renewed_when_the_coordinator_returns(
    renewed: Renewed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewing_module, "SIGNING_TIMEOUT_S", 1.0)
    store_certificate(renewed, timedelta(hours=17))
    renewed.run.coordinator.close()
    credentials = credentials_after_restart(renewed)
    links: list[bytes] = []
    renewing = CertificateRenewer(
        renewed.config,
        renewed.run.job.key,
        credentials=credentials,
        coordination=renewed.client,
        migrate_links=lambda: links.append(credentials.key_and_chain()[1]),
        trust_changed=lambda: None,
        report=lambda *_, **__: None,
    )
    try:
        renewing.start()
        time.sleep(1.0)
        assert links == []
        renewed.run.start_coordinator()
        until(lambda: len(links) == 1)
        assert renewed.run.job.worker(Rank(0)).site in credentials.site_bundles_pem
    finally:
        renewing.close()
