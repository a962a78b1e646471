"""Tests of the process of an init container.

It gets its own download into the pod's volume, within the free space of the volume. Its exit code
gives the result, also on SIGTERM. Its message is where the operator reads it. The trainer then
finds its paths there.
"""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlion_api import cluster_names as names
from dlion_api.exit_codes import ExitCode
from dlion_api.protocol.pod_config import PodConfig
from dlion_api.spec import load_job
from dlion_worker.initializers.folders import dataset_root, model_root
from dlion_worker.pod.__main__ import main
from file_server import served
from manifest_table import changed, smallest

CONTENT = b"content"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
"""Digest of the data set; the model has the digest of an empty file."""
MODEL = {"url": "https://example.com/m.keras", "sha256": hashlib.sha256().hexdigest()}


def pod(root: Path, url: str, **more: str) -> Path:
    """Make a pod's mounts; return its termination message."""
    dataset = {"url": url, "sha256": SHA256, **more}
    document = changed(smallest(), {
        "spec.trainer.dataset": {"path": "data.npz", "format": "npz"},
        "spec.trainer.startFrom": "m.keras",
        "spec.trainer.initializer": {"dataset": dataset, "model": MODEL},
    })  # fmt: skip
    for folder in ("etc/dlion", "dev"):
        (root / folder).mkdir(parents=True)
    config = PodConfig(document, "plant-a", "dlion.example:7443", "keeper:7442")
    (root / "etc/dlion/pod.json").write_text(config.to_json())
    (root / "etc/dlion/ca.pem").touch()
    return root / "dev/termination-log"


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Restore what the process of a container changes."""
    mask, handler = signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGTERM)
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the downloads in a pod of the first worker."""
    monkeypatch.setenv(names.GROUP_VARIABLE, "small")
    monkeypatch.setenv(names.INDEX_VARIABLE, "0")
    monkeypatch.setenv(names.POD_IP_VARIABLE, "127.0.0.1")
    monkeypatch.setenv(names.DOWNLOADS_VARIABLE, str(tmp_path / "downloads"))
    return tmp_path / "downloads"


def initialize(root: Path) -> int:
    return main(["dataset-initializer", "--root", str(root)])


def test_the_trainer_finds_the_download(
    tmp_path: Path, volume: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with served(CONTENT) as file:
        pod(tmp_path, file.url)
        assert initialize(tmp_path) == ExitCode.OK
        assert initialize(tmp_path) == ExitCode.OK
        assert len(file.requests) == 1
    assert (volume / f"{SHA256}-data.npz" / "data.npz").read_bytes() == CONTENT
    assert "data.npz: 0.0 of 0.0 MB (100%)" in caplog.text


def test_a_pod_without_the_variables_of_reports_downloads_too(
    tmp_path: Path,
    volume: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """This is a Job of an earlier operator, whose init containers have no group."""
    monkeypatch.delenv(names.GROUP_VARIABLE)
    with served(CONTENT) as file:
        pod(tmp_path, file.url)
        assert initialize(tmp_path) == ExitCode.OK
    assert (volume / f"{SHA256}-data.npz" / "data.npz").read_bytes() == CONTENT
    assert "progress is not reported" in caplog.text


def test_paths_start_at_their_downloads(tmp_path: Path, volume: Path) -> None:
    pod(tmp_path, "http://example.com/data.npz")
    trainer = load_job(PodConfig.load(tmp_path / "etc/dlion/pod.json").job_document).spec.trainer
    assert dataset_root(trainer, Path("/data")) == volume / f"{SHA256}-data.npz"
    assert model_root(trainer, Path("/data")) == volume / f"{MODEL['sha256']}-m.keras"
    without, data_root = load_job(smallest()).spec.trainer, Path("/data")
    assert dataset_root(without, data_root) == model_root(without, data_root) == data_root


def test_a_failure_is_in_the_termination_message(tmp_path: Path, volume: Path) -> None:
    with served(b"another content") as file:
        report = pod(tmp_path, file.url)
        assert initialize(tmp_path) == ExitCode.DATA
    assert report.read_text().startswith("data.npz: another SHA-256")
    assert not list(volume.glob(f"{SHA256}*"))


def test_a_missing_secret_may_be_added_later(tmp_path: Path, volume: Path) -> None:
    report = pod(tmp_path, "https://127.0.0.1:1/data.npz", secretName="hub")
    assert initialize(tmp_path) == ExitCode.UNAVAILABLE
    assert "no credentials of Secret hub" in report.read_text()


def test_the_limit_of_the_volume_holds(
    tmp_path: Path, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(names.DOWNLOAD_BYTES_VARIABLE, "3")
    with served(CONTENT) as file:
        report = pod(tmp_path, file.url)
        assert initialize(tmp_path) == ExitCode.DATA
    assert "allowed: 3 bytes" in report.read_text()


def test_earlier_downloads_use_the_volume_too(
    tmp_path: Path, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(names.DOWNLOAD_BYTES_VARIABLE, "10")
    (volume / "earlier/folder").mkdir(parents=True)
    earlier = volume / "earlier/folder/file"
    earlier.write_bytes(bytes(4))
    with served(CONTENT) as file:
        report = pod(tmp_path, file.url)
        assert initialize(tmp_path) == ExitCode.DATA
        assert "allowed: 6 bytes" in report.read_text()
        earlier.write_bytes(bytes(3))
        assert initialize(tmp_path) == ExitCode.OK


def test_sigterm_ends_the_process_while_it_waits(tmp_path: Path, volume: Path) -> None:
    with served(b"") as gone:
        pod(tmp_path, gone.url)
    process = subprocess.Popen(
        [sys.executable, "-m", "dlion_worker.pod", "dataset-initializer", "--root", str(tmp_path)],
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    assert b"retry in" in process.stderr.readline()
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == ExitCode.INTERRUPTED


def test_without_a_cluster_the_users_cache_has_the_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(names.DOWNLOADS_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trainer = load_job(changed(smallest(), {
        "spec.trainer.dataset": {"path": "data.npz", "format": "npz"},
        "spec.trainer.initializer": {"dataset": MODEL},
    })).spec.trainer  # fmt: skip
    assert (
        dataset_root(trainer, Path()) == tmp_path / "dlion/downloads" / f"{MODEL['sha256']}-m.keras"
    )
