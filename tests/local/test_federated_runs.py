"""Test the part of two operators' coordinators and federation in a run, over gRPC and TLS.

Workers receive the members of all sites from their own site's coordinator. They trust the bundles
of all sites, also later ones, and keep the known members while an operator is away. Other counts at
one site are reported to the others. A site whose manifest differs is reported everywhere. Its new
workers are not admitted; those already admitted stay. The target is judged over the replicas of all
sites, except of a site where the run is suspended and of workers that failed for good. If a run is
over at so many sites that fewer than `minSites` remain, it ends at the others. If the job names
authorities, each site's workers are verified by that site's authority in this run only.

The workers join and report, but train nothing. Left out: the job's status (tests/unit/operator),
API servers (tests/cluster).
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509 import CertificateSigningRequestBuilder, Name

from dlion_api.errors import ContractError
from dlion_api.names import JobKey, SiteName, WorkerIdentity
from dlion_api.protocol.progress import EvaluationRecord
from dlion_api.protocol.records import record_to_json
from dlion_api.protocol.worker_config import COORDINATOR_DNS_NAME
from dlion_api.spec import Job, load_job
from dlion_api.wire import coordination_pb2 as wire
from dlion_api.wire import coordination_pb2_grpc
from dlion_operator.coordinator import CoordinatorServer
from dlion_operator.federation import client as client_module
from dlion_operator.federation import node as node_module
from dlion_operator.federation import state as state_module
from dlion_operator.kubernetes.store import ObjectName
from dlion_operator.pki.authority import CertificateAuthority, Tokens
from dlion_operator.pki.certificate_issuer import LIFE
from dlion_operator.pki.job_authority import issuer_of
from dlion_operator.pki.named_authority import NamedAuthority
from dlion_operator.plan.decisions import OpenRun
from dlion_operator.plan.observed import RunView
from dlion_operator.served_runs.site_runs import SiteRuns
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey
from federated import FederatedSite, federated_sites, until
from given_authorities import GivenAuthority

pytestmark = pytest.mark.patient

A, B = SiteName("plant-a"), SiteName("plant-b")
LONG_S = 60.0

MANIFEST: dict[str, Any] = {
    "apiVersion": "dlion.dev/v1alpha1",
    "kind": "DLionJob",
    "metadata": {"name": "digits"},
    "spec": {
        "sites": [
            {"name": A, "groups": [{"name": "small", "workers": 1}]},
            {"name": B, "groups": [{"name": "small", "workers": 1}]},
        ],
        "trainer": {
            "program": {"builtin": "digits"},
            "dataset": {"name": "digits"},
            "stop": {"targetAccuracy": 0.5},
        },
    },
}


def manifest(at_b: int = 1, *, min_sites: int = 1, **trainer: Any) -> Job:
    document = copy.deepcopy(MANIFEST)
    document["spec"]["minSites"] = min_sites
    document["spec"]["trainer"] |= trainer
    document["spec"]["sites"][1]["groups"][0]["workers"] = at_b
    return load_job(document)


RUN = manifest().key


class Operator:
    """The federation part of a site's operator, without a cluster."""

    def __init__(self, site: FederatedSite) -> None:
        self.site = site
        self.tokens = Tokens()
        self.triggered: list[ObjectName] = []
        self.server = CoordinatorServer("127.0.0.1:0", site.authority)
        self.runs = SiteRuns(
            self.server,
            authority=site.authority,
            tokens=self.tokens,
            trigger=self.triggered.append,
        )
        self.stub: Any = None

    async def start(self, stack: AsyncExitStack, *others: FederatedSite) -> None:
        port = await self.server.start()
        stack.push_async_callback(self.server.shut_down)
        credentials = grpc.ssl_channel_credentials(self.server.authority_pem)
        options = (("grpc.ssl_target_name_override", COORDINATOR_DNS_NAME),)
        channel = grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options)
        stack.push_async_callback(channel.close)
        self.stub = coordination_pb2_grpc.CoordinationStub(channel)  # type: ignore[no-untyped-call]
        node = await self.site.start(
            *others,
            reports=self.runs.reports,
            on_run_changed=self.runs.update_remote,
            on_bundles=self.server.trust,
        )
        stack.push_async_callback(node.close)
        self.runs.federate(node)

    def open(self, job: Job, authority: NamedAuthority | None = None) -> None:
        self.runs.open(
            OpenRun(job, job.workers(), spec_hash=job.hash(), age_s=0.0, authority=authority)
        )

    def view(self) -> RunView:
        view = self.runs.view(RUN)
        assert view is not None
        return view

    def join(self, worker: WorkerIdentity, spec_hash: str, incarnation: int = 1) -> Any:
        return self.stub.Join(
            wire.JoinRequest(
                run=str(RUN),
                worker=on_wire(worker),
                incarnation=incarnation,
                exchange_address=f"10.0.0.{worker.rank}:7440",
                measuring_address=f"10.0.0.{worker.rank}:7441",
                token=self.tokens.issue(worker, RUN),
                spec_hash=spec_hash,
            )
        )

    async def bundles(self, worker: WorkerIdentity, run: JobKey = RUN) -> dict[str, bytes]:
        """Return the bundles that a worker gets now."""
        return dict((await self.sign(worker, run, csr_pem())).site_bundles_pem)

    async def sign(self, worker: WorkerIdentity, run: JobKey, request_pem: bytes) -> Any:
        """Return the answer to a worker's certificate request."""
        request = wire.SignRequest(
            token=self.tokens.issue(worker, run),
            run=str(run),
            worker=on_wire(worker),
            role="trainer",
            csr_pem=request_pem,
        )
        return await self.stub.Sign(request)

    async def evaluate(self, worker: WorkerIdentity, accuracy: float) -> None:
        record = EvaluationRecord(1.0, worker.rank, 1, 10, accuracy, 1.0, 10)
        await self.stub.Report(
            wire.ProgressReport(
                run=str(RUN),
                worker=on_wire(worker),
                incarnation=1,
                token=self.tokens.issue(worker, RUN),
                records_json=[record_to_json(record)],
                sequence=1,
            )
        )


