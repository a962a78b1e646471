"""Test a coordinator that serves many runs, over real gRPC and TLS on loopback.

One port serves many runs, each with its own workers, tokens and stop. A call for a run that is not
open is refused with a status that makes workers retry. A site's keeper gets a certificate in its
name and follows the records as they arrive. It resumes at its position, and receives the result of
the run, also if it connects late. A worker's token is not valid for the keeper. A changed count
admits new workers and keeps the ranks of the others. A renewed authority signs at once.

Left out: the calls of one run (test_coordination), the ring of records
(unit/operator/coordinator/test_feed).
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dlion_api.names import JobKey, KeeperIdentity, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import MemberState
from dlion_api.protocol.progress import EventRecord, ProgressRecord
from dlion_api.protocol.records import record_from_json, record_to_json
from dlion_api.protocol.refusals import REASON_KEY, RefusalReason
from dlion_api.protocol.worker_config import COORDINATOR_DNS_NAME
from dlion_api.spec import Job, load_job
from dlion_api.wire import coordination_pb2 as wire
from dlion_api.wire import coordination_pb2_grpc
from dlion_operator.coordinator import CoordinatorServer
from dlion_operator.coordinator.feed import MAX_FEED_BYTES
from dlion_operator.pki.authority import CertificateAuthority, Tokens

SITE = SiteName("plant-a")
KEEPER = KeeperIdentity(SITE)
LONG_S = 30.0


def job(name: str = "digits", run_id: str = "1", workers: int = 2) -> Job:
    document: dict[str, Any] = {
        "apiVersion": "dlion.dev/v1alpha1",
        "kind": "DLionJob",
        "metadata": {"name": name},
        "spec": {
            "runId": run_id,
            "sites": [
                {
                    "name": SITE,
                    "groups": [
                        {"name": "small", "workers": workers},
                        {"name": "gpu", "workers": 1},
                    ],
                }
            ],
            "trainer": {
                "program": {"builtin": "digits"},
                "dataset": {"name": "digits"},
                "stop": {"maxSteps": 10},
            },
        },
    }
    return load_job(copy.deepcopy(document))


@dataclass
class Hub:
    """A coordinator for many runs, and a client of it."""

    authority: CertificateAuthority = field(default_factory=lambda: CertificateAuthority(SITE))
    tokens: Tokens = field(default_factory=Tokens)
    records: list[ProgressRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server = CoordinatorServer("127.0.0.1:0", self.authority)

    def open(self, opened: Job, feed_limit_bytes: int = MAX_FEED_BYTES) -> None:
        self.server.open(
            opened,
            authorities={SITE: self.authority},
            tokens=self.tokens,
            on_record=self.records.append,
            feed_limit_bytes=feed_limit_bytes,
        )

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Any]:
        port = await self.server.start()
        credentials = grpc.ssl_channel_credentials(self.server.authority_pem)
        options = (("grpc.ssl_target_name_override", COORDINATOR_DNS_NAME),)
        try:
            async with grpc.aio.secure_channel(
                f"127.0.0.1:{port}", credentials, options=options
            ) as channel:
                yield coordination_pb2_grpc.CoordinationStub(channel)  # type: ignore[no-untyped-call]
        finally:
            await self.server.shut_down()

    def join(self, stub: Any, of: Job, worker: WorkerIdentity) -> Any:
        return stub.Join(
            wire.JoinRequest(
                run=str(of.key),
                worker=on_wire(worker),
                incarnation=1,
                exchange_address="127.0.0.1:1",
                token=self.tokens.issue(worker, of.key),
                spec_hash=of.hash(),
            )
        )

    async def report(self, stub: Any, of: Job, worker: WorkerIdentity, *texts: str) -> Any:
        count = len(self.records) + 1  # higher than all earlier counts
        return await stub.Report(
            wire.ProgressReport(
                run=str(of.key),
                worker=on_wire(worker),
                incarnation=1,
                token=self.tokens.issue(worker, of.key),
                records_json=texts,
                sequence=count,
            )
        )

    def follow(self, stub: Any, of: Job, epoch: str = "", taken: int = 0) -> Any:
        token = self.tokens.issue(KEEPER, of.key)
        return stub.Follow(
            wire.FollowRequest(
                token=token, run=str(of.key), site=SITE, epoch=epoch, taken_sequence=taken
            )
        )


def on_wire(worker: WorkerIdentity) -> wire.Worker:
    return wire.Worker(rank=worker.rank, site=worker.site, group=worker.group, index=worker.index)


def text(message: str, rank: int = 0) -> str:
    return record_to_json(EventRecord(1.0, rank, 1, "Tested", message))


def messages(texts: Any) -> list[str]:
    records = [record_from_json(each) for each in texts]
    return [record.message for record in records if isinstance(record, EventRecord)]


def runs(body: Callable[[Hub, Any], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test with a coordinator, a stub and a timeout of 30 s."""

    def test() -> None:
        async def within() -> None:
            hub = Hub()
            async with asyncio.timeout(LONG_S), hub.serving() as stub:
                await body(hub, stub)

        asyncio.run(within())

    test.__name__ = body.__name__
    return test


