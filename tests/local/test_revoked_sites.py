"""Test revocations over three federated operators.

A site's revocation of its own worker reaches the workers of all three sites within ten seconds, and
its coordinator refuses the worker. A revocation of another site takes effect at the site that made
it; the others show it. Both can be lifted; after that only a new start joins. Closing a site does
not lift its revocations. The test prints the times.

Coordinators, federation, gRPC and TLS are real, on loopback; workers join and train nothing. Left
out: API servers (tests/cluster/test_federation.py), links between workers (test_revoked_links.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from dlion_api.names import SiteName, WorkerIdentity
from dlion_api.protocol.revocation import Revocation
from dlion_api.protocol.worker_config import COORDINATOR_DNS_NAME
from dlion_api.spec import Job, load_job
from dlion_api.wire import coordination_pb2 as wire
from dlion_api.wire import coordination_pb2_grpc
from dlion_operator.coordinator import CoordinatorServer
from dlion_operator.pki.authority import Tokens
from dlion_operator.plan.decisions import OpenRun
from dlion_operator.served_runs.site_runs import SiteRuns
from federated import FederatedSite, federated_sites, until

A, B, C = SiteName("plant-a"), SiteName("plant-b"), SiteName("plant-c")
WITHIN_S = 10.0
LONG_S = 90.0


def job() -> Job:
    groups = [{"name": "small", "workers": 1}]
    return load_job(
        {
            "apiVersion": "dlion.dev/v1alpha1",
            "kind": "DLionJob",
            "metadata": {"name": "digits"},
            "spec": {
                "sites": [{"name": site, "groups": groups} for site in (A, B, C)],
                "trainer": {
                    "program": {"builtin": "digits"},
                    "dataset": {"name": "digits"},
                    "stop": {"maxSteps": 10},
                },
            },
        }
    )


class SiteOperator:
    """A site's coordinator and federation, and its one worker."""

    def __init__(self, site: FederatedSite) -> None:
        self.site = site
        self.worker: WorkerIdentity = next(w for w in job().workers() if w.site == site.name)
        self.tokens = Tokens()
        self.server = CoordinatorServer("127.0.0.1:0", site.authority)
        self.runs = SiteRuns(
            self.server, authority=site.authority, tokens=self.tokens, trigger=lambda _: None
        )
        self.latest: Any = None
        """The newest membership that the worker received."""
        self.refusal = ""

    async def start(self, stack: AsyncExitStack, others: list[FederatedSite]) -> None:
        port = await self.server.start()
        stack.push_async_callback(self.server.shut_down)
        credentials = grpc.ssl_channel_credentials(self.server.authority_pem)
        options = (("grpc.ssl_target_name_override", COORDINATOR_DNS_NAME),)
        channel = grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options)
        stack.push_async_callback(channel.close)
        self.stub: Any = coordination_pb2_grpc.CoordinationStub(channel)  # type: ignore[no-untyped-call]
        node = await self.site.start(
            *others,
            reports=self.runs.reports,
            on_run_changed=self.runs.update_remote,
            on_bundles=self.server.trust,
        )
        stack.push_async_callback(node.close)
        self.runs.federate(node)

    def open(self, *revoked: str) -> None:
        """Serve the run with the present annotation of the job."""
        its = job()
        revocations = tuple(Revocation(name, "stolen") for name in revoked)
        self.runs.open(
            OpenRun(its, its.workers(), spec_hash=its.hash(), age_s=0.0, revocations=revocations)
        )

    async def listen(self, incarnation: int) -> None:
        """Join, and receive memberships until the coordinator refuses or ends it."""
        place = self.worker
        request = wire.JoinRequest(
            run=str(job().key),
            worker=wire.Worker(
                rank=place.rank, site=place.site, group=place.group, index=place.index
            ),
            incarnation=incarnation,
            exchange_address=f"10.0.0.{place.rank}:7440",
            token=self.tokens.issue(place, job().key),
            spec_hash=job().hash(),
        )
        try:
            async for update in self.stub.Join(request):
                self.latest = update
        except grpc.aio.AioRpcError as error:
            self.refusal = str(dict(error.trailing_metadata() or ()).get("dlion-reason"))

    def revoked(self) -> list[str]:
        """Return the sites whose worker this one may not accept."""
        members = () if self.latest is None else self.latest.members
        return [member.worker.site for member in members if member.revoked]

    def ready(self) -> list[str]:
        members = () if self.latest is None else self.latest.members
        return [member.worker.site for member in members if member.state == "Ready"]

    def shown(self) -> list[tuple[str, str, bool]]:
        """Return the revocations as the status lists them."""
        view = self.runs.view(job().key)
        assert view is not None
        return [(each.name, each.by, each.is_effective) for each in view.revocations]


