"""The credentials of hostile and mistaken callers: certificates, tokens, signing requests."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from dlion_api.cluster_names import TOKEN_AUDIENCE
from dlion_api.names import KeeperIdentity, SiteName
from dlion_operator.pki.authority import CertificateAuthority
from dlion_operator.pki.certificate_issuer import Issuer, pem
from dlion_operator.pki.pod_tokens import expected_labels
from dlion_worker.security.credentials import WorkerKey
from hostile_scene import (
    A,
    B,
    Proof,
    Scene,
    of_worker,
)

MADE_UP_POD = "made-up"
Prove = Callable[[Scene], Proof | None]


def rightful(at: Scene) -> Proof:
    """The certificate of plant-b's worker."""
    return of_worker(at.authorities[B], at.worker(B), at.job)


def without_certificate(_: Scene) -> None:
    return None


def foreign(at: Scene) -> Proof:
    """From another authority that uses plant-b's name."""
    return of_worker(CertificateAuthority(B), at.worker(B), at.job)


def of_site_a(at: Scene) -> Proof:
    """From plant-a's valid authority for plant-b's worker."""
    return of_worker(at.authorities[A], at.worker(B), at.job)


def dated(days: float, at: Scene) -> Proof:
    """Signed that number of days from now."""
    now = datetime.now(UTC) + timedelta(days=days)
    return of_worker(at.authorities[B], at.worker(B), at.job, now=now)


def of_run(at: Scene, **changes: str) -> Proof:
    """The proof of the same worker in another run, job or namespace."""
    return of_worker(at.authorities[B], at.worker(B), replace(at.job, **changes))


def of_operator(at: Scene) -> Proof:
    """The proof of plant-b's operator."""
    made = at.authorities[B].operator_identity()
    return Proof(made.key_pem, made.certificate_chain_pem)


def of_keeper(site: SiteName, at: Scene) -> Proof:
    """The proof of that site's keeper."""
    return of_worker(at.authorities[site], KeeperIdentity(site), at.job)


def for_one_use(use: x509.ObjectIdentifier, at: Scene) -> Proof:
    """With the names of plant-b's worker, for a server or a client only."""
    stored, key, worker = at.authorities[B].to_stored(), WorkerKey(), at.worker(B)
    signing: Any = serialization.load_pem_private_key(stored.key_pem, password=None)
    issuer = Issuer(signing, x509.load_pem_x509_certificate(stored.certificate_pem))
    public: Any = x509.load_pem_x509_csr(key.csr_pem()).public_key()
    made = [
        x509.UniformResourceIdentifier(worker.spiffe_id(at.job)),
        x509.DNSName(worker.dns_name(at.job)),
    ]
    return Proof(key.pem(), pem(issuer.issue(public, made, [use], datetime.now(UTC))))


CLIENT_ONLY = partial(for_one_use, ExtendedKeyUsageOID.CLIENT_AUTH)
SERVER_ONLY = partial(for_one_use, ExtendedKeyUsageOID.SERVER_AUTH)
EXPIRED, EARLY = partial(dated, -2), partial(dated, 1)


def of_a(index: int) -> Prove:
    """Return the maker of a proof of plant-a's worker with that index."""
    return lambda at: of_worker(at.authorities[A], at.worker(A, index), at.job)


OF_WORKER, OF_NEXT = of_a(0), of_a(1)


def operator_of_b_by_a(at: Scene) -> Proof:
    """From plant-a's valid authority for plant-b's operator."""
    authority = CertificateAuthority(A, stored=at.authorities[A].to_stored())
    authority.site = B
    made = authority.operator_identity()
    return Proof(made.key_pem, made.certificate_chain_pem)


def foreign_operator(_: Scene) -> Proof:
    made = CertificateAuthority(B).operator_identity()
    return Proof(made.key_pem, made.certificate_chain_pem)


def expired_operator(at: Scene) -> Proof:
    made = at.authorities[B].operator_identity(now=datetime.now(UTC) - timedelta(days=2))
    return Proof(made.key_pem, made.certificate_chain_pem)


def token_for(audience: str, at: Scene) -> str:
    """A token of the right pod for another audience."""
    pod = at.pods.pod_of(at.victim)
    return _made(at, "default", *_bound_to(pod["name"]), audience=audience)


def token_of_no_pod(at: Scene) -> str:
    return _made(at, "default")


def token_of_another_account(at: Scene) -> str:
    """A token of another pod in the run's namespace."""
    with contextlib.suppress(Exception):
        at.kubectl.run("create", "serviceaccount", "somebody")
    at.kubectl.apply(_pod("somebodys", "somebody", {}))
    return _made(at, "somebody", *_bound_to("somebodys"))


def token_of_a_made_up_pod(at: Scene) -> str:
    """A token of a pod with the worker's labels and account, created beside the worker's own
    pod."""
    at.kubectl.apply(_pod(MADE_UP_POD, "default", expected_labels(at.victim, at.job)))
    return _made(at, "default", *_bound_to(MADE_UP_POD))


def token_of_another_namespace(at: Scene) -> str:
    """A token of a pod with the same labels."""
    elsewhere = replace(at.kubectl, namespace=f"{at.kubectl.namespace}-other")
    at.kubectl.run("create", "namespace", elsewhere.namespace)
    elsewhere.run("create", "serviceaccount", "worker")
    labels = expected_labels(at.victim, at.job)
    elsewhere.apply(_pod("same", "worker", labels))
    return _made(replace(at, kubectl=elsewhere), "worker", *_bound_to("same"))


def forged_token(algorithm: str, at: Scene) -> str:
    """The claims of the right token, signed by another key."""
    right = at.token(0)
    claims = jwt.decode(right, options={"verify_signature": False})
    headers = {"kid": jwt.get_unverified_header(right)["kid"]}
    if algorithm == "none":
        return jwt.encode(claims, "", algorithm="none", headers=headers)
    return jwt.encode(claims, WorkerKey().pem(), algorithm=algorithm, headers=headers)


def _pod(name: str, account: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """A pod without a controller."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {
            "serviceAccountName": account,
            "containers": [{"name": "c", "image": "none"}],
        },
    }


def _bound_to(pod: str) -> tuple[str, str]:
    return ("--bound-object-kind=Pod", f"--bound-object-name={pod}")


def _made(at: Scene, account: str, *bound: str, audience: str = TOKEN_AUDIENCE) -> str:
    return at.kubectl.run("create", "token", account, f"--audience={audience}", *bound).strip()


def rsa_csr() -> bytes:
    return _csr(rsa.generate_private_key(65537, 2048))


def tampered_csr() -> bytes:
    """A request with the signature of another request."""
    der = bytearray(base64.b64decode("".join(_csr(_ec()).decode().splitlines()[1:-1])))
    der[-1] ^= 1
    return x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM)


def _ec() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _csr(key: Any) -> bytes:
    request = x509.CertificateSigningRequestBuilder(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)