async def refusal(call: Any) -> RefusalReason:
    answer = call.read() if hasattr(call, "read") else call
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await answer
    return RefusalReason(dict(raised.value.trailing_metadata())[REASON_KEY])


@runs
async def test_runs_are_separate(hub: Hub, stub: Any) -> None:
    one, two = job("one"), job("two")
    hub.open(one)
    hub.open(two)
    streams = [hub.join(stub, each, each.workers()[0]) for each in (one, two)]
    for stream in streams:
        assert (await stream.read()).stop_reason == ""
    hub.server.runs[one.key].stop("Interrupted")
    assert (await streams[0].read()).stop_reason == "Interrupted"
    reply = await hub.report(stub, two, two.workers()[0], text("of two"))
    assert reply.stop_reason == ""
    assert messages(map(record_to_json, hub.records)) == ["of two"]
    assert len(hub.server.membership(one.key).members) == 1
    # A token of one run is not valid for the other.
    stolen = wire.JoinRequest(
        run=str(two.key),
        worker=on_wire(two.workers()[1]),
        token=hub.tokens.issue(one.workers()[1], one.key),
    )
    assert await refusal(stub.Join(stolen)) is RefusalReason.BAD_TOKEN


@runs
async def test_a_call_for_a_run_that_is_not_open_is_retried(hub: Hub, stub: Any) -> None:
    opened = job()
    worker = opened.workers()[0]
    assert await refusal(hub.join(stub, opened, worker)) is RefusalReason.WRONG_RUN
    assert RefusalReason.WRONG_RUN.passing
    hub.open(opened)
    with pytest.raises(ValueError, match="is open"):
        hub.open(opened)
    stream = hub.join(stub, opened, worker)
    await stream.read()
    hub.server.close(opened.key)
    assert await stream.read() is grpc.aio.EOF
    assert await refusal(hub.follow(stub, opened)) is RefusalReason.WRONG_RUN
    assert hub.server.service.refusals == {RefusalReason.WRONG_RUN: 2}
    assert not hub.records  # the end of its streams is not a loss of a worker
    assert not hub.server.runs


@runs
async def test_a_keeper_gets_a_certificate_in_its_name(hub: Hub, stub: Any) -> None:
    opened = job()
    hub.open(opened)
    request = wire.SignRequest(
        token=hub.tokens.issue(KEEPER, opened.key),
        run=str(opened.key),
        worker=wire.Worker(site=SITE),
        role="keeper",
        csr_pem=csr_pem(),
    )
    chain = (await stub.Sign(request)).certificate_chain_pem
    names = x509.load_pem_x509_certificate(chain).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert names.value.get_values_for_type(x509.DNSName) == [KEEPER.dns_name(opened.key)]


