"""The coordinator's stream of records, held in a thread until the run is over.

Owns the connection and its return. Called by `process`. With the coordinator away there is nothing
to record: it keeps what comes in the meantime, and says so where it could not.
"""

from __future__ import annotations

import logging
import random
import threading
from pathlib import Path

import grpc

from dlion_api.trust import FOLLOWING
from dlion_api.wire import coordination_pb2
from dlion_worker.coordination.backoff import Backoff
from dlion_worker.coordination.channel import Caller, coordination_stub, failure_of, open_channel
from dlion_worker.coordination.proving import proof_of
from dlion_worker.keeper.config import KeeperConfig
from dlion_worker.keeper.recorder import Recorder
from dlion_worker.keeper.refusals import Refusals
from dlion_worker.results.storage import StorageError

_LOG = logging.getLogger(__name__)


class Follower:
    """Feeds one recorder; `close` ends stream and thread."""

    def __init__(self, config: KeeperConfig, recorder: Recorder, refusals: Refusals) -> None:
        self._config = config
        self._refusals = refusals
        self._recorder = recorder
        self._caller = Caller(config.job.key, config.identity, Path(config.token_path))
        self._ended = threading.Event()
        self._is_remade = False
        self._call: grpc.Call | None = None
        self._last_message = ""
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        """Begins to follow, unless the run is over."""
        if not self._recorder.is_over:
            self._thread.start()

    def remake(self) -> None:
        """Goes on from where it is over a new connection: the coordinator shows its newest
        certificate there, and hears whom this keeper has refused; it keeps the records meanwhile.
        """
        self._is_remade = True
        if (call := self._call) is not None:
            call.cancel()

    def close(self) -> None:
        """Nothing is recorded any more when this returns."""
        self._ended.set()
        if (call := self._call) is not None:
            call.cancel()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        backoff = Backoff(random.random)
        while not self._ended.is_set() and not self._recorder.is_over:
            message = self._follow(backoff)
            if self._is_remade:
                self._is_remade = False
                continue
            if message and message != self._last_message and not self._ended.is_set():
                _LOG.warning("no records from the coordinator, trying again: %s", message)
                self._last_message = message
            self._ended.wait(backoff.next_s())

    def _follow(self, backoff: Backoff) -> str:
        """Holds one stream; why it ended."""
        try:
            with open_channel(self._config) as channel:
                call = coordination_stub(channel).Follow(self._request())
                self._call = call
                if self._ended.is_set():  # closed between the two lines above
                    call.cancel()
                for update in call:
                    self._take(update)
                    backoff.reset()  # not before: a disk may be full
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
        epoch, sequence = self._recorder.place
        return coordination_pb2.FollowRequest(
            token=self._caller.token(),
            run=str(self._config.job.key),
            site=self._config.site,
            epoch=epoch,
            taken_sequence=sequence,
            refusals=self._refusals.counts(),
            refused_words=self._refusals.words,
            proof=proof_of(self._config.proof_dir, job=self._config.job.key, use=FOLLOWING),
        )

    def _take(self, update: coordination_pb2.FollowedRecords) -> None:
        if update.records_json:
            self._recorder.take(update.epoch, update.first_sequence, update.records_json)
        if update.ended_reason:
            self._recorder.finish(update.ended_reason, succeeded=update.succeeded)
