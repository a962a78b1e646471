"""Tests of provenance statements.

A statement names each worker once, by the best evidence: a replica in the model, steps that have
arrived, or membership. Figures are bounded by the possible values of the run. Revoked workers are
marked. The model of startFrom is named by its digest. Each file is a valid statement. A worker that
is no longer known is named by its rank. If figures make no valid statement, the model has none and
is still uploaded.

Left out: a whole run (tests/local/test_end_of_run.py).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from dlion_api.names import Rank
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.protocol.provenance import (
    MAX_COUNT,
    PROVENANCE_FILE,
    Evidence,
    ProvenanceStatement,
)
from dlion_api.spec import load_job
from dlion_core.lifecycle.inbox import EventInbox
from dlion_core.policies.interface import Message, MessageArrived, MessageKind
from dlion_worker.provenance.writer import ProvenanceWriter
from dlion_worker.training.site_model import CollectedReplica, SavedModel, choose_model
from dlion_worker.training.snapshot import TrainingState
from local_run import job_document

if TYPE_CHECKING:
    from pathlib import Path

WORKERS = 5


def test_each_worker_is_named_by_the_best_evidence(tmp_path: Path) -> None:
    document = job_document({"a": 3, "b": 2}, trainer={"startFrom": "start.keras"})
    job = load_job(document)
    (tmp_path / "start.keras").write_bytes(b"start")
    (tmp_path / "model.keras").write_bytes(b"weights")
    (tmp_path / "model.json").write_bytes(b"{}")
    inbox = EventInbox(lambda *_: None, clock_s=lambda: 0.0)
    for sender, batch in ((1, 32), (1, 32), (2, 2**31), (77, 32)):
        step = Message(MessageKind.PROGRESS, 7, local_batch_size=batch)
        inbox.put(MessageArrived(Rank(sender), step))
    inbox.drain()
    members = tuple(
        Member(worker, 1, MemberState.FINISHED, "", revoked=worker.rank == 3)
        for worker in job.workers()[:4]
    )
    writer = ProvenanceWriter(
        job,
        Rank(0),
        inbox=inbox,
        membership=lambda: Membership(1, job.key, WORKERS, members),
        data_root=tmp_path,
    )
    vector = np.zeros(1, np.float32)
    state = TrainingState(vector, vector, vector)
    replicas = [
        CollectedReplica(Rank(0), state, 320, 10),
        CollectedReplica(Rank(1), state, 2**60, 2**62),
    ]
    about, _ = choose_model(job, replicas, accuracy_of=lambda _: 0.5, stop_reason="")
    writer.write(SavedModel(tmp_path, about, tuple(replicas)))

    statement = ProvenanceStatement.from_json((tmp_path / PROVENANCE_FILE).read_bytes())
    found = statement.provenance
    rows = [(each.rank, each.evidence, each.samples, each.revoked) for each in found.workers]
    assert rows[0] == (0, Evidence.REPLICA, 320, False)
    assert rows[1][:2] == (1, Evidence.REPLICA)
    assert rows[1][2] <= MAX_COUNT, "the figure is the peer's own"
    assert rows[3] == (3, Evidence.JOINED, 0, True)
    assert [each.worker for each in found.workers[4:]] == ["rank 77"]
    rank, evidence, samples, _ = rows[2]
    assert (rank, evidence) == (2, Evidence.STEPS)
    assert 0 < samples < 2**31, "at most all batches of seven iterations"
    assert found.start_model_sha256 == hashlib.sha256(b"start").hexdigest()
    assert statement.sha256 == {
        "model.keras": hashlib.sha256(b"weights").hexdigest(),
        "model.json": hashlib.sha256(b"{}").hexdigest(),
    }
    assert (found.saved_by, found.site) == (job.worker(Rank(0)).name, "a")

    uploaded: list[Path] = []
    impossible = [CollectedReplica(Rank(1), state, -1, 10)]
    writer.then(uploaded.append)(SavedModel(tmp_path, about, tuple(impossible)))
    assert uploaded == [tmp_path]
    assert not (tmp_path / PROVENANCE_FILE).exists(), (
        "the earlier statement belongs to another model"
    )
