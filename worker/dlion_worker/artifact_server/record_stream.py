"""Reads the coordinator's stream of records in a thread until the run is over.

The coordinator buffers records while it is disconnected; an event reports any that it had to drop.
"""

import logging
import threading
from pathlib import Path

import grpc

from dlion_api.protocol.trust import FOLLOWING
from dlion_api.wire import coordination_pb2
from dlion_results.run_folder.storage import StorageError
from dlion_worker.artifact_server.config import KeeperConfig
from dlion_worker.artifact_server.recorder import Recorder
from dlion_worker.artifact_server.service import UploadRejections
from dlion_worker.artifact_server.workers import RevokedWorkers
from dlion_worker.coordination.backoff import Backoff
from dlion_worker.coordination.channel import Caller, coordination_stub, failure_of, open_channel
from dlion_worker.security.credential_store import make_pod_proof

_LOG = logging.getLogger(__name__)


class RecordStream:
    """Passes records to one recorder; `close` ends the stream and the thread."""

    def __init__(
        self,
        config: KeeperConfig,
        recorder: Recorder,
        refusals: UploadRejections,
        revoked: RevokedWorkers,
    ) -> None:
        self._config = config
        self._rejections = refusals
        self._revoked = revoked
        self._recorder = recorder
        self._caller = Caller(config.job.key, config.identity, Path(config.token_path))
        self._ended = threading.Event()
        self._reconnecting = False
        self._call: grpc.Call | None = None
        self._last_message = ""
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        """Start the thread, unless the run is over."""
        if not self._recorder.is_over:
            self._thread.start()

    def reconnect(self) -> None:
        """Continue over a new connection.

        The coordinator shows its newest certificate there and receives the rejections; it buffers
        records meanwhile.
        """
        self._reconnecting = True
        if (call := self._call) is not None:
            call.cancel()

    def close(self) -> None:
        """End the thread; nothing is recorded after this returns."""
        self._ended.set()
        if (call := self._call) is not None:
            call.cancel()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        backoff = Backoff()
        while not self._ended.is_set() and not self._recorder.is_over:
            message = self._follow(backoff)
            if self._reconnecting:
                continue
            if message and message != self._last_message and not self._ended.is_set():
                _LOG.warning("no records from the coordinator, retrying: %s", message)
                self._last_message = message
            self._ended.wait(backoff.next_s())

    def _follow(self, backoff: Backoff) -> str:
        """Read one stream; return the reason why it ended."""
        self._reconnecting = False  # what is asked for from now on concerns this connection
        try:
            with open_channel(self._config) as channel:
                call = coordination_stub(channel).Follow(self._request())
                self._call = call
                if self._ended.is_set() or self._reconnecting:  # before `close` could cancel it
                    call.cancel()
                for update in call:
                    self._take(update)
                    backoff.reset()  # not earlier: a full disk must back off
                    self._last_message = ""
                    if self._recorder.is_over or self._ended.is_set():
                        call.cancel()
                        return ""
        except StorageError as error:
            call.cancel()
            return str(error)
        except (grpc.RpcError, OSError) as error:
            return failure_of(error).message
        return "the coordinator ended the stream"

    def _request(self) -> coordination_pb2.FollowRequest:
        epoch, sequence = self._recorder.position
        return coordination_pb2.FollowRequest(
            token=self._caller.token(),
            run=str(self._config.job.key),
            site=self._config.site,
            epoch=epoch,
            taken_sequence=sequence,
            refusals=self._rejections.counts(),
            refused_words=self._rejections.last_message,
            proof=make_pod_proof(self._config.proof_dir, job=self._config.job.key, use=FOLLOWING),
        )

    def _take(self, update: coordination_pb2.FollowedRecords) -> None:
        self._revoked.set(update.revoked, dict(update.revocation_reasons))
        if update.records_json:
            self._recorder.take(update.epoch, update.first_sequence, update.records_json)
        if update.ended_reason:
            self._recorder.finish(update.ended_reason, succeeded=update.succeeded)