def on_wire(worker: WorkerIdentity) -> wire.Worker:
    return wire.Worker(rank=worker.rank, site=worker.site, group=worker.group, index=worker.index)


def csr_pem() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    request = CertificateSigningRequestBuilder().subject_name(Name([]))
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


async def membership_with(stream: Any, count: int, **states: str) -> Any:
    """Read the first membership with `count` members and these states by site."""
    async with asyncio.timeout(20):
        while True:
            update = await stream.read()
            assert update is not grpc.aio.EOF
            reported = {member.worker.site: member.state for member in update.members}
            wanted = {f"plant-{site}": state for site, state in states.items()}
            if len(update.members) == count and wanted.items() <= reported.items():
                return update


@asynccontextmanager
async def two(folder: Path) -> AsyncIterator[tuple[Operator, Operator]]:
    """Start two federated operators that serve no run yet."""
    async with AsyncExitStack() as stack:
        a, b = (Operator(site) for site in federated_sites(folder, A, B))
        await a.start(stack, b.site)
        await b.start(stack, a.site)
        yield a, b


def federated(
    body: Callable[[Operator, Operator], Coroutine[Any, Any, None]],
) -> Callable[..., None]:
    """Run a test with two operators and a timeout of one minute."""

    def test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(node_module, "BUNDLES_INTERVAL_S", 0.1)
        monkeypatch.setattr(client_module, "MAX_WAIT_S", 0.2)

        async def run() -> None:
            async with asyncio.timeout(LONG_S), two(tmp_path) as (a, b):
                await body(a, b)

        asyncio.run(run())

    test.__name__ = body.__name__
    return test


