"""Test how the operator reads the Secret that a job names.

- It reads the Secret by name, rarely while it is usable and often while it is not.
- The problem names the Secret, the remedy and the time since it began. A new authority signs from
  the next look.
- An API server that does not answer changes nothing.
- Jobs that name no Secret, and jobs of other sites, read nothing.

The API server keeps one Secret.

Left out: which authorities are usable (test_job_authority), a real API server (tests/cluster).
"""

from __future__ import annotations

import asyncio
import copy
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dlion_api import cluster_names as names
from dlion_operator.kubernetes.client import Document, Kind, RequestRefusedError, ServerError
from dlion_operator.pki.named_authority import NamedAuthority
from dlion_operator.pki.named_secret import (
    CERT_MANAGER_ANNOTATION,
    READ_INTERVAL_S,
    RETRY_S,
    NamedSecret,
)
from given_authorities import GivenAuthority
from operator_world import SETTINGS, dlion_job

JOB = dlion_job(tls={"mode": "Secret", "secretName": "plant-ca"})


class Scene:
    """A Secret, its reader and the time."""

    def __init__(self) -> None:
        self.secret: Document | None = None
        self.name = "plant-ca"
        self.certificate: Document | None = None
        self.error: Exception | None = None
        self.reads = 0
        self.now = datetime.now(UTC)
        self.monotonic_s = 100.0
        self.reader = NamedSecret(
            self,  # type: ignore[arg-type]  # no more of a Cluster is needed
            SETTINGS,
            now=lambda: self.now,
            monotonic_s=lambda: self.monotonic_s,
        )

    async def get(self, kind: Kind, namespace: str, name: str) -> Document | None:
        if kind is Kind.CERTIFICATE:
            assert (namespace, name) == ("default", "digits-authority")
            return self.certificate
        assert (kind, namespace, name) == (Kind.SECRET, "default", self.name)
        self.reads += 1
        if self.error is not None:
            raise self.error
        return copy.deepcopy(self.secret)

    def read(self, document: Document = JOB) -> NamedAuthority | None:
        return asyncio.run(self.reader.read(document))

    def found(self, document: Document = JOB) -> NamedAuthority:
        looked = self.read(document)
        assert looked is not None
        return looked

    def wait(self, seconds: float) -> None:
        self.monotonic_s += seconds
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_new_secret_is_found_soon(scene: Scene) -> None:
    assert "Secret default/plant-ca: does not exist: create it" in scene.found().problem
    scene.wait(RETRY_S)
    assert scene.found().missing_s == RETRY_S
    scene.secret = GivenAuthority().secret()
    scene.wait(RETRY_S)
    assert scene.found().issuer is not None
    assert scene.found() == NamedAuthority(scene.found().issuer)


def test_a_usable_secret_is_read_rarely(scene: Scene) -> None:
    scene.secret = GivenAuthority().secret()
    issuer = scene.found().issuer
    for _ in range(9):
        scene.wait(READ_INTERVAL_S / 10)
        assert scene.found().issuer is issuer
    assert scene.reads == 1
    scene.wait(READ_INTERVAL_S / 10)
    assert scene.found().issuer is issuer
    assert scene.reads == 2


def test_a_new_authority_signs_from_the_next_look(scene: Scene) -> None:
    scene.secret = GivenAuthority("old").secret()
    scene.found()
    new = GivenAuthority("new")
    scene.secret = new.secret()
    scene.wait(READ_INTERVAL_S)
    issuer = scene.found().issuer
    assert issuer is not None
    assert issuer.certificate == new.certificate


def without(secret: Document, key: str) -> Document:
    del secret["data"][key]
    return secret


def with_data(secret: Document, value: str) -> Document:
    secret["data"]["tls.crt"] = value
    return secret


