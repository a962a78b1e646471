"""Hostile and mistaken connections: the caller, the answer, and the process that reports it.

`table` is the matrix as documents and tests print it; `hostile_scene` is the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from dlion_api.names import SiteName
from dlion_api.protocol.refusals import MAX_CSR_BYTES
from dlion_api.wire import coordination_pb2
from dlion_core.links.framing import MAX_FRAME_BYTES, PROTOCOL
from dlion_operator.federation.messages import MAX_STATEMENT_BYTES, site_hello
from dlion_worker.artifact_client.paths import checkpoint_path
from dlion_worker.sidecar.measuring_service import MAX_MESSAGE_BYTES
from hostile_answers import (
    dialled,
    dialled_coordinator,
    dialled_keeper,
    dialled_operator,
    unknown_site,
)
from hostile_calls import (
    GREETING,
    OTHER,
    Act,
    by_another_key,
    federate,
    for_another_request,
    garbage,
    greeted,
    hello,
    join,
    join_in_its_place,
    link,
    old_tls,
    other_job,
    other_namespace,
    other_run,
    plain,
    put,
    sends,
    share,
    sign,
    sign_for_a_deleted_pod,
    sign_for_a_made_up_pod,
    unproven,
)
from hostile_proofs import (
    CLIENT_ONLY,
    EARLY,
    EXPIRED,
    OF_NEXT,
    SERVER_ONLY,
    expired_operator,
    foreign,
    foreign_operator,
    forged_token,
    of_keeper,
    of_operator,
    of_run,
    of_site_a,
    operator_of_b_by_a,
    rightful,
    rsa_csr,
    tampered_csr,
    token_for,
    token_of_another_account,
    token_of_another_namespace,
    token_of_no_pod,
    without_certificate,
)
from hostile_scene import (
    INCARNATION,
    A,
    B,
    of_worker,
    other_rank,
    wire_worker,
)

IN_TLS = "in TLS"
"""Stands for the reason: the request never reached the other side."""


@dataclass(frozen=True)
class Case:
    """One caller at one of the run's ports."""

    at: str
    who: str
    reason: str
    """The reason of the refusal, or `IN_TLS`."""
    act: Act
    reported: str = ""
    """How it is reported, if other than the page states for `reason`."""


def table(cases: Sequence[Case]) -> list[str]:
    """The matrix in Markdown: one row for all callers of a port with the same answer."""
    callers: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        reason = case.reason if case.reason == IN_TLS else f"`{case.reason}`"
        answer = f"{reason} ({case.reported})" if case.reported else reason
        callers.setdefault((case.at, answer), []).append(case.who)
    lines = ["| at | callers | refused |", "|---|---|---|"]
    for (at, answer), names in callers.items():
        lines.append(f"| {at} | {'; '.join(names)} | {answer} |")
    return lines