@runs
async def test_no_other_caller_is_accepted_as_the_keeper(hub: Hub, stub: Any) -> None:
    opened = job()
    hub.open(opened)
    hub.tokens.issue(KEEPER, opened.key)
    workers_token = hub.tokens.issue(opened.workers()[0], opened.key)
    cases = [
        (wire.Worker(site=SITE), workers_token, RefusalReason.BAD_TOKEN),
        (wire.Worker(site="plant-b"), workers_token, RefusalReason.UNKNOWN_WORKER),
        (wire.Worker(site=SITE, group="small"), workers_token, RefusalReason.MALFORMED),
        (wire.Worker(site=SITE, rank=1), workers_token, RefusalReason.MALFORMED),
    ]
    for worker, token, reason in cases:
        request = wire.SignRequest(
            token=token, run=str(opened.key), worker=worker, role="keeper", csr_pem=csr_pem()
        )
        assert await refusal(stub.Sign(request)) is reason
    follow = wire.FollowRequest(token=workers_token, run=str(opened.key), site=SITE)
    assert await refusal(stub.Follow(follow)) is RefusalReason.BAD_TOKEN
    long = wire.FollowRequest(run=str(opened.key), site=SITE, epoch="x" * 1000)
    assert await refusal(stub.Follow(long)) is RefusalReason.MALFORMED


@runs
async def test_a_keeper_follows_the_records_and_resumes_at_its_position(
    hub: Hub, stub: Any
) -> None:
    opened = job()
    hub.open(opened)
    worker = opened.workers()[0]
    stream = hub.follow(stub, opened)
    first = await stream.read()
    assert (first.first_sequence, list(first.records_json), first.ended_reason) == (1, [], "")
    joined = hub.join(stub, opened, worker)
    await joined.read()
    await hub.report(stub, opened, worker, text("a"), text("b"))
    batch = await stream.read()
    assert (batch.epoch, batch.first_sequence) == (first.epoch, 1)
    assert messages(batch.records_json) == ["a", "b"]
    stream.cancel()
    await hub.report(stub, opened, worker, text("c"))
    hub.server.runs[opened.key].take(EventRecord(2.0, worker.rank, 0, "WorkerFailed", "d"))
    again = await hub.follow(stub, opened, first.epoch, taken=2).read()
    assert (again.first_sequence, messages(again.records_json)) == (3, ["c", "d"])
    restarted = await hub.follow(stub, opened, "another life", taken=2).read()
    assert (restarted.first_sequence, messages(restarted.records_json)) == (1, ["a", "b", "c", "d"])


@runs
async def test_a_keeper_reports_which_workers_it_refused(hub: Hub, stub: Any) -> None:
    refusals: list[tuple[JobKey, str, str]] = []
    hub.server.on_keeper_refused = lambda *words: refusals.append(words)
    opened = job()
    hub.open(opened)
    token = hub.tokens.issue(KEEPER, opened.key)

    def follow(words: str, **refusals: int) -> Any:
        about = {"token": token, "run": str(opened.key), "site": SITE}
        return stub.Follow(
            wire.FollowRequest(**about, refusals=refusals, refused_words=words)
        ).read()

    await follow("")
    await follow("not its own", NotItsOwn=2)
    await follow("of no authority", NotItsOwn=2, BadCertificate=1)
    assert refusals == [
        (opened.key, "NotItsOwn", "not its own"),
        (opened.key, "BadCertificate", "of no authority"),
    ]
    assert hub.server.runs[opened.key].keeper_refusals == {"NotItsOwn": 2, "BadCertificate": 1}
    bad = wire.FollowRequest(token=token, run=str(opened.key), site=SITE, refusals={"Other": 1})
    assert await refusal(stub.Follow(bad)) is RefusalReason.MALFORMED


@runs
async def test_present_and_late_followers_receive_the_result(hub: Hub, stub: Any) -> None:
    opened = job()
    hub.open(opened)
    stream = hub.follow(stub, opened)
    await stream.read()
    hub.server.runs[opened.key].finish("maxSteps reached", succeeded=True)
    for follower in (stream, hub.follow(stub, opened)):
        end = await follower.read()
        assert (end.ended_reason, end.succeeded) == ("maxSteps reached", True)
        assert await follower.read() is grpc.aio.EOF


