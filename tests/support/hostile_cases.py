"""Hostile and mistaken connections, one after another: who comes where, what it gets, who tells it.

`table` is the matrix as documents and tests print it; `hostile_scene` is what is attacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from dlion_api.names import SiteName
from dlion_api.protocol.refusals import MAX_CSR_BYTES
from dlion_api.wire import coordination_pb2
from dlion_core.links.framing import MAX_FRAME_BYTES, PROTOCOL
from dlion_operator.federation.messages import MAX_STATEMENT_BYTES, greeting
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
    says,
    share,
    sign,
    sign_for_a_deleted_pod,
    sign_for_a_made_up_pod,
    tell,
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
    of_nobody,
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
"""Where the reason would stand: the other side was never reached."""


@dataclass(frozen=True)
class Case:
    """One caller at one of the run's ports."""

    at: str
    who: str
    reason: str
    """By which it is refused, or `IN_TLS`."""
    act: Act
    told: str = ""
    """How it is told, where that is not as the page has it for `reason`."""


def table(cases: Sequence[Case]) -> list[str]:
    """The matrix in Markdown: a row for the callers of a port with the same answer."""
    callers: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        reason = case.reason if case.reason == IN_TLS else f"`{case.reason}`"
        answer = f"{reason} ({case.told})" if case.told else reason
        callers.setdefault((case.at, answer), []).append(case.who)
    lines = ["| at | callers | refused |", "|---|---|---|"]
    for (at, answer), names in callers.items():
        lines.append(f"| {at} | {'; '.join(names)} | {answer} |")
    return lines