SERVED: tuple[Case, ...] = (
    Case("exchange", "plain text", IN_TLS, plain("exchange")),
    Case("exchange", "TLS 1.2, no certificate", IN_TLS, old_tls("exchange")),
    Case("exchange", "no certificate", IN_TLS, link(without_certificate)),
    Case("exchange", "a foreign authority", IN_TLS,
         link(foreign)),
    Case("exchange", "expired", IN_TLS, link(EXPIRED)),
    Case("exchange", "not yet valid", IN_TLS, link(EARLY)),
    Case("exchange", "for servers alone", IN_TLS, link(SERVER_ONLY)),
    Case("exchange", "garbage after the handshake", IN_TLS, garbage("exchange"),
         "the connection is closed"),
    Case("exchange", "another site's name", "BadCertificate", link(of_site_a)),
    Case("exchange", "another run's certificate", "BadCertificate",
         link(partial(of_run, run_id=OTHER))),
    Case("exchange", "another job's certificate", "BadCertificate",
         link(partial(of_run, name=OTHER))),
    Case("exchange", "another namespace's certificate", "BadCertificate",
         link(partial(of_run, namespace=OTHER))),
    Case("exchange", "an operator's certificate", "BadCertificate", link(of_operator)),
    Case("exchange", "a keeper's certificate", "BadCertificate", link(partial(of_keeper, B))),
    Case("exchange", "another's rank", "BadCertificate",
         link(frames=lambda at: [hello(at, rank=at.worker(A, 1).rank)])),
    Case("exchange", "another run's greeting", "WrongRun", link(frames=greeted(run="x/y#z"))),
    Case("exchange", "a replaced incarnation", "OldIncarnation",
         link(frames=greeted(incarnation=INCARNATION - 1))),
    Case("exchange", "another protocol version", "WrongRelease",
         link(frames=greeted(protocol=PROTOCOL + 1))),
    Case("exchange", "no frame", "Malformed", link(frames=sends(b"\xff" * 99))),
    Case("exchange", "too long a frame", "Malformed",
         link(frames=sends(b"\x7a" * (MAX_FRAME_BYTES + 1)))),
    Case("measuring", "plain text", IN_TLS, plain("measuring")),
    Case("measuring", "a foreign authority", IN_TLS,
         share(foreign)),
    Case("measuring", "another site's name", "BadCertificate",
         share(of_site_a)),
    Case("measuring", "another run's certificate", "BadCertificate",
         share(partial(of_run, run_id=OTHER))),
    Case("measuring", "another run's capacity", "WrongRun", share(run="x/y#z")),
    Case("measuring", "another's rank", "BadCertificate", share(rank=77)),
    Case("measuring", "the called worker's rank", "UnknownWorker", share(rank=0)),
    Case("measuring", "a capacity of NaN", "Malformed",
         share(samples_per_s=float("nan"))),
    Case("measuring", "too long a message", "Malformed",
         share(source="x" * MAX_MESSAGE_BYTES)),
    Case("coordinator", "plain text", IN_TLS, plain("coordinator")),
    Case("coordinator", "another pod's token", "BadToken",
         sign(lambda at: at.token(1))),
    Case("coordinator", "another audience's token", "BadToken",
         sign(partial(token_for, "somebody.else"))),
    Case("coordinator", "a token of no pod", "BadToken", sign(token_of_no_pod)),
    Case("coordinator", "another service account's token", "BadToken",
         sign(token_of_another_account)),
    Case("coordinator", "another namespace's pod with the same labels",
         "BadToken", sign(token_of_another_namespace)),
    Case("coordinator", "a forged signature", "BadToken",
         sign(partial(forged_token, "ES256"))),
    Case("coordinator", "no signature", "BadToken",
         sign(partial(forged_token, "none"))),
    Case("coordinator", "a worker's token as the keeper's", "BadToken",
         sign(role="keeper", worker=lambda _: coordination_pb2.Worker(site=A))),
    Case("coordinator", "the worker's token from another process", "ReplayedToken",
         sign(prove=by_another_key)),
    Case("coordinator", "without a proof", "ReplayedToken", sign(prove=unproven)),
    Case("coordinator", "for the sidecar's certificate", "ReplayedToken",
         sign(prove=by_another_key, role="sidecar")),
    Case("coordinator", "a newer token, not yet used", "ReplayedToken",
         sign(lambda at: at.pods.token_of(at.victim), prove=by_another_key)),
    Case("coordinator", "to join in its place", "ReplayedToken",
         join_in_its_place),
    Case("coordinator", "its request repeated", "ReplayedToken", sign(times=2)),
    Case("coordinator", "its proof for another's key", "Malformed",
         sign(prove=for_another_request)),
    Case("coordinator", "no worker's rank", "UnknownWorker",
         sign(worker=lambda at: wire_worker(at.victim, rank=other_rank(at.victim)))),
    Case("coordinator", "another site's worker", "UnknownWorker",
         sign(worker=lambda at: wire_worker(at.victim, site=B))),
    Case("coordinator", "another run", "WrongRun", sign(run=other_run)),
    Case("coordinator", "another job", "WrongRun", sign(run=other_job),
         "metric, log"),
    Case("coordinator", "another namespace's job", "WrongRun",
         sign(run=other_namespace), "metric, log"),
    Case("coordinator", "too long a signing request", "Malformed",
         sign(csr=lambda: b"x" * (MAX_CSR_BYTES + 1))),
    Case("coordinator", "one for an RSA key", "Malformed", sign(csr=rsa_csr)),
    Case("coordinator", "one tampered with", "Malformed",
         sign(csr=tampered_csr)),
    Case("coordinator", "a replaced incarnation", "OldIncarnation",
         join(incarnation=INCARNATION - 1)),
    Case("coordinator", "another manifest", "SpecDiffers", join(spec_hash="0" * 64)),
    Case("keeper", "no certificate", IN_TLS, put(without_certificate)),
    Case("keeper", "another site's worker", IN_TLS, put(rightful)),
    Case("keeper", "another worker's certificate", "BadCertificate", put(OF_NEXT)),
    Case("keeper", "another worker's file", "NotItsOwn",
         put(path=lambda at: checkpoint_path(at.worker(A, 1).rank))),
    Case("keeper", "another run's file", "WrongRun", put(run=other_run)),
    Case("keeper", "another's rank", "UnknownWorker",
         put(worker=lambda at: wire_worker(at.victim, rank=at.worker(A, 1).rank))),
    Case("federation", "no certificate", IN_TLS, federate(without_certificate)),
    Case("federation", "a foreign authority", IN_TLS,
         federate(foreign_operator)),
    Case("federation", "expired", IN_TLS, federate(expired_operator)),
    Case("federation", "the called site's authority", IN_TLS,
         federate(operator_of_b_by_a)),
    Case("federation", "a worker's certificate", "BadCertificate", federate(rightful)),
    Case("federation", "another site claimed", "BadCertificate",
         federate(messages=sends(site_hello(SiteName("plant-c"), A).SerializeToString()))),
    Case("federation", "another site expected", "WrongSite",
         federate(messages=sends(site_hello(B, SiteName("plant-c")).SerializeToString()))),
    Case("federation", "no statement", "Malformed",
         federate(messages=sends(GREETING, b"\xff" * 99))),
    Case("federation", "too long a statement", "Malformed",
         federate(messages=sends(GREETING, b"\x7a\x80\x80\x80\x02" + bytes(MAX_STATEMENT_BYTES)))),
    Case("coordinator", "a pod made with its labels",
         "BadToken", sign_for_a_made_up_pod),
    Case("coordinator", "a deleted pod's token", "BadToken",
         sign_for_a_deleted_pod),
)  # fmt: skip
"""Callers of this site's ports; the last one costs a pod."""

