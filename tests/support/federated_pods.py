"""One site of a run over several sites, with its pods as processes on loopback.

The coordinator and the federation run in a thread, as in the site's operator. The keeper and the
workers are those of `pod_run`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from dlion_api.spec import Job
from dlion_operator.coordinator import CoordinatorServer
from dlion_operator.federation.node import FederationNode
from dlion_operator.model.settings import RemoteSite
from dlion_operator.pki.authority import CertificateAuthority, Tokens
from dlion_operator.pki.certificate_issuer import LIFE
from dlion_operator.plan.decisions import OpenRun
from dlion_operator.plan.observed import RunView
from dlion_operator.served_runs.site_runs import SiteRuns
from operator_process import free_ports
from pod_run import PodRun

NAMES = ("plant-a", "plant-b")


class OperatorThread:
    """The part of a site's operator that its workers and other sites connect to."""

    def __init__(
        self,
        authority: CertificateAuthority,
        tokens: Tokens,
        listen_address: str,
        federation_address: str,
        *,
        life: timedelta,
    ) -> None:
        """`life` is that of its own certificate."""
        self._life = life
        self._authority = authority
        self._server = CoordinatorServer(listen_address, authority)
        self._federation_address = federation_address
        self._runs = SiteRuns(
            self._server, authority=authority, tokens=tokens, trigger=lambda _: None
        )
        self._parts = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="operator")
        self._thread.start()

    @property
    def authority_pem(self) -> bytes:
        """The authority that pods trust."""
        return self._server.authority_pem

    def start(self, job: Job, others: tuple[RemoteSite, ...]) -> int:
        """Serve that run and federate with these sites; return the coordinator's port."""
        return self._do(self._start(job, others))

    def stop(self, job: Job, reason: str) -> None:
        """Stop the run at this site's workers."""

        async def say() -> None:
            self._runs.stop(job.key, reason)

        self._do(say())

    def withdraw(self, job: Job) -> None:
        """Report to other sites that the job is deleted at this site."""

        async def say() -> None:
            self._runs.close(job.key.namespace, job.key.name)

        self._do(say())

    def view(self, job: Job) -> RunView:
        """Return its view of the run."""

        async def look() -> RunView:
            view = self._runs.view(job.key)
            assert view is not None
            return view

        found: RunView = self._do(look())
        return found

    def calls(self) -> Mapping[str, int]:
        """Count the calls of workers and keepers so far, by name."""
        return dict(self._server.service.calls)

    def close(self) -> None:
        """Close as abruptly as a killed process; may be called twice."""
        if self._thread.is_alive():
            self._do(self._parts.aclose())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _start(self, job: Job, others: tuple[RemoteSite, ...]) -> int:
        port = await self._server.start()
        self._parts.push_async_callback(self._server.shut_down)
        node = self.node = FederationNode(
            self._authority,
            others,
            certificate_life=self._life,
            reports=self._runs.reports,
            on_run_changed=self._runs.update_remote,
            on_bundles=self._server.trust,
        )
        self._parts.push_async_callback(node.close)
        await node.start(self._federation_address)
        self._runs.federate(node)
        self._runs.open(OpenRun(job, job.workers(), spec_hash=job.hash(), age_s=0.0))
        return port

    def _do(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(30)


class SitePods(PodRun):
    """One of several sites."""

    operator: OperatorThread

    def __init__(
        self,
        folder: Path,
        document: dict[str, Any],
        *,
        site: str,
        subnet: int,
        federation_port: int,
        others: tuple[RemoteSite, ...],
        life: timedelta = LIFE,
    ) -> None:
        """`life` is that of all certificates."""
        self._federation_address = f"127.0.0.1:{federation_port}"
        self._others = others
        self._life = life
        super().__init__(folder, document, subnet=subnet, site=site, life=life)

    def start_coordinator(self) -> None:
        """Start the operator again, on the same ports."""
        self.operator = OperatorThread(
            self.authorities[self.site],
            self.tokens,
            f"{self.address(100)}:{self.coordinator_port}",
            self._federation_address,
            life=self._life,
        )
        self.coordinator = self.operator  # type: ignore[assignment]  # pods need no more of it
        self.coordinator_port = self.operator.start(self.job, self._others)

    def bundle_pem(self) -> bytes:
        """The bundle with which other sites trust this one."""
        return self.authorities[self.site].bundle_pem

    def close(self) -> None:
        """Remove everything."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        self.operator.close()


@contextmanager
def two_sites(
    folder: Path, document: dict[str, Any], *, subnet: int, life: timedelta = LIFE
) -> Iterator[tuple[SitePods, SitePods]]:
    """Return two sites without pods, at `subnet` and the next one. Neither knows the other's bundle
    yet; each reads it from `folder`, by the site's name."""
    ports = dict(zip(NAMES, free_ports(2), strict=True))
    made: list[SitePods] = []
    try:
        for number, name in enumerate(NAMES, subnet):
            (own := folder / name).mkdir()
            others = tuple(
                RemoteSite(
                    name=other,
                    address=f"127.0.0.1:{ports[other]}",
                    bundle_file=str(folder / f"{other}.pem"),
                )
                for other in NAMES
                if other != name
            )
            made.append(
                SitePods(
                    own,
                    document,
                    site=name,
                    subnet=number,
                    federation_port=ports[name],
                    others=others,
                    life=life,
                )
            )
        yield made[0], made[1]
    finally:
        for site in made:
            site.close()