SERVED: tuple[Case, ...] = (
    Case("exchange", "plain text", IN_TLS, plain("exchange")),
    Case("exchange", "TLS 1.2, no certificate", IN_TLS, old_tls("exchange")),
    Case("exchange", "no certificate", IN_TLS, link(of_nobody)),
    Case("exchange", "a foreign authority that calls itself the right site's", IN_TLS,
         link(foreign)),
    Case("exchange", "expired", IN_TLS, link(EXPIRED)),
    Case("exchange", "not yet valid", IN_TLS, link(EARLY)),
    Case("exchange", "a certificate for servers alone", IN_TLS, link(SERVER_ONLY)),
    Case("exchange", "garbage after the handshake", IN_TLS, garbage("exchange"),
         "the connection is closed"),
    Case("exchange", "another site's name on a good authority", "BadCertificate", link(of_site_a)),
    Case("exchange", "the certificate of another run", "BadCertificate",
         link(partial(of_run, run_id=OTHER))),
    Case("exchange", "the certificate of another job", "BadCertificate",
         link(partial(of_run, name=OTHER))),
    Case("exchange", "the certificate of another namespace", "BadCertificate",
         link(partial(of_run, namespace=OTHER))),
    Case("exchange", "an operator's certificate", "BadCertificate", link(of_operator)),
    Case("exchange", "a keeper's certificate", "BadCertificate", link(partial(of_keeper, B))),
    Case("exchange", "a rank that is another's", "BadCertificate",
         link(frames=lambda at: [hello(at, rank=at.worker(A, 1).rank)])),
    Case("exchange", "a greeting of another run", "WrongRun", link(frames=greeted(run="x/y#z"))),
    Case("exchange", "an incarnation that was replaced", "OldIncarnation",
         link(frames=greeted(incarnation=INCARNATION - 1))),
    Case("exchange", "another version of the protocol", "WrongRelease",
         link(frames=greeted(protocol=PROTOCOL + 1))),
    Case("exchange", "a frame that is none", "Malformed", link(frames=says(b"\xff" * 99))),
    Case("exchange", "a frame that is too long", "Malformed",
         link(frames=says(b"\x7a" * (MAX_FRAME_BYTES + 1)))),
    Case("measuring", "plain text", IN_TLS, plain("measuring")),
    Case("measuring", "a foreign authority that calls itself the right site's", IN_TLS,
         share(foreign)),
    Case("measuring", "another site's name on a good authority", "BadCertificate",
         share(of_site_a)),
    Case("measuring", "the certificate of another run", "BadCertificate",
         share(partial(of_run, run_id=OTHER))),
    Case("measuring", "a capacity for another run", "WrongRun", share(run="x/y#z")),
    Case("measuring", "a rank that is another's", "BadCertificate", share(rank=77)),
    Case("measuring", "the rank of the called worker", "UnknownWorker", share(rank=0)),
    Case("measuring", "a capacity that is no number", "Malformed",
         share(samples_per_s=float("nan"))),
    Case("measuring", "a message that is too long", "Malformed",
         share(source="x" * MAX_MESSAGE_BYTES)),
    Case("coordinator", "plain text", IN_TLS, plain("coordinator")),
    Case("coordinator", "the token of another pod of the run", "BadToken",
         sign(lambda at: at.token(1))),
    Case("coordinator", "a token for another audience", "BadToken",
         sign(partial(token_for, "somebody.else"))),
    Case("coordinator", "a token that is bound to no pod", "BadToken", sign(token_of_no_pod)),
    Case("coordinator", "the token of another service account's pod", "BadToken",
         sign(token_of_another_account)),
    Case("coordinator", "the token of a pod with the same labels in another namespace",
         "BadToken", sign(token_of_another_namespace)),
    Case("coordinator", "the right token's words with another signature", "BadToken",
         sign(partial(forged_token, "ES256"))),
    Case("coordinator", "the same without a signature", "BadToken",
         sign(partial(forged_token, "none"))),
    Case("coordinator", "a worker's token for the keeper's certificate", "BadToken",
         sign(role="keeper", worker=lambda _: coordination_pb2.Worker(site=A))),
    Case("coordinator", "the worker's own token, from another process", "ReplayedToken",
         sign(prove=by_another_key)),
    Case("coordinator", "the same without a proof", "ReplayedToken", sign(prove=unproven)),
    Case("coordinator", "the same for the sidecar's certificate", "ReplayedToken",
         sign(prove=by_another_key, role="sidecar")),
    Case("coordinator", "a newer token, which the worker has not shown yet", "ReplayedToken",
         sign(lambda at: at.pods.token_of(at.victim), prove=by_another_key)),
    Case("coordinator", "the same, to join in the worker's place", "ReplayedToken",
         join_in_its_place),
    Case("coordinator", "the worker's own request once more", "ReplayedToken", sign(times=2)),
    Case("coordinator", "its own proof for another's key", "Malformed",
         sign(prove=for_another_request)),
    Case("coordinator", "a rank that no worker has", "UnknownWorker",
         sign(worker=lambda at: wire_worker(at.victim, rank=other_rank(at.victim)))),
    Case("coordinator", "a worker of another site", "UnknownWorker",
         sign(worker=lambda at: wire_worker(at.victim, site=B))),
    Case("coordinator", "another run of the job", "WrongRun", sign(run=other_run)),
    Case("coordinator", "another job", "WrongRun", sign(run=other_job),
         "metric, log"),
    Case("coordinator", "a job of that name in another namespace", "WrongRun",
         sign(run=other_namespace), "metric, log"),
    Case("coordinator", "a signing request that is too long", "Malformed",
         sign(csr=lambda: b"x" * (MAX_CSR_BYTES + 1))),
    Case("coordinator", "a signing request for an RSA key", "Malformed", sign(csr=rsa_csr)),
    Case("coordinator", "a signing request that was tampered with", "Malformed",
         sign(csr=tampered_csr)),
    Case("coordinator", "an incarnation that was replaced", "OldIncarnation",
         join(incarnation=INCARNATION - 1)),
    Case("coordinator", "another manifest", "SpecDiffers", join(spec_hash="0" * 64)),
    Case("keeper", "no certificate", IN_TLS, put(of_nobody)),
    Case("keeper", "a worker of another site", IN_TLS, put(rightful)),
    Case("keeper", "the certificate of another worker", "BadCertificate", put(OF_NEXT)),
    Case("keeper", "another worker's file", "NotItsOwn",
         put(path=lambda at: checkpoint_path(at.worker(A, 1).rank))),
    Case("keeper", "a file of another run", "WrongRun", put(run=other_run)),
    Case("keeper", "a rank that is another's", "UnknownWorker",
         put(worker=lambda at: wire_worker(at.victim, rank=at.worker(A, 1).rank))),
    Case("federation", "no certificate", IN_TLS, tell(of_nobody)),
    Case("federation", "a foreign authority that calls itself the right site's", IN_TLS,
         tell(foreign_operator)),
    Case("federation", "expired", IN_TLS, tell(expired_operator)),
    Case("federation", "the right names by the called site's own authority", IN_TLS,
         tell(operator_of_b_by_a)),
    Case("federation", "a worker's certificate", "BadCertificate", tell(rightful)),
    Case("federation", "a site that claims to be another", "BadCertificate",
         tell(messages=says(greeting(SiteName("plant-c"), A).SerializeToString()))),
    Case("federation", "who takes this site for another", "WrongSite",
         tell(messages=says(greeting(B, SiteName("plant-c")).SerializeToString()))),
    Case("federation", "a statement that is none", "Malformed",
         tell(messages=says(GREETING, b"\xff" * 99))),
    Case("federation", "a statement that is too long", "Malformed",
         tell(messages=says(GREETING, b"\x7a\x80\x80\x80\x02" + bytes(MAX_STATEMENT_BYTES)))),
    Case("coordinator", "the token of a pod made with the worker's labels",
         "BadToken", sign_for_a_made_up_pod),
    Case("coordinator", "the token of a deleted pod", "BadToken",
         sign_for_a_deleted_pod),
)  # fmt: skip
"""What comes to ports of this site; the last one costs a pod."""

DIALLED: tuple[Case, ...] = (
    Case("dialled worker", "a man in the middle, with another worker's certificate", "Unproven",
         dialled(lambda at: of_worker(at.authorities[B], at.worker(A, 1), at.job))),
    Case("dialled worker", "a foreign authority that calls itself the right site's", "Unproven",
         dialled(foreign)),
    Case("dialled worker", "the right name by another site's authority", "Unproven",
         dialled(of_site_a)),
    Case("dialled worker", "the certificate of another run", "Unproven",
         dialled(partial(of_run, run_id=OTHER))),
    Case("dialled worker", "expired", "Unproven", dialled(EXPIRED)),
    Case("dialled worker", "a certificate for clients alone", "Unproven", dialled(CLIENT_ONLY)),
    Case("dialled worker", "plain text", "Unproven", dialled(of_nobody)),
    Case("dialled worker", "a site whose bundle is not known here", "UnknownAuthority",
         unknown_site),
    Case("dialled coordinator", "a man in the middle, with a worker's certificate", IN_TLS,
         dialled_coordinator, "log, then `NotJoining`"),
    Case("dialled keeper", "a man in the middle, with a worker's certificate", IN_TLS,
         dialled_keeper, "event `KeeperAway`"),
    Case("dialled operator", "a man in the middle, with this site's own certificate", IN_TLS,
         dialled_operator, "metric, status"),
)  # fmt: skip
"""What answers where this site's processes dial."""

CASES = (*SERVED, *DIALLED)
