"""Test the Secret of a site's authority, and the ConfigMap with its certificates.

- The authority is created once and read again. The second of two operators takes that of the first.
- An unusable Secret is named and kept. A certificate near its end is renewed and stored; the
  previous one stays trusted.
- The certificates appear without the key, are written only on a change, and soon again after a
  failure. A ConfigMap of another owner stays.
- Both belong to the Service that the settings name. They belong to none if there is no such Service
  or it cannot be read.
- A Secret that was deleted under a running operator returns with the same key, unless the release
  is uninstalled. A renewal counts once it is stored.

The API server keeps one Secret, one ConfigMap and one Service in memory.

Left out: certificates themselves (tests/unit/worker/transport/test_authority.py), a real API
server.
"""

from __future__ import annotations

import asyncio
import base64
import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dlion_api.errors import ContractError
from dlion_api.names import SiteName
from dlion_operator.kubernetes.client import ConflictError, Document, Kind, RequestRefusedError
from dlion_operator.model.settings import Settings
from dlion_operator.pki import authority_secret
from dlion_operator.pki.authority import CertificateAuthority
from dlion_operator.pki.authority_secret import AuthoritySecret
from operator_world import SETTINGS

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
LATER = BEGAN + timedelta(days=300)
SERVICE = "dlion-operator"
GOES = replace(SETTINGS, authority=replace(SETTINGS.authority, owner_service=SERVICE))