@federated
async def test_workers_receive_the_members_of_all_sites(a: Operator, b: Operator) -> None:
    job = manifest()
    for each in (a, b):
        each.open(job)
    of_a, of_b = job.workers()
    at_a, at_b = a.join(of_a, job.hash()), b.join(of_b, job.hash())
    for stream in (at_a, at_b):
        update = await membership_with(stream, 2, a="Ready", b="Ready")
        assert update.expected_count == 2
        assert [m.exchange_address for m in update.members] == ["10.0.0.0:7440", "10.0.0.1:7440"]
    await until(lambda: a.view().ready == {A: 1, B: 1})
    assert a.triggered
    trusted = {A: a.site.authority.bundle_pem, B: b.site.authority.bundle_pem}
    assert await a.bundles(of_a) == trusted
    assert await b.bundles(of_b) == trusted
    at_b.cancel()
    await membership_with(at_a, 2, b="Lost")
    b.join(of_b, job.hash(), incarnation=2)
    update = await membership_with(at_a, 2, b="Ready")
    assert update.members[1].incarnation == 2
    # The worker is deleted there.
    b.runs.close(RUN.namespace, RUN.name)
    await membership_with(at_a, 2, b="Lost")
    await until(lambda: not a.view().remote[B].has_run)


@federated
async def test_a_late_bundle_reaches_running_and_new_workers(a: Operator, b: Operator) -> None:
    job = manifest()
    a.open(job)
    bundle = b.site.bundle_file.read_bytes()
    b.site.bundle_file.write_bytes(
        CertificateAuthority(B, now=datetime.now(UTC) - timedelta(days=400)).bundle_pem
    )
    await until(lambda: B in a.site.problems())
    assert await a.bundles(job.workers()[0]) == {A: a.site.authority.bundle_pem}
    assert "expired on" in a.view().remote[B].problem
    joined = a.join(job.workers()[0], job.hash())
    assert dict((await joined.read()).site_bundles_pem) == {A: a.site.authority.bundle_pem}
    b.site.bundle_file.write_bytes(bundle)
    both = {A: a.site.authority.bundle_pem, B: bundle}
    assert dict((await joined.read()).site_bundles_pem) == both  # a running worker gets it
    assert await a.bundles(job.workers()[0]) == both
    b.open(job)
    b.join(job.workers()[1], job.hash())
    assert not (await membership_with(joined, 2)).site_bundles_pem


def named(site: SiteName, given: GivenAuthority) -> NamedAuthority:
    """Return that authority as a site's operator reads it from a Secret."""
    pems = given.certificate_pem, given.key_pem()
    return NamedAuthority(issuer_of(*pems, life=LIFE, job=RUN, site=site))


def named_job(run_id: str = "1") -> Job:
    document = copy.deepcopy(MANIFEST)
    document["spec"] |= {"tls": {"mode": "Secret", "secretName": "plant-ca"}, "runId": run_id}
    return load_job(document)


@federated
async def test_workers_of_each_site_are_verified_by_the_authority_in_the_job(
    a: Operator, b: Operator
) -> None:
    job, other = named_job(), named_job("2")
    of_a, of_b = job.workers()
    at_a, at_b = GivenAuthority("a"), GivenAuthority("b")
    a.open(job, named(A, at_a))
    joined = a.join(of_a, job.hash())
    assert dict((await joined.read()).site_bundles_pem) == {A: at_a.own_pem}
    b.open(job, named(B, at_b))
    both = {A: at_a.own_pem, B: at_b.own_pem}
    assert dict((await joined.read()).site_bundles_pem) == both  # a running worker gets it
    await until(lambda: a.view().bundles == b.view().bundles == both)
    key = WorkerKey()
    signed = await b.sign(of_b, RUN, key.csr_pem())
    peer = WorkerCredentials(WorkerKey(), b"", await a.bundles(of_a))  # type: ignore[arg-type]
    peer.check_peer(signed.certificate_chain_pem, of_b, RUN)
    by_the_site = WorkerCredentials(WorkerKey(), b"", {B: b.site.authority.bundle_pem})
    with pytest.raises(ContractError, match="not by the authority of site plant-b"):
        by_the_site.check_peer(signed.certificate_chain_pem, of_b, RUN)
    # Another run of the same job has other authorities; B has not named its own yet.
    a.open(other, named(A, third := GivenAuthority("c")))
    await until(lambda: not b.view().remote[A].has_run)
    assert await a.bundles(of_a, other.key) == {A: third.own_pem}
    assert await b.bundles(of_b) == both  # the named authorities are kept


