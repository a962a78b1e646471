"""A run over two sites whose certificates live for seconds or minutes.

It lasts until every connection has been renewed several times: links, measuring, coordinators,
keepers, the operators' streams.
"""

from __future__ import annotations

import re
import time
import urllib.request
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from dlion_api import cluster_names as names
from dlion_api.names import Rank
from dlion_api.protocol.progress import EventRecord, LinkRecord, ProgressRecord, StepRecord
from dlion_api.reasons import EventReason
from federated_pods import NAMES, SitePods, two_sites
from iteration_losses import IterationLoss, iteration_losses
from local_run import hashes, job_document

MIN_ITERATIONS = 100
"""A busy machine makes fewer while all connections are renewed: too few to judge."""
NEAR_S = 2.0
"""An iteration within this time of a trainer's report about renewed connections counts as beside a
renewal."""


@dataclass(frozen=True)
class Slowness:
    """Iterations, without the first ones of an incarnation; in lock step each counts for all
    workers."""

    iterations: int
    slow: int
    """Iterations longer than twice a worker's median."""


@dataclass(frozen=True)
class RenewedRun:
    """The result of the run."""

    seconds: float
    """From the time when all trained until all connections had been renewed that often."""
    remade: dict[str, int]
    """The number of renewals of each connection, by its name."""
    losses: dict[Rank, IterationLoss]
    beside: Slowness
    """Iterations beside renewals of trainers' certificates."""
    elsewhere: Slowness
    """Iterations at other times of the same run."""
    compared: int
    """Iterations after which the weights of both are recorded."""
    parted: int
    """Iterations after which the weights differ."""
    warnings: tuple[str, ...]
    dropped_messages: int
    lines_down: int
    """Link records with state down, from a worker's first step until the workers were asked to
    stop. Before, a worker may wait for its peer. Later, the first worker to leave breaks its
    link."""


def renewed_run(
    folder: Path,
    *,
    life: timedelta,
    times: int,
    batch: int = 32,
    subnet: int = 31,
    program: dict[str, str] | None = None,
) -> RenewedRun:
    """Train a worker at each of two sites in lock step until every connection has been renewed that
    often.

    `program` is that of the digits.
    """
    document = job_document(
        dict.fromkeys(NAMES, 1),
        trainer={"program": program or {"builtin": "digits"}, "stop": {"maxSteps": 10**7}},
        batching={
            "policy": "even",
            "globalBatchSize": {"initial": batch, "max": batch, "growth": False},
        },
        checkpoint={"everySeconds": max(1, int(life.total_seconds() / 4))},
        runId="r1",
    )
    with two_sites(folder, document, subnet=subnet, life=life) as sites:
        for site in sites:
            (folder / f"{site.site}.pem").write_bytes(site.bundle_pem())
        pairs = zip(sites, reversed(sites), strict=True)
        others = [(site.operator.node, other.site) for site, other in pairs]
        sites[0].wait_until(
            lambda: all(n.has_bundle(s) for n, s in others), "the sites trust each other"
        )
        for rank, site in enumerate(sites):
            site.start_keeper()
            site.start_worker(rank)
        sites[0].wait_until(lambda: all(site.steps() for site in sites), "both train")
        began_s = time.monotonic()
        remade: dict[str, int] = {}

        def all_remade() -> bool:
            remade.update(_remade(*sites))
            iterations = min(len(site.steps()) for site in sites)
            return min(remade.values()) >= times and iterations >= MIN_ITERATIONS

        within_s = (times + 2) * life.total_seconds() + 60
        try:
            sites[0].wait_until(all_remade, "every connection is renewed", within_s)
        except AssertionError as error:
            raise AssertionError(f"{remade}\n{error}\n{sites[1].story()}") from None
        seconds = time.monotonic() - began_s
        lines_down = sum(_lines_down(site.records()) for site in sites)
        sites[0].operator.stop(sites[0].job, "enough")
        for rank, site in enumerate(sites):
            assert site.wait(f"trainer-{rank}") == 0, site.story()
        records = [*sites[0].records(), *sites[1].records()]
        return _judged(seconds, remade, records, lines_down)


