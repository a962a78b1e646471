"""Tests of rounds of probes in a sidecar's own loop.

A probe may take longer than the interval of its link. It then delays neither the sidecar's
regrouping nor its end, also if it never ends. New bundles do not wait for the probes of other
peers.

The sidecar and its controller are real; the caller is a peer that hangs.

Left out: the order of links (test_grouping.py); real peers (tests/local/test_sidecar.py).
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any, cast

import pytest

from dlion_api.errors import UnavailableError
from dlion_api.names import Rank
from dlion_api.protocol.measurements import Peers
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.spec import load_job
from dlion_core.topology import grouping
from dlion_worker.sidecar import process
from dlion_worker.sidecar.process import SidecarProcess
from local_run import job_document

PROBE_S = 0.02


class Hanging:
    """A peer that does not answer; a probe fails only when its link is due again."""

    def __init__(self, probe_s: float = PROBE_S) -> None:
        self.probes, self._probe_s = 0, probe_s
        self.is_probed = asyncio.Event()

    async def probe(self, member: Member) -> tuple[int, float]:
        self.probes += 1
        self.is_probed.set()
        await asyncio.sleep(self._probe_s)
        raise UnavailableError(f"worker {member.identity.rank} does not answer")

    def notify(self) -> None:
        """There is no peer to notify."""


def sidecar_of(tmp_path: Path, caller: Hanging, workers: int = 2) -> SidecarProcess:
    """The sidecar of the first of these workers, which calls the others by that caller."""
    document = job_document(workers, exchange={"policy": "full", "topology": "clustered"})
    job, here = load_job(document), str(tmp_path)
    config = WorkerConfig(
        document, Rank(0), "", "", "", here, f"{here}/s.sock", "127.0.0.1", "127.0.0.1", here, here
    )
    sidecar = SidecarProcess(config, job, metrics_host="127.0.0.1", metrics_port=0)
    found = tuple(Member(one, 1, MemberState.READY, "h:1", "h:2") for one in job.workers())
    sidecar._controller.handle(Peers(Membership(1, job.key, workers, found), 100), 0.0)
    sidecar._caller = cast("Any", caller)
    return sidecar


@pytest.mark.timeout(30)
def test_a_peer_that_hangs_does_not_delay_the_sidecar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouping, "PAIR_RETRY_S", PROBE_S / 2)
    monkeypatch.setattr(process, "PROBE_TICK_S", PROBE_S)
    hanging, looks = Hanging(), 0
    sidecar = sidecar_of(tmp_path, hanging)

    async def run() -> None:
        nonlocal looks
        stopped, look = asyncio.Event(), sidecar._controller.regroup_if_due

        def counted_look(now_s: float) -> Any:
            nonlocal looks
            looks += 1
            if looks == 3:
                stopped.set()
            return look(now_s)

        monkeypatch.setattr(sidecar._controller, "regroup_if_due", counted_look)
        await asyncio.wait_for(sidecar._probe_until(stopped, math.inf, {""}), timeout=10)

    asyncio.run(run())
    assert looks == 3
    assert hanging.probes >= 3


@pytest.mark.timeout(60)
def test_a_sidecar_ends_while_a_peer_hangs(tmp_path: Path) -> None:
    """In a pod, the trainer's last output must be uploaded within what is left of 30 s."""
    hanging = Hanging(math.inf)
    sidecar = sidecar_of(tmp_path, hanging)

    async def run() -> None:
        stopped = asyncio.Event()
        probing = asyncio.create_task(sidecar._probe_until(stopped, math.inf, {""}))
        await hanging.is_probed.wait()
        stopped.set()
        await asyncio.wait_for(probing, timeout=20)

    asyncio.run(run())
    assert hanging.probes == 1


@pytest.mark.timeout(60)
def test_new_bundles_wait_for_one_peer_that_hangs_at_most(tmp_path: Path) -> None:
    """The trainer reports them during the first of four probes."""
    hanging = Hanging()
    sidecar = sidecar_of(tmp_path, hanging, 5)

    async def run() -> None:
        probing = asyncio.create_task(sidecar._probe_until(asyncio.Event(), math.inf, {""}))
        await hanging.is_probed.wait()
        sidecar._trust = "other bundles"
        await asyncio.wait_for(probing, timeout=30)

    asyncio.run(run())
    assert hanging.probes == 1
