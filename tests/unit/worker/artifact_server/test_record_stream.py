"""Tests of the keeper's stream of records.

A request for a new connection holds also while the present one is just being opened.

Left out: what is recorded (test_recorder); loss of the coordinator (tests/local/test_pods).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from dlion_api.names import SiteName
from dlion_api.spec import load_job
from dlion_api.wire import coordination_pb2, coordination_pb2_grpc
from dlion_worker.artifact_server.config import KeeperConfig
from dlion_worker.artifact_server.record_stream import RecordStream
from dlion_worker.artifact_server.recorder import Recorder
from dlion_worker.artifact_server.service import UploadRejections
from dlion_worker.artifact_server.workers import RevokedWorkers
from local_run import job_document


class Coordinator(coordination_pb2_grpc.CoordinationServicer):
    """Keeps each stream open, without a record."""

    def Follow(  # noqa: N802 - as in the service
        self, _request: coordination_pb2.FollowRequest, context: grpc.ServicerContext
    ) -> Iterator[coordination_pb2.FollowedRecords]:
        ended = threading.Event()
        context.add_callback(ended.set)
        ended.wait()
        yield from ()


class Rejections(UploadRejections):
    """Asks for a new connection while the request of the first one is made."""

    stream: RecordStream

    def __init__(self) -> None:
        super().__init__()
        self.requested, self.requested_again = threading.Event(), threading.Event()

    def counts(self) -> Mapping[str, int]:
        if self.requested.is_set():
            self.requested_again.set()
        else:
            self.requested.set()
            self.stream.reconnect()
        return super().counts()


def test_a_new_connection_is_opened_also_while_one_is_being_opened(tmp_path: Path) -> None:
    job, rejections = load_job(job_document(1)), Rejections()
    (tmp_path / "token").write_text("t")
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        coordination_pb2_grpc.add_CoordinationServicer_to_server(Coordinator(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        config = KeeperConfig(
            job=job,
            site=SiteName("plant-a"),
            state_dir=tmp_path,
            coordinator_address=f"127.0.0.1:{port}",
            authority_pem_path="",
            token_path=str(tmp_path / "token"),
            proof_dir=tmp_path,
            listen_host="127.0.0.1",
            port=0,
        )
        recorder = Recorder(config.folder, job)
        revoked = RevokedWorkers(tmp_path, is_over=False)
        rejections.stream = stream = RecordStream(config, recorder, rejections, revoked)
        stream.start()
        try:
            assert rejections.requested_again.wait(30)
        finally:
            stream.close()
            recorder.close()
            server.stop(0).wait()
