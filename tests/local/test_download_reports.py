"""Test the reports of init containers about their downloads.

An init container reports the downloaded bytes to its coordinator, over TLS and with its pod's
token. Without a coordinator it downloads nevertheless. A report for another worker is refused.

Left out: what the operator makes of it (tests/unit/operator/plan/test_initializer_state.py).
"""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from dlion_api import cluster_names as names
from dlion_api.exit_codes import ExitCode
from dlion_api.protocol.pod_config import PodConfig
from dlion_api.protocol.refusals import REASON_KEY, RefusalReason
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.spec import Job, load_job
from dlion_api.wire import coordination_pb2 as wire
from dlion_operator.coordinator import CoordinatorServer, CoordinatorThread
from dlion_operator.model.download_progress import DownloadProgress
from dlion_operator.pki.authority import CertificateAuthority, Tokens
from dlion_worker.coordination.channel import coordination_stub, open_channel
from dlion_worker.pod.__main__ import main
from dlion_worker.pod.pod_environment import Pod
from file_server import ServedFile, served
from manifest_table import changed, smallest

pytestmark = pytest.mark.patient

CONTENT = bytes(10**6)
DATASET = names.DATASET_INITIALIZER


@dataclass
class Site:
    """A coordinator, and the mounts of its first worker's pod."""

    root: Path
    document: dict[str, Any]
    server: CoordinatorServer
    coordinator: CoordinatorThread
    tokens: Tokens

    @property
    def job(self) -> Job:
        return load_job(self.document)

    def config(self) -> WorkerConfig:
        return self.pod().worker_config(listen_host="", state_dir=self.root)

    def pod(self) -> Pod:
        environment = {
            names.GROUP_VARIABLE: self.job.workers()[0].group,
            names.INDEX_VARIABLE: "0",
            names.POD_IP_VARIABLE: "127.0.0.1",
        }
        return Pod.read(self.root, environment)

    def reported(self) -> dict[str, DownloadProgress]:
        return dict(self.server.downloads(self.job.key))


@pytest.fixture
def file() -> Iterator[ServedFile]:
    with served(CONTENT) as it:
        yield it


@pytest.fixture
def site(tmp_path: Path, file: ServedFile, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    document = changed(smallest(), {
        "spec.trainer.dataset": {"path": "data.npz", "format": "npz"},
        "spec.trainer.initializer": {
            "dataset": {"url": file.url, "sha256": hashlib.sha256(CONTENT).hexdigest()}
        },
    })  # fmt: skip
    job, tokens = load_job(document), Tokens()
    worker = job.workers()[0]
    authority = CertificateAuthority(worker.site)
    server = CoordinatorServer("127.0.0.1:0", authority)
    server.open(
        job,
        authorities={worker.site: authority},
        tokens=tokens,
        on_record=lambda _: None,
        start_time_monotonic_s=time.monotonic(),
    )
    coordinator = CoordinatorThread(server, job.key)
    port = coordinator.start()
    mounts = {
        f"{names.CONFIG_DIR}/{names.POD_CONFIG_KEY}": PodConfig(
            document, str(worker.site), f"127.0.0.1:{port}", "keeper:1"
        ).to_json(),
        f"{names.CONFIG_DIR}/{names.AUTHORITY_KEY}": coordinator.authority_pem.decode(),
        f"{names.TOKEN_DIR}/{names.TOKEN_FILE}": tokens.issue(worker, job.key),
        "/dev/termination-log": "",
    }
    for path, text in mounts.items():
        place = tmp_path / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    site = Site(tmp_path, document, server, coordinator, tokens)
    for name, value in site.pod().environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(names.DOWNLOADS_VARIABLE, str(tmp_path / "downloads"))
    mask, handler = signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGTERM)
    yield site
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    signal.signal(signal.SIGTERM, handler)
    coordinator.close()


def initialize(site: Site) -> int:
    return main([DATASET, "--root", str(site.root)])


def test_a_download_is_reported(site: Site, file: ServedFile) -> None:
    file.failures = ["reset"]  # in the middle of the file, after the first report
    waiting = threading.Thread(target=set_when_reported, args=(site, file.received))
    waiting.start()
    assert initialize(site) == ExitCode.OK
    waiting.join()
    worker = site.job.workers()[0]
    (progress,) = site.reported().values()
    assert list(site.reported()) == [worker.name]
    assert (progress.container, progress.total_bytes) == (DATASET, len(CONTENT))


def set_when_reported(site: Site, event: threading.Event) -> None:
    deadline_s = time.monotonic() + 60
    while not site.reported() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    event.set()


def test_a_download_completes_without_a_coordinator(site: Site, file: ServedFile) -> None:
    site.coordinator.close()
    assert initialize(site) == ExitCode.OK
    assert len(file.requests) == 1


def report(site: Site, **fields: Any) -> wire.DownloadReport:
    worker = site.job.workers()[0]
    given = {
        "run": str(site.job.key),
        "worker": wire.Worker(
            rank=worker.rank, site=worker.site, group=worker.group, index=worker.index
        ),
        "token": site.tokens.issue(worker, site.job.key),
        "container": DATASET,
        **fields,
    }
    return wire.DownloadReport(**given)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"token": "another"}, RefusalReason.BAD_TOKEN),
        ({"container": "trainer"}, RefusalReason.MALFORMED),
        ({"done_bytes": 2**60}, RefusalReason.MALFORMED),
        ({"run": "default/other#1"}, RefusalReason.WRONG_RUN),
    ],
)
def test_a_wrong_report_is_refused(
    site: Site, fields: dict[str, Any], reason: RefusalReason
) -> None:
    with open_channel(site.config()) as channel:
        stub = coordination_stub(channel)
        stub.ReportDownload(report(site, done_bytes=1))
        with pytest.raises(grpc.RpcError) as raised:
            stub.ReportDownload(report(site, **fields))
    assert dict(raised.value.trailing_metadata())[REASON_KEY] == str(reason)
    assert [each.done_bytes for each in site.reported().values()] == [1]