DIALLED: tuple[Case, ...] = (
    Case("dialled worker", "another worker's certificate", "Unproven",
         dialled(lambda at: of_worker(at.authorities[B], at.worker(A, 1), at.job))),
    Case("dialled worker", "a foreign authority", "Unproven",
         dialled(foreign)),
    Case("dialled worker", "another site's authority", "Unproven",
         dialled(of_site_a)),
    Case("dialled worker", "another run's certificate", "Unproven",
         dialled(partial(of_run, run_id=OTHER))),
    Case("dialled worker", "expired", "Unproven", dialled(EXPIRED)),
    Case("dialled worker", "for clients alone", "Unproven", dialled(CLIENT_ONLY)),
    Case("dialled worker", "plain text", "Unproven", dialled(without_certificate)),
    Case("dialled worker", "a site without a bundle", "UnknownAuthority",
         unknown_site),
    Case("dialled coordinator", "a worker's certificate", IN_TLS,
         dialled_coordinator, "log, then `NotJoining`"),
    Case("dialled keeper", "a worker's certificate", IN_TLS,
         dialled_keeper, "event `KeeperAway`"),
    Case("dialled operator", "this site's certificate", IN_TLS,
         dialled_operator, "metric, status"),
)  # fmt: skip
"""Impostors that answer where this site's processes dial."""

CASES = (*SERVED, *DIALLED)
