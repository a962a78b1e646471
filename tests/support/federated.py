"""Federation nodes on loopback, each with its own authority and its bundles in files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import Member, MemberState
from dlion_operator.federation.node import FederationNode
from dlion_operator.federation.reports import (
    ReportedWorkers,
    RunReport,
    SpecFingerprint,
    TrainingFigures,
)
from dlion_operator.model.settings import RemoteSite
from dlion_operator.pki.authority import CertificateAuthority
from operator_process import free_ports

JOB = JobKey("default", "digits", "1")
LIFE = timedelta(hours=1)


def worker(site: str, rank: int) -> WorkerIdentity:
    """Return a worker that is the only one of its site."""
    return WorkerIdentity(Rank(rank), SiteName(site), "small", 0)


def member(
    site: str, rank: int, incarnation: int = 1, state: MemberState = MemberState.READY
) -> Member:
    """Return that worker as a member."""
    return Member(worker(site, rank), incarnation, state, f"10.0.0.{rank}:7440", "")


def report(
    site: str, rank: int, *, seed: bytes = b"12345678", settled: bool = True, iteration: int = 0
) -> RunReport:
    """Return the report of a site with one worker about its part of a run."""
    return RunReport(
        SpecFingerprint(seed.hex().ljust(64, "0"), {"trainer.seed": seed, "minSites": b"abcdefgh"}),
        ReportedWorkers((worker(site, rank),), (member(site, rank),), settled),
        TrainingFigures(
            training=bool(iteration), iteration=iteration, samples_per_s=float(iteration)
        ),
    )


@dataclass
class FederatedSite:
    """One site: its own reports, and the reports that it received."""

    name: SiteName
    folder: Path
    port: int
    authority: CertificateAuthority
    life: timedelta = LIFE
    reached_at: int = 0
    """The port of a proxy in front of this site; 0 without one."""
    reports: dict[JobKey, RunReport] = field(default_factory=dict)
    news: list[JobKey] = field(default_factory=list)
    bundles: list[Any] = field(default_factory=list)
    node: FederationNode | None = None

    @property
    def bundle_file(self) -> Path:
        """The file from which the others read this site's bundle."""
        return self.folder / f"{self.name}.pem"

    def problems(self) -> set[SiteName]:
        """The sites whose bundles are not valid."""
        node = self.node
        assert node is not None
        return {site for site in node.clients if not node.has_bundle(site)}

    async def start(self, *others: FederatedSite, **parts: Any) -> FederationNode:
        """Federate with these sites. `parts` replace this site's own reports and receivers."""
        sites = tuple(
            RemoteSite(
                name=other.name,
                address=f"127.0.0.1:{other.reached_at or other.port}",
                bundle_file=str(other.bundle_file),
            )
            for other in others
        )
        self.node = FederationNode(
            self.authority,
            sites,
            certificate_life=self.life,
            **{
                "reports": lambda: self.reports,
                "on_run_changed": self.news.append,
                "on_bundles": self.bundles.append,
                **parts,
            },
        )
        await self.node.start(f"127.0.0.1:{self.port}")
        return self.node


def federated_sites(folder: Path, *names: str) -> list[FederatedSite]:
    """Return sites that know each other's bundles; none is started."""
    sites = [
        FederatedSite(SiteName(name), folder, port, CertificateAuthority(SiteName(name)))
        for name, port in zip(names, free_ports(len(names)), strict=True)
    ]
    for site in sites:
        site.bundle_file.write_bytes(site.authority.bundle_pem)
    return sites


async def until(look: Callable[[], Any], within_s: float = 20.0) -> Any:
    """Return the result of `look` once it is true."""
    async with asyncio.timeout(within_s):
        while not (found := look()):  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0.02)
    return found
