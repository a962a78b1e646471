"""Tests of sent bytes in a sidecar.

A sidecar sums the sent bytes of members only. Bytes sent while its trainer is absent, or has no
links yet, are reported with the next step.

The sidecar and its socket are real; the test is the trainer.

Left out: real peers (tests/local/test_sidecar.py).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dlion_api.names import Rank
from dlion_api.protocol.measurements import (
    LinkDelivery,
    MeasuringSent,
    Peers,
    SentBytes,
    StepTiming,
)
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.protocol.sidecar_protocol import LocalRecord, TrainerRecord, decode, encode
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.spec import load_job
from dlion_worker.sidecar.process import SidecarProcess
from local_run import job_document

DOCUMENT = job_document(2)
JOB = load_job(DOCUMENT)
PEERS = Peers(
    Membership(
        1,
        JOB.key,
        2,
        tuple(Member(one, 1, MemberState.READY, "h:1", "h:2") for one in JOB.workers()),
    ),
    100,
)


@pytest.fixture
def sidecar(tmp_path: Path) -> SidecarProcess:
    here = str(tmp_path)
    config = WorkerConfig(
        DOCUMENT, Rank(0), "", "", "", here, f"{here}/s.sock", "127.0.0.1", "127.0.0.1", here, here
    )
    return SidecarProcess(config, JOB, metrics_host="127.0.0.1", metrics_port=0)


def answers(sidecar: SidecarProcess, *records: TrainerRecord) -> list[LocalRecord]:
    """Return the sidecar's answers to a trainer that sends these records and ends."""

    async def run() -> bytes:
        await sidecar._local.start()
        reader, writer = await asyncio.open_unix_connection(sidecar._config.socket_path)
        writer.writelines(encode(record) for record in records)
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        await sidecar._local.close()
        return answer

    answer = asyncio.run(asyncio.wait_for(run(), 20))
    return [decode(line) for line in answer.splitlines()]


def test_bytes_to_a_rank_that_is_not_a_member_are_not_kept(sidecar: SidecarProcess) -> None:
    ranks = (*range(1, 500), 10**12)
    answers(sidecar, PEERS, *(LinkDelivery(Rank(n), 10, 5, 0.5, 3, SentBytes(7)) for n in ranks))
    assert sidecar._reading().link_bytes == ((Rank(1), "gradient", 7),)


def test_bytes_sent_without_a_trainer_are_reported_with_its_next_step(
    sidecar: SidecarProcess,
) -> None:
    for sent_bytes in (200, 131_072):
        sidecar.count_sent(Rank(1), sent_bytes)
    assert not [one for one in answers(sidecar, PEERS) if isinstance(one, MeasuringSent)]
    sidecar.count_sent(Rank(1), 8)
    step = StepTiming(1, 48, 0.3, 0.4, 0.5)
    found = [one for one in answers(sidecar, PEERS, step, step) if isinstance(one, MeasuringSent)]
    assert found == [MeasuringSent(Rank(1), 131_280)]
