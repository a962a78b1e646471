"""Test the upload of worker logs to the keeper, with mutual TLS, real client, threads and files.

The end of a worker's output is uploaded during training and when its pod ends; its size is bounded.
The output of an earlier pod precedes it, also if only the sidecar restarts. A keeper that is away,
full or refuses delays the end of a sidecar by seconds at most; missed output is uploaded later. No
worker reads or writes another's log. In pods, the traceback of a failing program is kept once for
each start. A suspended and resumed worker has the logs of both pods.

The last test has whole processes. Left out: containers (tests/cluster).
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from dlion_api.errors import ContractError
from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_worker.artifact_client.paths import checkpoint_path, log_path
from dlion_worker.artifact_server import store as store_module
from dlion_worker.rotated_log import MAX_LOG_BYTES
from dlion_worker.sidecar import log_upload
from dlion_worker.sidecar.log_upload import NEXT_POD, LogUpload
from keeper_service import Keeper
from local_run import blobs, job_document
from pod_run import pod_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OWN = log_path(Rank(0))


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    (tmp_path / "kept").mkdir()
    it = Keeper(tmp_path / "kept")
    yield it
    it.close()


@pytest.fixture
def end_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """A sidecar that ends waits for the keeper for this time, not five seconds."""
    monkeypatch.setattr(log_upload, "END_S", 1.0)
    monkeypatch.setattr(log_upload, "RETRY_S", 0.2)
    return 1.0


def pod(keeper: Keeper, folder: Path, *, interval_s: float = 60.0, rank: int = 0) -> LogUpload:
    """Start the uploads of a sidecar whose trainer writes to `folder`."""
    folder.mkdir(exist_ok=True)
    client = keeper.client(rank, incarnation=0)
    return LogUpload(client, Rank(rank), folder / "trainer.log", interval_s=interval_s)


def kept(keeper: Keeper) -> bytes:
    return (keeper.folder / OWN).read_bytes()


def wait_until_kept(keeper: Keeper, text: bytes) -> None:
    deadline_s = time.monotonic() + 20
    while not ((keeper.folder / OWN).exists() and text in kept(keeper)):
        assert time.monotonic() < deadline_s, f"never: {text!r}"
        time.sleep(0.05)


def test_a_log_is_uploaded_during_training_and_at_the_end(tmp_path: Path, keeper: Keeper) -> None:
    upload = pod(keeper, tmp_path / "pod", interval_s=0.1)
    log = tmp_path / "pod" / "trainer.log"
    log.write_text("step 1\n")
    wait_until_kept(keeper, b"step 1\n")
    with log.open("a") as file:
        file.write("ValueError: no such layer\n")
    upload.close()
    assert kept(keeper) == b"step 1\nValueError: no such layer\n"


def test_a_worker_that_prints_nothing_has_no_log(tmp_path: Path, keeper: Keeper) -> None:
    pod(keeper, tmp_path / "pod").close()
    assert keeper.files() == {}


def test_logs_of_later_pods_are_appended_within_the_bound(tmp_path: Path, keeper: Keeper) -> None:
    for number in range(3):
        upload = pod(keeper, tmp_path / f"pod{number}")
        (tmp_path / f"pod{number}" / "trainer.log").write_text(f"life {number}\n")
        upload.close()
    assert kept(keeper) == NEXT_POD.join(b"life %d\n" % number for number in range(3))
    again = pod(keeper, tmp_path / "pod2")  # only the sidecar restarts
    with (tmp_path / "pod2" / "trainer.log").open("a") as file:
        file.write("continues\n")
    again.close()
    assert kept(keeper).endswith(NEXT_POD + b"life 2\ncontinues\n")
    assert kept(keeper).count(b"life 2") == 1
    last = pod(keeper, tmp_path / "pod3")
    (tmp_path / "pod3" / "trainer.log").write_bytes(b"\x1b[2J\xff\n" * 200_000)
    last.close()
    assert len(kept(keeper)) <= MAX_LOG_BYTES
    assert kept(keeper).startswith(b"\x1b[2J\xff\n"), "whole lines of the newest pod"
    assert set(keeper.files()) == {OWN}


def test_a_sidecar_without_an_incarnation_is_not_an_earlier_worker(
    tmp_path: Path, keeper: Keeper
) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_bytes(b"state")
    trainer = keeper.client(0, incarnation=2)
    trainer.put(checkpoint_path(Rank(0)), checkpoint)
    trainer.close()
    upload = pod(keeper, tmp_path / "pod")
    (tmp_path / "pod" / "trainer.log").write_text("step 1\n")
    upload.close()
    assert kept(keeper) == b"step 1\n"


@pytest.mark.parametrize("name", ["trainer.log", "trainer.log.1", "earlier.log"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_program_can_neither_upload_the_sidecars_files_nor_block_it(
    tmp_path: Path, keeper: Keeper, end_s: float, name: str, kind: str
) -> None:
    secret, folder = tmp_path / "secret", tmp_path / "pod"
    secret.write_text("token\n")
    upload = pod(keeper, folder)
    (folder / "trainer.log").write_text("step 1\n")
    (folder / name).unlink(missing_ok=True)
    if kind == "link":
        (folder / name).symlink_to(secret)
    else:
        os.mkfifo(folder / name)
    began_s = time.monotonic()
    upload.close()
    assert time.monotonic() - began_s < end_s + 3
    assert keeper.files() == {}


def test_a_missed_log_is_uploaded_when_the_keeper_is_back(tmp_path: Path, keeper: Keeper) -> None:
    keeper.stop()
    upload = pod(keeper, tmp_path / "pod", interval_s=0.1)
    (tmp_path / "pod" / "trainer.log").write_text("step 1\n")
    time.sleep(0.5)
    keeper.start()
    wait_until_kept(keeper, b"step 1\n")
    upload.close()


def test_a_missing_keeper_delays_the_end_by_seconds_only(
    tmp_path: Path, keeper: Keeper, end_s: float
) -> None:
    keeper.stop()
    upload = pod(keeper, tmp_path / "pod")
    (tmp_path / "pod" / "trainer.log").write_text("step 1\n")
    began_s = time.monotonic()
    upload.close()
    assert time.monotonic() - began_s < end_s + 3
    keeper.start()


def test_a_full_disk_keeps_the_stored_log(
    tmp_path: Path, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pod(keeper, tmp_path / "pod0")
    (tmp_path / "pod0" / "trainer.log").write_text("life 0\n")
    first.close()
    monkeypatch.setattr(store_module, "RESERVE_BYTES", 2**62)
    upload = pod(keeper, tmp_path / "pod1", interval_s=0.1)
    (tmp_path / "pod1" / "trainer.log").write_text("life 1\n")
    time.sleep(0.5)
    assert kept(keeper) == b"life 0\n"
    monkeypatch.undo()
    wait_until_kept(keeper, b"life 0\n" + NEXT_POD + b"life 1\n")
    upload.close()
    assert keeper.refusals.counts() == {}, "a full disk is not a refusal"


def test_an_output_that_is_not_a_file_does_not_delay_the_end(
    tmp_path: Path, keeper: Keeper, end_s: float
) -> None:
    """A program may put any kind of file there."""
    (tmp_path / "pod" / "trainer.log").mkdir(parents=True)
    began_s = time.monotonic()
    pod(keeper, tmp_path / "pod").close()
    assert time.monotonic() - began_s < end_s + 3
    assert keeper.files() == {}


def test_a_log_belongs_to_its_worker_and_is_bounded(tmp_path: Path, keeper: Keeper) -> None:
    upload = pod(keeper, tmp_path / "pod")
    (tmp_path / "pod" / "trainer.log").write_text("step 1\n")
    upload.close()
    other = keeper.client(1)
    try:
        with pytest.raises(ContractError, match="is not plant-a/g-1's"):
            other.get(OWN, tmp_path / "theirs")
        with pytest.raises(ContractError, match="is not plant-a/g-1's"):
            other.put(OWN, tmp_path / "pod" / "trainer.log")
        (tmp_path / "large").write_bytes(bytes(MAX_LOG_BYTES + 1))
        with pytest.raises(ContractError, match=f"allowed: {MAX_LOG_BYTES}"):
            other.put(log_path(Rank(1)), tmp_path / "large")
    finally:
        other.close()
    assert kept(keeper) == b"step 1\n"


RAISES = """
def build_model():
    raise ValueError("no such layer: convolution3")
"""


@pytest.mark.timeout(300)
def test_the_traceback_of_a_failed_program_is_kept_after_its_pods(tmp_path: Path) -> None:
    program = blobs(tmp_path, more=RAISES)
    document = job_document(1, trainer={"program": program}, runId="r1")
    with pod_run(tmp_path, document, subnet=8) as run:
        run.start_keeper()
        for life in (1, 2):
            run.start_worker(0)
            assert run.wait("trainer-0") == ExitCode.PROGRAM, run.story()
            # A forked trainer can end before its sidecar has the certificate that uploads need.
            run.wait_until(
                lambda life=life: run.log("sidecar-0").count("serving other sidecars") == life,
                "the sidecar serves",
            )
            assert run.end("sidecar-0") == {"sidecar-0": ExitCode.OK}
            run.lose_worker(0)
            log = (run.results / OWN).read_text()
            assert log.count("ValueError: no such layer: convolution3") >= life
            assert log.count("Traceback") >= life, log
            assert log.count(NEXT_POD.decode()) == life - 1