@runs
async def test_a_site_has_one_follower_the_newest(hub: Hub, stub: Any) -> None:
    opened = job()
    hub.open(opened)
    older = hub.follow(stub, opened)
    await older.read()
    newer = hub.follow(stub, opened)
    await newer.read()
    assert await older.read() is grpc.aio.EOF
    hub.server.runs[opened.key].take(EventRecord(2.0, opened.workers()[0].rank, 0, "Tested", "on"))
    assert messages((await newer.read()).records_json) == ["on"]


@runs
async def test_a_slow_follower_gets_a_gap_and_the_newest_records(hub: Hub, stub: Any) -> None:
    opened = job()
    hub.open(opened, feed_limit_bytes=2000)
    stream = hub.follow(stub, opened)
    await stream.read()
    for number in range(1, 101):  # nothing is sent meanwhile: this call does not wait
        hub.server.runs[opened.key].take(EventRecord(2.0, Rank(0), 0, "Tested", str(number)))
    batch = await stream.read()
    assert batch.first_sequence > 1
    assert messages(batch.records_json) == [str(n) for n in range(batch.first_sequence, 101)]


@runs
async def test_a_record_of_several_lines_becomes_one_line(hub: Hub, stub: Any) -> None:
    opened = job()
    hub.open(opened)
    worker = opened.workers()[0]
    await hub.join(stub, opened, worker).read()
    await hub.report(stub, opened, worker, text("a").replace(",", ",\r\n"))
    batch = await hub.follow(stub, opened).read()
    assert messages(batch.records_json) == ["a"]
    assert "\n" not in batch.records_json[0]
    assert "\r" not in batch.records_json[0]


@runs
async def test_more_workers_are_admitted_and_ranks_are_kept(hub: Hub, stub: Any) -> None:
    opened = job(workers=2)
    hub.open(opened)
    first, second, last = opened.workers()
    hub.server.runs[opened.key].expect((first, last))
    watching = hub.join(stub, opened, last)
    assert (await watching.read()).expected_count == 2
    assert await refusal(hub.join(stub, opened, second)) is RefusalReason.UNKNOWN_WORKER
    hub.server.runs[opened.key].expect(opened.workers())
    assert (await watching.read()).expected_count == 3
    newcomer = hub.join(stub, opened, second)
    assert len((await newcomer.read()).members) == 2
    await watching.read()
    # It is removed: no worker waits for it, and it may still end in order.
    hub.server.runs[opened.key].expect((first, last))
    assert (await watching.read()).expected_count == 2
    await hub.report(stub, opened, second, text("farewell", rank=1))
    newcomer.cancel()
    states = {m.worker.rank: m.state for m in (await watching.read()).members}
    assert states == {1: MemberState.FINISHED, 2: MemberState.READY}
    assert await refusal(hub.join(stub, opened, second)) is RefusalReason.UNKNOWN_WORKER


@runs
async def test_a_renewed_authority_signs_and_clients_of_the_old_one_connect(
    hub: Hub, stub: Any
) -> None:
    opened = job()
    hub.open(opened)
    successor = hub.authority.renewed()
    hub.server.replace_authority(
        successor
    )  # no client has connected yet; the stub has the old bundle
    assert hub.server.authority_pem == successor.bundle_pem
    request = wire.SignRequest(
        token=hub.tokens.issue(KEEPER, opened.key),
        run=str(opened.key),
        worker=wire.Worker(site=SITE),
        role="keeper",
        csr_pem=csr_pem(),
    )
    signed = await stub.Sign(request)
    assert dict(signed.site_bundles_pem) == {SITE: successor.bundle_pem}
    issuer = x509.load_pem_x509_certificate(successor.bundle_pem)
    x509.load_pem_x509_certificate(signed.certificate_chain_pem).verify_directly_issued_by(issuer)


def csr_pem() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