class OneSecret:
    """The part of a `Cluster` that keeps a Secret."""

    def __init__(self) -> None:
        self.secret: Document | None = None
        self.writes = 0
        self.shown: Document | None = None
        self.refuses = False
        self.service: Document | None = {"metadata": {"uid": "uid-1"}}
        self.is_collected = False
        """Whether the Secret and its owner are deleted between a read and a patch."""
        self.rival: Document | None = None
        """The object that another client creates between our read and our write."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Document | None:
        wanted = SERVICE if kind is Kind.SERVICE else SETTINGS.authority.secret_name
        assert (namespace, name) == ("dlion", wanted)
        if self.refuses:
            raise RequestRefusedError("no right", 403)
        if kind is Kind.SERVICE:
            return self.service
        return copy.deepcopy({Kind.SECRET: self.secret, Kind.CONFIG_MAP: self.shown}[kind])

    async def apply(self, document: Document) -> None:
        self.shown = copy.deepcopy(document)
        self.writes += 1

    async def create(self, document: Document, *, dry_run: bool = False) -> Document:
        if self.rival is not None:
            self.secret, self.rival = self.rival, None
        if self.secret is not None:
            raise ConflictError("it is there")
        self.secret = copy.deepcopy(document)
        self.writes += 1
        return document

    async def patch(
        self, kind: Kind, namespace: str, name: str, patch: Document
    ) -> Document | None:
        if self.secret is None or self.is_collected:
            self.secret = None
            return None
        for part, values in patch.items():
            self.secret[part] |= values
        self.writes += 1
        return self.secret


def loaded(
    cluster: OneSecret, now: datetime = BEGAN, settings: Settings = SETTINGS
) -> CertificateAuthority:
    return asyncio.run(AuthoritySecret(cluster, settings, "dlion").load(now=now))  # type: ignore[arg-type]


def test_the_authority_is_created_once_and_read_again() -> None:
    cluster = OneSecret()
    made = loaded(cluster)
    assert loaded(cluster).to_stored() == made.to_stored()
    assert cluster.writes == 1


def test_the_second_operator_takes_the_authority_of_the_first() -> None:
    first, second = OneSecret(), OneSecret()
    made = loaded(first)
    second.rival = first.secret
    assert loaded(second).to_stored() == made.to_stored()
    assert second.writes == 0


@pytest.mark.parametrize("changed", [{"tls.key": "!"}, {"tls.crt": ""}, {"tls.key": None}], ids=str)
def test_an_unusable_secret_is_named_and_kept(changed: dict[str, Any]) -> None:
    cluster = OneSecret()
    loaded(cluster)
    assert cluster.secret is not None
    cluster.secret["data"] |= changed
    with pytest.raises(
        ContractError, match=f"Secret dlion/{SETTINGS.authority.secret_name}: .*del"
    ):
        loaded(cluster)
    assert cluster.writes == 1


def test_the_authority_is_renewed_and_stored_when_due() -> None:
    cluster = OneSecret()
    made = loaded(cluster)
    renewed = loaded(cluster, LATER)
    assert renewed.bundle_pem.endswith(made.bundle_pem)
    assert len(renewed.bundle_pem) > len(made.bundle_pem)
    assert cluster.secret is not None
    assert base64.b64decode(cluster.secret["data"]["tls.crt"]) == renewed.bundle_pem
    again = asyncio.run(
        AuthoritySecret(cluster, SETTINGS, "dlion").renewed_if_due(renewed, now=LATER)  # type: ignore[arg-type]
    )
    assert again is renewed
    assert loaded(cluster, LATER).to_stored() == renewed.to_stored()
    assert cluster.writes == 2


def owners(document: Document | None) -> list[tuple[str, str]]:
    """Return kind and UID of each owner."""
    assert document is not None
    references = document["metadata"].get("ownerReferences") or ()
    return [(each["kind"], each["uid"]) for each in references]


def test_the_secret_belongs_to_the_service_while_one_is_named() -> None:
    cluster = OneSecret()
    made = loaded(cluster, settings=GOES)
    show(cluster, made, GOES)
    assert owners(cluster.secret) == owners(cluster.shown) == [("Service", "uid-1")]
    cluster.service = {"metadata": {"uid": "uid-2"}}  # the release was installed again
    assert loaded(cluster, settings=GOES).to_stored() == made.to_stored()
    show(cluster, made, GOES)
    assert owners(cluster.secret) == owners(cluster.shown) == [("Service", "uid-2")]
    writes = cluster.writes
    loaded(cluster, settings=GOES)
    show(cluster, made, GOES)
    assert cluster.writes == writes
    assert loaded(cluster).to_stored() == made.to_stored()
    show(cluster, made)
    assert owners(cluster.secret) == owners(cluster.shown) == []


def test_a_secret_deleted_before_its_use_is_created_again() -> None:
    cluster = OneSecret()
    before = loaded(cluster, settings=GOES)
    cluster.service, cluster.is_collected = {"metadata": {"uid": "uid-2"}}, True
    made = loaded(cluster, settings=GOES)
    assert made.to_stored() != before.to_stored()
    assert owners(cluster.secret) == [("Service", "uid-2")]


def test_secrets_of_other_makers_or_owners_are_not_taken_over() -> None:
    cluster = OneSecret()
    loaded(cluster)
    assert cluster.secret is not None
    theirs = [{"kind": "Certificate", "uid": "uid-9"}]
    cluster.secret["metadata"]["ownerReferences"] = theirs
    loaded(cluster, settings=GOES)
    assert owners(cluster.secret) == [("Certificate", "uid-9"), ("Service", "uid-1")]
    loaded(cluster)
    assert owners(cluster.secret) == [("Certificate", "uid-9")]
    cluster.secret["metadata"] |= {"labels": {}, "ownerReferences": None}
    loaded(cluster, settings=GOES)
    assert owners(cluster.secret) == []


def test_without_the_service_the_secret_has_no_owner_and_the_log_reports_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = OneSecret()
    cluster.service = None
    loaded(cluster, settings=GOES)
    assert owners(cluster.secret) == []
    assert "dlion/dlion-operator (authority.ownerService), and stays when" in caplog.text


def show(
    cluster: OneSecret, authority: CertificateAuthority, settings: Settings = SETTINGS
) -> bool:
    return asyncio.run(AuthoritySecret(cluster, settings, "dlion").publish(authority))  # type: ignore[arg-type]


def test_certificates_are_published_without_the_key_and_written_once() -> None:
    cluster, authority = OneSecret(), CertificateAuthority(SiteName("plant-a"), now=BEGAN)
    for _ in range(2):
        show(cluster, authority)
        assert cluster.shown is not None
        assert cluster.shown["kind"] == "ConfigMap"
        assert cluster.shown["data"] == {"ca.crt": authority.bundle_pem.decode()}
        assert cluster.writes == 1
    renewed = authority.renewed(now=LATER)
    show(cluster, renewed)
    assert cluster.shown["data"] == {"ca.crt": renewed.bundle_pem.decode()}


def test_nothing_waits_for_certificates_that_may_not_be_published(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = OneSecret()
    cluster.refuses = True
    assert not show(cluster, CertificateAuthority(SiteName("plant-a")))
    assert "are not published yet: no right" in caplog.text


def test_a_config_map_of_another_owner_is_kept_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = OneSecret()
    theirs: Document = {"metadata": {"labels": {"app": "other"}}, "data": {"ca.crt": "theirs"}}
    cluster.shown = copy.deepcopy(theirs)
    assert not show(cluster, CertificateAuthority(SiteName("plant-a")))
    assert cluster.shown == theirs
    assert f"ConfigMap dlion/{SETTINGS.authority.secret_name} exists already" in caplog.text


def test_certificates_that_could_not_be_published_are_retried_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, authority = OneSecret(), CertificateAuthority(SiteName("plant-a"))
    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)
        cluster.refuses = len(waits) == 1
        if len(waits) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr(authority_secret.asyncio, "sleep", wait)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(
            AuthoritySecret(cluster, SETTINGS, "dlion").maintain(authority, lambda _: None)  # type: ignore[arg-type]
        )
    assert cluster.shown is not None
    assert waits == [60.0, 60.0, 3600.0]


class Rounds:
    """Maintains an authority for some rounds, without waiting."""

    def __init__(self, cluster: OneSecret, patched: pytest.MonkeyPatch) -> None:
        self.cluster, self.patched = cluster, patched
        self.waits: list[float] = []
        self.successors: list[CertificateAuthority] = []

    def run(
        self, authority: CertificateAuthority, settings: Settings = GOES, *, count: int = 1
    ) -> None:
        self.waits.clear()

        async def wait(seconds: float) -> None:
            self.waits.append(seconds)
            if len(self.waits) > count:
                raise asyncio.CancelledError

        self.patched.setattr(authority_secret.asyncio, "sleep", wait)
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(
                AuthoritySecret(self.cluster, settings, "dlion").maintain(
                    authority, self.successors.append
                )  # type: ignore[arg-type]
            )


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Rounds:
    return Rounds(OneSecret(), monkeypatch)


@pytest.mark.parametrize("settings", [SETTINGS, GOES], ids=["kept", "goes"])
def test_a_secret_deleted_under_a_running_operator_is_restored(
    rounds: Rounds, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, now = rounds.cluster, datetime.now(UTC)
    made = loaded(cluster, now, settings)
    cluster.service = {
        "metadata": {"uid": "uid-2"}
    }  # created again: children of the first one are deleted
    cluster.secret = cluster.shown = None
    rounds.run(made, settings)
    assert loaded(cluster, now, settings).to_stored() == made.to_stored()
    expected = [("Service", "uid-2")] if settings is GOES else []
    assert owners(cluster.secret) == owners(cluster.shown) == expected
    assert "was deleted and has been restored" in caplog.text
    assert rounds.waits == [60.0, 3600.0]
    writes = cluster.writes
    rounds.run(made, settings)
    assert cluster.writes == writes


def test_a_secret_gets_a_recreated_service_as_owner_before_it_is_deleted(
    rounds: Rounds,
) -> None:
    made = loaded(rounds.cluster, datetime.now(UTC), GOES)
    rounds.cluster.service = {"metadata": {"uid": "uid-2"}}
    rounds.run(made)
    assert owners(rounds.cluster.secret) == [("Service", "uid-2")]
    rounds.cluster.service, rounds.cluster.is_collected = {"metadata": {"uid": "uid-3"}}, True
    rounds.run(made)  # it is deleted between the read and the write
    assert owners(rounds.cluster.secret) == [("Service", "uid-3")]


@pytest.mark.parametrize(
    "service",
    [None, {"metadata": {"uid": "uid-1", "deletionTimestamp": "2026-01-01T00:00:00Z"}}],
    ids=["gone", "goes"],
)
def test_nothing_is_restored_while_the_release_is_uninstalled(
    rounds: Rounds, service: Document | None
) -> None:
    cluster = rounds.cluster
    made = loaded(cluster, datetime.now(UTC), GOES)
    show(cluster, made, GOES)
    cluster.service = service
    writes = cluster.writes
    rounds.run(made)
    assert owners(cluster.secret) == owners(cluster.shown) == [("Service", "uid-1")]
    cluster.secret = cluster.shown = None
    rounds.run(made, count=2)
    assert (cluster.secret, cluster.shown, cluster.writes) == (None, None, writes)
    assert rounds.waits == [60.0, 60.0, 60.0]  # it may be created again


def test_a_renewal_without_its_secret_does_not_count(
    rounds: Rounds, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, now = rounds.cluster, datetime.now(UTC)
    old = loaded(cluster, now - timedelta(days=300), GOES)
    cluster.is_collected = True
    with caplog.at_level("INFO"):
        rounds.run(old)
    assert rounds.successors == []
    assert "was renewed" not in caplog.text
    cluster.is_collected = False
    rounds.run(old)
    (renewed,) = rounds.successors
    assert len(renewed.bundle_pem) > len(old.bundle_pem)
    assert loaded(cluster, now, GOES).to_stored() == renewed.to_stored()
    assert cluster.shown is not None
    assert cluster.shown["data"] == {"ca.crt": renewed.bundle_pem.decode()}


def test_an_operator_that_may_not_read_the_service_restores_nothing(rounds: Rounds) -> None:
    rounds.cluster.refuses = True
    rounds.run(CertificateAuthority(SiteName("plant-a")))
    assert rounds.cluster.secret is None