@asynccontextmanager
async def three(folder: Path) -> AsyncIterator[list[SiteOperator]]:
    """Start three federated operators that serve the run, and their workers, which have joined."""
    async with AsyncExitStack() as stack:
        made = [SiteOperator(site) for site in federated_sites(folder, A, B, C)]
        for each in made:
            await each.start(stack, [other.site for other in made if other is not each])
        for each in made:
            each.open()
        tasks = [asyncio.create_task(each.listen(1)) for each in made]
        stack.callback(lambda: [task.cancel() for task in tasks])
        await until(lambda: all(each.ready() == [A, B, C] for each in made))
        yield made


def test_a_site_revokes_its_own_worker_for_all_sites(tmp_path: Path) -> None:
    async def run() -> None:
        async with asyncio.timeout(LONG_S), three(tmp_path) as (a, b, c):
            began_s = time.monotonic()
            b.open("plant-b/small-0")
            await until(lambda: a.revoked() == c.revoked() == [B], WITHIN_S)
            print(f"workers of all sites are informed after {time.monotonic() - began_s:.1f} s")
            assert a.ready() == c.ready() == [A, C]
            assert a.latest.expected_count == c.latest.expected_count == 2
            await b.listen(2)
            assert b.refusal == "Revoked"
            own = [("plant-b/small-0", B, True)]
            await until(lambda: a.shown() == b.shown() == c.shown() == own)
            events = [each.message for each in a.runs.events(job().key)]
            assert events == [
                "plant-b/small-0 is revoked at plant-b (stolen): no worker accepts it"
            ]

            # It is closed there, as for a suspended job: revocations remain.
            b.runs.close(job().key.namespace, job().key.name)
            await until(lambda: not a.runs.view(job().key).remote[B].has_run)  # type: ignore[union-attr]
            assert a.revoked() == [B]
            b.open()
            await until(lambda: a.revoked() == c.revoked() == [])
            assert a.ready() == [A, C]
            joining = asyncio.create_task(b.listen(3))
            await until(lambda: a.ready() == c.ready() == [A, B, C])
            joining.cancel()

    asyncio.run(run())


def test_a_site_revokes_another_site_only_for_itself(tmp_path: Path) -> None:
    async def run() -> None:
        async with asyncio.timeout(LONG_S), three(tmp_path) as (a, b, c):
            a.open("plant-c")
            await until(lambda: a.revoked() == [C], WITHIN_S)
            await until(lambda: b.shown() == c.shown() == [("plant-c", A, False)])
            assert a.shown() == [("plant-c", A, True)]
            assert b.revoked() == c.revoked() == []
            assert b.ready() == c.ready() == [A, B, C]
            (event,) = [each.message for each in c.runs.events(job().key)]
            assert event.startswith("plant-a refuses plant-c (stolen), and this site does not")
            b.open("plant-c")
            await until(lambda: b.revoked() == [C], WITHIN_S)
            assert c.revoked() == []
            a.open()
            await until(lambda: a.ready() == [A, B, C])
            assert a.revoked() == []

    asyncio.run(run())
