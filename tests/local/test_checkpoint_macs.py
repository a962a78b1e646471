"""Test that a worker trusts its own checkpoint only, with pods as processes of `dlion_worker.pod`.

While a run is suspended, another worker's checkpoint is put in place of one at the keeper. Its
worker sets it aside, names it, and takes the state of the other one. That one continues from
its own checkpoint: in a new pod, with an operator that was restarted and has renewed its authority.
Keys are in the pods' own folders only, not in a file of the keeper, in a state folder or in a log.

With a new key of the authority, a lone worker waits and does not replace its checkpoint at the
keeper. Once the run is suspended and the earlier key is back, it continues from it.

Left out: each way to alter a file (tests/unit/worker/test_checkpoint_mac), trainers that restart in
their pod (test_renewing), Kubernetes.
"""

from __future__ import annotations

import shutil
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dlion_api import cluster_names as names
from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_operator.pki.authority import CertificateAuthority
from dlion_worker.security.credential_store import CHECKPOINT_KEY_FILE
from local_run import blobs, job_document
from pod_run import UID, PodRun, pod_run

BREAK = 10


def suspend(run: PodRun, *, workers: int = 2) -> None:
    """End all pods but the keeper, and the operator; delete the pods' folders."""
    trainers = [f"trainer-{rank}" for rank in range(workers)]
    assert run.end(*trainers) == dict.fromkeys(trainers, ExitCode.INTERRUPTED), run.story()
    run.end(*(f"sidecar-{rank}" for rank in range(workers)))
    for rank in range(workers):
        run.lose_worker(rank)
    run.coordinator.close()


def restart_operator(run: PodRun) -> None:
    """Start the operator with the stored authority, which it renews."""
    stored = run.authorities[run.site].to_stored()
    later = datetime.now(UTC) + timedelta(seconds=1)
    run.authorities[run.site] = CertificateAuthority(run.site, stored=stored).renewed(now=later)
    run.start_coordinator()


def start_again(run: PodRun, authority: CertificateAuthority) -> None:
    """Start the operator with that authority, and new pods; only the keeper's claim is kept."""
    shutil.rmtree(run.root("keeper") / names.SHARED_DIR.lstrip("/"))
    run.authorities[run.site] = authority
    run.start_coordinator()
    run.start_keeper()
    run.start_worker(0)


def checkpoint(run: PodRun, rank: int) -> Path:
    return run.results / f"state/w{rank}/checkpoint.npz"


def assert_keys_are_kept_apart(run: PodRun) -> None:
    for rank in range(2):
        key = run.authorities[run.site].checkpoint_key(UID, run.job.key, Rank(rank))
        own = run.root(f"w{rank}") / names.SHARED_DIR.lstrip("/") / CHECKPOINT_KEY_FILE.format(rank)
        assert own.read_bytes() == key
        assert stat.S_IMODE(own.stat().st_mode) == 0o600
        for path in filter(Path.is_file, run.folder.rglob("*")):
            content = b"" if path == own else path.read_bytes()
            assert key not in content, path
            assert key.hex().encode() not in content, path


@pytest.mark.timeout(300)
def test_only_its_own_checkpoint_is_trusted(tmp_path: Path) -> None:
    trainer = {"program": blobs(tmp_path, nap_s=0.1), "stop": {"maxSteps": 100_000}}
    document = job_document(2, trainer=trainer, checkpoint={"everySeconds": 1}, runId="r1")
    with pod_run(tmp_path, document, subnet=61) as run:
        run.start_keeper()
        for rank in range(2):
            run.start_worker(rank)
        run.wait_until(lambda: all(len(run.steps(rank)) >= BREAK for rank in range(2)), "the break")
        suspend(run)
        shutil.copy(checkpoint(run, 0), checkpoint(run, 1))
        broken_at = max(step.iteration for step in run.steps())

        restart_operator(run)
        for rank in range(2):
            run.start_worker(rank)
        run.wait_until(lambda: len(run.events("CheckpointDamaged")) == 1, "the checkpoint is named")
        (damaged,) = run.events("CheckpointDamaged")
        assert (damaged.rank, damaged.warning) == (1, True)
        assert "lacks the MAC of this worker in this run" in damaged.message
        assert "set aside as checkpoint.npz.damaged" in damaged.message
        run.wait_until(lambda: run.events("Resumed"), "the other one continues")
        assert [event.rank for event in run.events("Resumed")] == [0], run.story()
        run.wait_until(lambda: run.steps(1)[-1].iteration > broken_at + BREAK, "training of both")
        assert [event.rank for event in run.events("WorkerRejoined")] == [1], run.story()
        assert (run.root("w1") / "var/lib/dlion/worker/checkpoint.npz.damaged").exists()
        assert_keys_are_kept_apart(run)


@pytest.mark.timeout(300)
def test_a_new_key_of_the_authority_does_not_lose_checkpoints(tmp_path: Path) -> None:
    trainer = {"program": blobs(tmp_path, nap_s=0.1), "stop": {"maxSteps": 100_000}}
    document = job_document(1, trainer=trainer, checkpoint={"everySeconds": 1}, runId="r1")
    with pod_run(tmp_path, document, subnet=62) as run:
        run.start_keeper()
        run.start_worker(0)
        run.wait_until(lambda: len(run.steps(0)) >= BREAK, "the break")
        suspend(run, workers=1)
        stored = run.authorities[run.site]
        run.end("keeper")
        kept, made = checkpoint(run, 0).read_bytes(), len(run.steps(0))

        start_again(run, CertificateAuthority(run.site))
        run.wait_until(lambda: len(run.events("CheckpointDamaged")) == 2, "it waits")
        assert (
            "restore the key of the site's authority" in run.events("CheckpointDamaged")[1].message
        )
        suspend(run, workers=1)
        run.end("keeper")
        assert checkpoint(run, 0).read_bytes() == kept
        assert len(run.steps(0)) == made
        assert not run.events("Resumed")

        start_again(run, stored)
        run.wait_until(lambda: len(run.steps(0)) >= made + BREAK, "training")
        assert len(run.events("Resumed")) == 1