WRONG = {
    "no key": (without(GivenAuthority().secret(), "tls.key"), "lacks tls.key"),
    "no data": ({"metadata": {}}, "lacks tls.crt"),
    "no base64": (with_data(GivenAuthority().secret(), "ä"), "tls.crt is not base64"),
    "too long": (with_data(GivenAuthority().secret(), "A" * 100_000), "longer than"),
    "no authority": (GivenAuthority(is_authority=False).secret(), "of no authority"),
    "other job": (
        GivenAuthority().secret(**{names.JOB_LABEL: "other"}), "belongs to job other",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_problem_is_reported_and_nothing_signs(scene: Scene, case: str) -> None:
    scene.secret, words = WRONG[case]
    found = scene.found()
    assert found.issuer is None
    assert found.problem.startswith("Secret default/plant-ca: ")
    assert words in found.problem


def test_the_label_of_the_job_itself_is_allowed(scene: Scene) -> None:
    scene.secret = GivenAuthority().secret(**{names.JOB_LABEL: "digits"})
    assert scene.found().issuer is not None


def test_a_missing_right_is_reported_with_the_value_that_grants_it(scene: Scene) -> None:
    scene.error = RequestRefusedError("secrets is forbidden", 403)
    assert "tls.secretNames" in scene.found().problem


def test_a_lost_authority_no_longer_signs(scene: Scene) -> None:
    scene.secret = GivenAuthority().secret()
    assert scene.found().issuer is not None
    scene.secret = None
    scene.wait(READ_INTERVAL_S)
    assert scene.found().issuer is None


def test_an_expired_authority_no_longer_signs(scene: Scene) -> None:
    scene.secret = GivenAuthority(life=timedelta(hours=2)).secret()
    assert scene.found().issuer is not None
    scene.wait(2 * 3600.0)  # its last hour begins later than the scene, by any time
    assert "expired on" in scene.found().problem


def test_a_server_that_does_not_answer_changes_nothing(scene: Scene) -> None:
    scene.error = ServerError("503")
    assert "cannot be read yet" in scene.found().problem
    scene.error, scene.secret = None, GivenAuthority().secret()
    scene.wait(RETRY_S)
    issuer = scene.found().issuer
    scene.error = ServerError("503")
    scene.wait(READ_INTERVAL_S)
    assert scene.found() == NamedAuthority(issuer)


def test_another_run_is_evaluated_again(scene: Scene) -> None:
    scene.secret = GivenAuthority().secret()
    issuer = scene.found().issuer
    again = dlion_job(tls=JOB["spec"]["tls"], runId="2")
    found = scene.found(again)
    assert found.issuer is not None
    assert found.issuer is not issuer


ISSUED = dlion_job(tls={"mode": "CertManager", "issuerName": "example-pki"})


def test_the_secret_of_cert_manager_for_the_job_is_read(scene: Scene) -> None:
    scene.name = "digits-authority"
    assert "tls.certManager" in scene.found(ISSUED).problem
    scene.certificate = {"metadata": {}}
    scene.wait(RETRY_S)
    assert "it has no status so far" in scene.found(ISSUED).problem
    ready = {"type": "Ready", "message": "Issuing certificate as Secret does not exist"}
    scene.certificate["status"] = {"conditions": [ready]}
    scene.wait(RETRY_S)
    problem = scene.found(ISSUED).problem
    assert "is not issued by cert-manager yet: Issuing certificate as Secret" in problem
    assert "kubectl describe certificate digits-authority" in problem
    scene.secret = GivenAuthority().secret("digits-authority")
    scene.wait(RETRY_S)
    assert (
        "delete or rename it" in scene.found(ISSUED).problem
    )  # it was issued for no job that requested it
    scene.secret["metadata"]["annotations"] = {CERT_MANAGER_ANNOTATION: "digits-authority"}
    scene.wait(RETRY_S)
    assert scene.found(ISSUED).issuer is not None


def test_a_missing_right_on_certificates_is_reported_with_its_value(scene: Scene) -> None:
    scene.name, scene.error = "digits-authority", RequestRefusedError("secrets is forbidden", 403)
    assert "set tls.certManager" in scene.found(ISSUED).problem


ELSEWHERE: list[dict[str, Any]] = [
    dlion_job(),
    dlion_job(tls={"mode": "Disabled"}),
    dlion_job(
        tls=JOB["spec"]["tls"], sites=[{"name": "b", "groups": [{"name": "g", "workers": 1}]}]
    ),
    {**JOB, "spec": {**JOB["spec"], "tls": {"mode": "Secret"}}},
    {**JOB, "spec": {**JOB["spec"], "tls": "Secret"}},
    {**JOB, "spec": None},
]


@pytest.mark.parametrize("document", ELSEWHERE)
def test_jobs_that_name_no_secret_here_read_nothing(scene: Scene, document: Document) -> None:
    assert scene.read(document) is None
    assert scene.reads == 0