@federated
async def test_a_successor_is_reported_beside_its_predecessor(a: Operator, b: Operator) -> None:
    job = named_job()
    old, new, other = GivenAuthority("old"), GivenAuthority("new"), GivenAuthority("b")
    a.open(job, named(A, old))
    b.open(job, named(B, other))
    await until(lambda: b.view().bundles.get(A) == old.own_pem)
    a.open(job, named(A, new))
    await until(lambda: b.view().bundles.get(A) == new.own_pem + old.own_pem)
    a.open(job, NamedAuthority(None, "the Secret is gone"))
    with pytest.raises(grpc.aio.AioRpcError, match="the Secret is gone") as refused:
        await a.bundles(job.workers()[0])
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert b.view().bundles[A] == new.own_pem + old.own_pem


@federated
async def test_members_stay_while_an_operator_is_away(a: Operator, b: Operator) -> None:
    job = manifest()
    for each in (a, b):
        each.open(job)
    at_a = a.join(job.workers()[0], job.hash())
    b.join(job.workers()[1], job.hash())
    version = (await membership_with(at_a, 2, b="Ready")).version
    assert b.site.node is not None
    await b.site.node.close()
    again = Operator(b.site)  # it restarts and knows no member at first
    async with AsyncExitStack() as stack:
        await again.start(stack, a.site)
        again.open(job)
        assert a.site.node is not None
        streams = a.site.node.service.streams
        await until(lambda: a.view().remote[B].is_reachable and not a.view().remote[B].problem)
        assert a.site.node.service.streams >= streams
        membership = a.server.membership(RUN)
        assert [member.state for member in membership.members] == ["Ready", "Ready"]
        assert membership.version == version


@federated
async def test_another_count_at_one_site_is_reported_and_is_not_drift(
    a: Operator, b: Operator
) -> None:
    a.open(manifest())
    b.open(manifest(at_b=3))
    at_a = a.join(manifest().workers()[0], manifest().hash())
    async with asyncio.timeout(20):
        while (await at_a.read()).expected_count != 4:
            pass
    view = a.view()
    assert (view.drift, view.remote[B].agrees, view.remote[B].workers) == ("", True, 3)


@federated
async def test_drift_is_reported_at_both_sites_and_new_workers_are_not_admitted(
    a: Operator, b: Operator
) -> None:
    job, other = manifest(), manifest(seed=7)
    a.open(job)
    b.open(other)
    at_a = a.join(job.workers()[0], job.hash())
    b.join(other.workers()[1], other.hash())
    await until(lambda: a.view().drift and b.view().drift)
    words = "the manifest of plant-b differs from that of plant-a in trainer.seed"
    assert a.view().drift == b.view().drift
    assert a.view().drift == f"{words}; apply the same manifest at every site"
    await until(lambda: len(b.server.membership(RUN).members) == 1)
    assert len(a.server.membership(RUN).members) == 1
    assert await a.bundles(job.workers()[0])
    # Once it is corrected, it is admitted; it stays if it differs again during the run.
    b.open(job)
    await membership_with(at_a, 2, b="Ready")
    await until(lambda: not a.view().drift and not b.view().drift)
    assert len(b.server.membership(RUN).members) == 2
    b.open(other)
    await until(lambda: a.view().drift)
    assert len(a.server.membership(RUN).members) == 2
    assert a.view().ready == {A: 1, B: 1}
    assert not a.view().remote[B].agrees


