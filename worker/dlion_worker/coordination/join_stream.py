"""Keeps a join stream open, which carries membership updates, and reopens it when it breaks.

Each announcement of addresses starts its own stream. The coordinator ends the previous one only
when the new one has joined, so the worker is never reported lost.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from dlion_api.errors import ContractError
from dlion_api.protocol.trust import JOINING
from dlion_api.wire import coordination_pb2, coordination_pb2_grpc
from dlion_worker.coordination.backoff import Backoff
from dlion_worker.coordination.channel import Caller, CallFailure, failure_of
from dlion_worker.security.credential_store import make_pod_proof

_LOG = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 5.0
"""How long `close` waits for the thread; it is a daemon and does not hold the process."""


@dataclass(frozen=True)
class Announcement:
    caller: Caller
    incarnation: int
    spec_hash: str
    exchange_address: str
    measuring_address: str
    proof_dir: Path

    def request(self, known_version: int) -> coordination_pb2.JoinRequest:
        """The request, with the current token and the pod's proof. Raises: OSError without one."""
        return coordination_pb2.JoinRequest(
            run=str(self.caller.job),
            worker=self.caller.wire_worker(),
            incarnation=self.incarnation,
            exchange_address=self.exchange_address,
            measuring_address=self.measuring_address,
            token=self.caller.token(),
            spec_hash=self.spec_hash,
            known_version=known_version,
            proof=make_pod_proof(self.proof_dir, job=self.caller.job, use=JOINING),
        )


@dataclass(eq=False)
class JoinStream:
    """The stream of one announcement, reopened until closed, superseded or rejected permanently."""

    stub: coordination_pb2_grpc.CoordinationStub
    announcement: Announcement
    known_version: Callable[[], int]
    on_update: Callable[[coordination_pb2.MembershipUpdate], None]
    on_failure: Callable[[CallFailure], None]

    def __post_init__(self) -> None:
        self._ended = threading.Event()
        self._closed = False
        self._call: grpc.Call | None = None
        self._last_message = ""
        self.connected = False
        self._thread = threading.Thread(target=self._run, name="dlion-join", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def supersede(self) -> None:
        """Make no further attempts; the coordinator ends the current stream."""
        self._ended.set()

    def close(self) -> None:
        self._closed = True
        self._ended.set()
        if (call := self._call) is not None:
            call.cancel()
        if self._thread.ident is not None:
            # A cancelled call that gRPC does not end must not hold the end of a worker.
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        backoff = Backoff()
        while not self._ended.is_set():
            failure = self._read_updates(backoff)
            self.connected = False
            if failure.ends_start and not self._ended.is_set():
                self.on_failure(failure)
                return
            if not self._ended.is_set() and failure.message != self._last_message:
                _LOG.warning("no membership from the coordinator, retrying: %s", failure.message)
                self._last_message = failure.message
            self._ended.wait(backoff.next_s())

    def _read_updates(self, backoff: Backoff) -> CallFailure:
        """Join and handle updates until the stream breaks; return the reason."""
        try:
            call = self.stub.Join(self.announcement.request(self.known_version()))
            self._call = call
            if self._closed:  # between the two lines above
                call.cancel()
            for update in call:
                backoff.reset()
                self.connected = True
                self.on_update(update)
        except ContractError as error:
            call.cancel()
            return failure_of(error)
        except (grpc.RpcError, OSError) as error:
            return failure_of(error)
        return CallFailure(None, "the coordinator ended the stream")
