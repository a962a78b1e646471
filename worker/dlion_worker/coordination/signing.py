"""Requests a certificate from the coordinator; the private key stays where it was made.

A trainer, sidecar or keeper calls this at its start and when its certificate is due for renewal.
`dlion_worker.security.credentials` makes the keys.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import grpc

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import JobKey, KeeperIdentity, SiteName, WorkerIdentity
from dlion_api.wire import coordination_pb2
from dlion_worker.coordination.backoff import Backoff
from dlion_worker.coordination.channel import (
    Caller,
    CallFailure,
    CoordinatorAccess,
    coordination_stub,
    failure_of,
    open_channel,
)
from dlion_worker.security.credential_store import make_pod_proof

_LOG = logging.getLogger(__name__)

Role = Literal["trainer", "sidecar", "keeper"]
_SLICE_S = 0.1


@dataclass(frozen=True)
class SignedCertificate:
    """The signed chain, the CA bundle of every site of the run, and a trainer's key."""

    chain_pem: bytes
    site_bundles_pem: Mapping[SiteName, bytes]
    checkpoint_key: bytes = field(default=b"", repr=False)
    """Authenticates the trainer's checkpoints; empty: nothing does."""


def request_certificate(
    config: CoordinatorAccess,
    *,
    job: JobKey,
    worker: WorkerIdentity | KeeperIdentity,
    csr_pem: bytes,
    role: Role,
    stopped: Callable[[], bool] = lambda: False,
    wait_s: float = math.inf,
) -> SignedCertificate:
    """Request a certificate; if the coordinator is unreachable, retry with backoff.

    `stopped` is checked ten times a second. Raises: UnavailableError (stopped or timed out without
    a certificate; a retry may help), ContractError (the coordinator rejects the request
    permanently).
    """
    caller = Caller(job, worker, Path(config.token_path))
    deadline_s = time.monotonic() + wait_s
    backoff = Backoff()
    last_message = ""

    def given_up() -> bool:
        return stopped() or time.monotonic() > deadline_s

    while True:
        outcome = _attempt(config, caller, csr_pem, role, given_up)
        if isinstance(outcome, SignedCertificate):
            return outcome
        if not outcome.passing:
            raise ContractError(f"{worker.name}: no certificate for {job}: {outcome.message}")
        if outcome.message != last_message:
            _LOG.warning("%s: no certificate yet: %s", worker.name, outcome.message)
            last_message = outcome.message
        pause_until_s = time.monotonic() + backoff.next_s()
        while (left_s := pause_until_s - time.monotonic()) > 0:
            if given_up():
                raise UnavailableError(f"{worker.name}: no certificate: {outcome.message}")
            time.sleep(min(_SLICE_S, left_s))


def _attempt(
    config: CoordinatorAccess,
    caller: Caller,
    csr_pem: bytes,
    role: Role,
    given_up: Callable[[], bool],
) -> SignedCertificate | CallFailure:
    try:
        request = coordination_pb2.SignRequest(
            token=caller.token(),
            run=str(caller.job),
            worker=caller.wire_worker(),
            role=role,
            csr_pem=csr_pem,
            proof=make_pod_proof(config.proof_dir, job=caller.job, use=role, csr_pem=csr_pem),
        )
        with open_channel(config) as channel:
            call = coordination_stub(channel).Sign.future(request)
            while True:
                try:
                    return _certificate(call.result(timeout=_SLICE_S))
                except grpc.FutureTimeoutError:
                    if given_up():
                        call.cancel()
                        return CallFailure(None, "the coordinator did not answer")
    except (grpc.RpcError, OSError) as error:
        return failure_of(error)


def _certificate(response: coordination_pb2.SignResponse) -> SignedCertificate:
    bundles = {SiteName(site): pem for site, pem in response.site_bundles_pem.items()}
    return SignedCertificate(response.certificate_chain_pem, bundles, response.checkpoint_key)