def _lines_down(records: list[ProgressRecord]) -> int:
    """The records of one worker's links with state down, after its first step."""
    kinds = [isinstance(record, StepRecord) for record in records]
    trained = records[kinds.index(True) :]
    return sum(isinstance(record, LinkRecord) and not record.connected for record in trained)


def _judged(
    seconds: float, remade: dict[str, int], records: list[ProgressRecord], lines_down: int
) -> RenewedRun:
    links = [record for record in records if isinstance(record, LinkRecord)]
    warnings = [r for r in records if isinstance(r, EventRecord) and r.warning]
    steps = [record for record in records if isinstance(record, StepRecord)]
    both = [by_rank for by_rank in hashes(steps).values() if len(by_rank) == len(NAMES)]
    losses = iteration_losses(records)
    beside, elsewhere = _beside_renewals(records, losses)
    return RenewedRun(
        seconds=seconds,
        remade=dict(remade),
        losses=losses,
        beside=beside,
        elsewhere=elsewhere,
        compared=len(both),
        parted=sum(len(set(by_rank.values())) > 1 for by_rank in both),
        warnings=tuple(f"worker {r.rank}: {r.reason}: {r.message}" for r in warnings),
        dropped_messages=max((link.dropped_messages for link in links), default=0),
        lines_down=lines_down,
    )


def _beside_renewals(
    records: list[ProgressRecord], losses: dict[Rank, IterationLoss]
) -> tuple[Slowness, Slowness]:
    """Iterations beside a renewal of either worker, and elsewhere."""
    renewed = EventReason.CERTIFICATE_RENEWED
    moments = [r.time_s for r in records if isinstance(r, EventRecord) and r.reason == renewed]
    near: dict[int, bool] = {}
    begun: set[tuple[Rank, int]] = set()
    for step in (record for record in records if isinstance(record, StepRecord)):
        if (step.rank, step.incarnation) in begun:
            began_s = step.time_s - step.wall_s
            is_near = any(began_s - NEAR_S <= at_s <= step.time_s + NEAR_S for at_s in moments)
            near[step.iteration] = is_near or near.get(step.iteration, False)
        begun.add((step.rank, step.incarnation))
    slow = {iteration for loss in losses.values() for iteration in loss.slow}
    beside, elsewhere = (
        {iteration for iteration, is_near in near.items() if is_near is wanted}
        for wanted in (True, False)
    )
    return Slowness(len(beside), len(beside & slow)), Slowness(
        len(elsewhere), len(elsewhere & slow)
    )


def _remade(*sites: SitePods) -> dict[str, int]:
    """The number of renewals of each connection so far."""
    found: dict[str, int] = {}
    for rank, site in enumerate(sites):
        records = site.records()
        found[f"link of worker {rank}"] = max(
            (record.remade_count for record in records if isinstance(record, LinkRecord)), default=0
        )
        calls, streams = site.operator.calls(), site.operator.node.service.streams
        found[f"worker {rank} to its coordinator"] = calls.get("Join", 0) - 1
        found[f"keeper of {site.site} to its coordinator"] = calls.get("Follow", 0) - 1
        found[f"keeper of {site.site}"] = site.log("keeper").count("certificate renewed")
        found[f"measuring of worker {rank}"] = _renewals(site, rank)
        found[f"operator to {site.site}"] = streams - 1
    return found


def _renewals(site: SitePods, rank: int) -> int:
    address = f"http://{site.address(1 + rank)}:{names.METRICS_PORT}/metrics"
    with urllib.request.urlopen(address, timeout=10) as answer:
        text = answer.read().decode()
    found = re.search(r"^dlion_certificate_renewals_total\{.*\} (\S+)$", text, re.MULTILINE)
    return int(float(found[1])) if found else 0
