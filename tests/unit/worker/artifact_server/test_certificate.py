"""Tests of a keeper's certificate.

It is renewed after half of its life. If the job names the authority, it is renewed twice a minute,
because the authority's successor may sign for workers at any time. A new certificate goes into the
credentials that the port and the service hold.

Left out: the request and TLS (tests/local/test_pods).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dlion_api.names import SiteName
from dlion_api.spec import load_job
from dlion_operator.pki.authority import CertificateAuthority
from dlion_worker.artifact_server.certificate import NAMED_RENEWAL_S, KeeperCertificate
from dlion_worker.artifact_server.config import KeeperConfig
from dlion_worker.coordination.signing import SignedCertificate
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey
from local_run import job_document

SITE = SiteName("plant-a")


@pytest.mark.parametrize(
    ("tls", "due_s"),
    [
        ({"mode": "Managed"}, 86400 / 2),
        ({"mode": "Secret", "secretName": "plant-ca"}, NAMED_RENEWAL_S),
        ({"mode": "CertManager", "issuerName": "example-pki"}, NAMED_RENEWAL_S),
    ],
)
def test_a_certificate_is_renewed_in_time(tls: dict[str, str], due_s: float) -> None:
    job, key = load_job(job_document(1, tls=tls)), WorkerKey()
    config = KeeperConfig(job, SITE, Path(), "", "", "", Path(), "", 0)
    signed = CertificateAuthority(SITE).sign(key.csr_pem(), config.identity, job.key)
    certificate = KeeperCertificate(config, on_renewed=lambda: None)
    certificate.credentials = WorkerCredentials(key, signed, {})
    assert certificate._renewal_s() == pytest.approx(due_s)


def test_a_renewed_certificate_goes_into_the_same_credentials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = load_job(job_document(1, tls={"mode": "Managed"}))
    config = KeeperConfig(job, SITE, Path(), "", "", "", Path(), "", 0)
    authority, others = CertificateAuthority(SITE), {SiteName("elsewhere"): b"foreign"}

    def signed(_config: KeeperConfig, *, csr_pem: bytes, **_: Any) -> SignedCertificate:
        chain = authority.sign(csr_pem, config.identity, job.key)
        return SignedCertificate(chain, {SITE: authority.bundle_pem, **others})

    monkeypatch.setattr("dlion_worker.artifact_server.certificate.request_certificate", signed)
    certificate = KeeperCertificate(config, on_renewed=lambda: None)
    assert not certificate.credentials.enabled
    asyncio.run(certificate.obtain())
    held = certificate.credentials
    first = held.key_and_chain()
    asyncio.run(certificate.obtain())
    assert certificate.credentials is held
    assert held.renewals == 1
    assert held.key_and_chain() != first
    assert held.site_bundles_pem == {SITE: authority.bundle_pem}
