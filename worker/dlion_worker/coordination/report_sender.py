"""Sends queued records to the coordinator, four times a second, in a thread.

An unanswered report is sent again unchanged, with the same number, so that none is counted twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc

from dlion_api.protocol.progress import ProgressRecord
from dlion_api.protocol.refusals import RefusalReason
from dlion_api.wire import coordination_pb2, coordination_pb2_grpc
from dlion_worker.coordination.backoff import Backoff
from dlion_worker.coordination.channel import Caller, CallFailure, failure_of
from dlion_worker.coordination.record_queue import RecordQueue

_LOG = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.25
SLOW_FLUSH_S = 60.0
"""How long a worker that has finished waits for a coordinator that answers, however slowly. Without
its last records, which name the saved model, the run counts as ended early. On a machine with 30
processes for each core they took more than 20 s."""


@dataclass(eq=False)
class ReportSender:
    """The queue of one worker's records and the thread that empties it."""

    stub: coordination_pb2_grpc.CoordinationStub
    """Another one counts from the next attempt on; a call broken by the change is repeated."""
    caller: Caller
    incarnation: int
    on_stop: Callable[[str], None]
    on_failure: Callable[[CallFailure], None]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._queue = RecordQueue()
        self._sequence = 0
        self._closing = threading.Event()
        self._abandoned = threading.Event()
        self._finished = False
        self._is_answered = False
        """Whether the last attempt that has ended was answered."""
        self._call: grpc.Future[coordination_pb2.ReportReply] | None = None
        self._thread = threading.Thread(target=self._run, name="dlion-report", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, records: Iterable[ProgressRecord]) -> None:
        """Queue records; never wait for the network.

        Raises: ContractError (a record cannot be sent (`dlion_api.protocol.records`)).
        """
        with self._lock:
            for record in records:
                self._queue.put(record)

    def close(
        self, *, flush_s: float, finished: bool, interrupted: Callable[[], bool] = lambda: False
    ) -> bool:
        """End the thread; return True if everything was accepted, including `finished`.

        Takes about `flush_s` at most. If `finished` and the coordinator is slow, SLOW_FLUSH_S, or
        until `interrupted`.
        """
        self._finished = finished
        began_s = time.monotonic()
        self._closing.set()
        if self._thread.ident is None:
            return not self._queue and not finished
        self._thread.join(flush_s)
        while finished and self._is_answered and time.monotonic() - began_s < SLOW_FLUSH_S:
            self._thread.join(0.1)
            if not self._thread.is_alive() or interrupted():
                break
        if self._thread.is_alive():
            self._abandoned.set()
            if (call := self._call) is not None:
                call.cancel()
            self._thread.join()
        return not self._abandoned.is_set()

    def _run(self) -> None:
        backoff = Backoff()
        while not self._abandoned.is_set():
            self._closing.wait(REPORT_INTERVAL_S)
            report = self._next_report()
            if report is not None and not self._deliver(report, backoff):
                return
            if self._closing.is_set() and (report is None or report.finished):
                return

    def _next_report(self) -> coordination_pb2.ProgressReport | None:
        last_ones = self._closing.is_set()
        with self._lock:
            texts = self._queue.take_batch()
            finished = last_ones and self._finished and not self._queue
        if not texts and not finished:
            return None
        self._sequence += 1
        return coordination_pb2.ProgressReport(
            run=str(self.caller.job),
            worker=self.caller.wire_worker(),
            incarnation=self.incarnation,
            records_json=texts,
            sequence=self._sequence,
            finished=finished,
        )

    def _deliver(self, report: coordination_pb2.ProgressReport, backoff: Backoff) -> bool:
        """Send until the report is accepted or rejected permanently; False if sending must end."""
        while not self._abandoned.is_set():
            failure = self._attempt(report)
            if failure is None:
                backoff.reset()
                return True
            if failure.reason is RefusalReason.MALFORMED:
                _LOG.error("%d records rejected: %s", len(report.records_json), failure.message)
                return True
            if failure.ends_start:
                self.on_failure(failure)
                return False
            _LOG.debug("report %d not accepted yet: %s", report.sequence, failure.message)
            self._pause(backoff.next_s())
        return False

    def _attempt(self, report: coordination_pb2.ProgressReport) -> CallFailure | None:
        try:
            report.token = self.caller.token()
            call = self.stub.Report.future(report)
            self._call = call
            if self._abandoned.is_set():  # closed between the two lines above
                call.cancel()
            reply = call.result()
        except grpc.FutureCancelledError:
            return CallFailure(None, "given up while closing")
        except (grpc.RpcError, OSError, ValueError) as error:  # ValueError: the channel was closed
            self._is_answered = False
            return failure_of(error)
        self._is_answered = True
        if reply.stop_reason:
            self.on_stop(reply.stop_reason)
        return None

    def _pause(self, wait_s: float) -> None:
        # Closing interrupts a long backoff: one more attempt at once, then short waits.
        end_s = time.monotonic() + wait_s
        was_closing = self._closing.is_set()
        while time.monotonic() < end_s and not self._abandoned.wait(0.05):
            if self._closing.is_set() and not was_closing:
                return