@federated
async def test_the_target_is_judged_over_the_replicas_of_all_sites(
    a: Operator, b: Operator
) -> None:
    job = manifest()
    for each in (a, b):
        each.open(job)
    of_a, of_b = job.workers()
    at_a, at_b = a.join(of_a, job.hash()), b.join(of_b, job.hash())
    for stream in (at_a, at_b):
        await membership_with(stream, 2)
    await a.evaluate(of_a, 0.9)
    assert a.view().stop_reason == ""
    await b.evaluate(of_b, 0.3)
    words = "targetAccuracy 0.5 reached: mean over 2 replicas 0.6000"
    await until(lambda: (a.view().stop_reason, b.view().stop_reason) == (words, words))


def test_the_target_is_judged_without_a_site_that_is_suspended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "GONE_AFTER_S", 0.5)

    @federated
    async def body(a: Operator, b: Operator) -> None:
        job = manifest()
        of_a, of_b = job.workers()
        for each in (a, b):
            each.open(job)
        streams = a.join(of_a, job.hash()), b.join(of_b, job.hash())
        for stream in streams:
            await membership_with(stream, 2)
        await b.evaluate(of_b, 0.1)
        await a.evaluate(of_a, 0.6)
        assert not a.view().stop_reason
        b.runs.close(RUN.namespace, RUN.name)

        def look() -> str:
            a.open(job)  # as each reconciliation does
            return a.view().stop_reason

        assert await until(look) == "targetAccuracy 0.5 reached: mean over 1 replicas 0.6000"

    body(tmp_path, monkeypatch)


@federated
async def test_a_site_that_does_not_serve_a_run_receives_its_state(
    a: Operator, b: Operator
) -> None:
    job = manifest(at_b=2)
    b.open(job)
    at_b = b.join(job.workers()[1], job.hash())
    await membership_with(at_b, 1)

    def there() -> RunView:
        return a.runs.remote_view(RUN, [A, B])

    await until(lambda: there().ready == {B: 1})
    assert set(there().remote) == {B}
    view = there().remote[B]
    assert (view.is_reachable, view.has_run, view.agrees, view.workers) == (True, True, True, 2)
    b.runs.close(RUN.namespace, RUN.name)
    await until(lambda: not there().remote[B].has_run)
    assert there().remote[B].is_reachable
    assert there().ready == {}


@federated
async def test_a_worker_that_failed_for_good_elsewhere_does_not_count(
    a: Operator, b: Operator
) -> None:
    job = manifest()
    of_a, of_b = job.workers()
    for each in (a, b):
        each.open(job)
    streams = a.join(of_a, job.hash()), b.join(of_b, job.hash())
    for stream in streams:
        await membership_with(stream, 2)
    await b.evaluate(of_b, 0.1)
    await a.evaluate(of_a, 0.6)
    b.runs.open(
        OpenRun(job, job.workers(), spec_hash=job.hash(), age_s=0.0, failed=frozenset({of_b.rank}))
    )
    words = "targetAccuracy 0.5 reached: mean over 1 replicas 0.6000"
    await until(lambda: a.view().stop_reason == words)


@federated
async def test_a_run_ends_if_too_few_sites_remain(a: Operator, b: Operator) -> None:
    job = manifest(min_sites=2)
    of_a, of_b = job.workers()
    for each in (a, b):
        each.open(job)
    streams = a.join(of_a, job.hash()), b.join(of_b, job.hash())
    for stream in streams:
        await membership_with(stream, 2)
    assert not a.view().stop_reason
    b.runs.finish(RUN, "maxSteps 9 reached", succeeded=True)
    words = "it is over at plant-b: 1 sites are left (minSites 2)"
    await until(lambda: a.view().stop_reason == words)
