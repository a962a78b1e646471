"""The trainer's client of its sidecar's Unix socket.

Owns one background thread. The training thread only appends to a bounded queue (`send`) and reads
the latest directive (`latest_directive`); it never waits for a slow, dead or restarting sidecar.
Training then continues with the last directive. Decides nothing.
"""

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from dlion_api import VERSION
from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import Rank
from dlion_api.protocol.measurements import (
    CpuAllowance,
    Directive,
    MeasuringEndpoint,
    MeasuringRefused,
    MeasuringSent,
    Peers,
    StreamRefusals,
    TrainerAlive,
)
from dlion_api.protocol.sidecar_protocol import MAX_LINE_BYTES, TrainerRecord, decode, encode
from dlion_worker.coordination.backoff import JITTER

_LOG = logging.getLogger(__name__)

MAX_QUEUED_RECORDS = 1024
ALIVE_INTERVAL_S = 2.0
"""Interval of `TrainerAlive` while there is nothing else to send."""
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 1.0
_RECEIVE_BYTES = 65536


class SidecarClient:
    """Sends records and keeps the latest directive. Safe to use from any thread.

    `CpuAllowance`, `Peers` and `StreamRefusals` are states: only the latest of each is kept. A
    restarted sidecar gets all of them again, with the last directive, to continue where the old one
    stopped. Other records are events; the oldest are dropped if the sidecar is too slow.
    """

    def __init__(self, socket_path: str | Path) -> None:
        self._path = str(socket_path)
        self._lock = threading.Condition()
        self._events: deque[TrainerRecord] = deque(maxlen=MAX_QUEUED_RECORDS)
        self._states: dict[type, TrainerRecord] = {}
        self._sent: dict[type, TrainerRecord] = {}
        self._directive: Directive | None = None
        self._on_directive: Callable[[Directive], None] | None = None
        self._on_refused: Callable[[str], None] | None = None
        self._on_sent: Callable[[Rank, int], None] | None = None
        self._resume_from: Directive | None = None
        self._endpoint: str | None = None
        self._connection: socket.socket | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="sidecar-client", daemon=True)
        self._thread.start()

    def send(self, *records: TrainerRecord) -> None:
        """Queue records for the sidecar; returns at once."""
        with self._lock:
            for record in records:
                if isinstance(record, CpuAllowance | Peers | StreamRefusals):
                    self._states[type(record)] = record
                else:
                    self._events.append(record)
            self._lock.notify_all()

    def on_directive(self, call: Callable[[Directive], None]) -> None:
        """Pass the latest and all later directives to `call`, which must not block."""
        with self._lock:
            self._on_directive, directive = call, self._directive
        if directive is not None:
            call(directive)

    def on_refused(self, call: Callable[[str], None]) -> None:
        """Pass the sidecar's refusal reports to `call`, which must not block."""
        self._on_refused = call

    def on_sent(self, call: Callable[[Rank, int], None]) -> None:
        """Pass the bytes that the sidecar sends to each peer to `call`, which must not block."""
        self._on_sent = call

    def latest_directive(self) -> Directive | None:
        """The sidecar's latest directive; None before the first."""
        return self._directive

    def endpoint(self, timeout_s: float = 30.0) -> str:
        """The sidecar's measuring address, for the coordinator to announce to peers.

        Raises: UnavailableError where no sidecar reports it in time; a retry may help.
        """
        with self._lock:
            if not self._lock.wait_for(lambda: self._endpoint or self._closed, timeout_s):
                raise UnavailableError(
                    f"sidecar at {self._path}: no measuring address within {timeout_s:g} s; "
                    "see its log for why it did not start"
                )
            if self._endpoint is None:
                raise UnavailableError(f"sidecar at {self._path}: the client is closed")
            return self._endpoint

    def close(self) -> None:
        """End the thread; queued records are lost."""
        with self._lock:
            self._closed = True
            self._disconnect()
            self._lock.notify_all()
        self._thread.join(timeout=5)

    # ---- background threads --------------------------------------------------------------------

    def _run(self) -> None:
        retry_s = _FIRST_RETRY_S
        while not self._closed:
            connection = self._dial()
            if connection is None:
                retry_s = self._pause(retry_s)
                continue
            connected_s = time.monotonic()
            listener = threading.Thread(
                target=self._listen, args=(connection,), name="sidecar-listener", daemon=True
            )
            listener.start()
            self._send_records(connection)
            listener.join()
            connection.close()
            if time.monotonic() - connected_s > _LAST_RETRY_S:
                retry_s = _FIRST_RETRY_S
            else:  # it may end like this each time, as with a sidecar of another release
                retry_s = self._pause(retry_s)

    def _pause(self, retry_s: float) -> float:
        """Wait for up to twice the last pause, which is returned, or until closed."""
        retry_s = min(_LAST_RETRY_S, retry_s * 2)
        with self._lock:
            self._lock.wait_for(lambda: self._closed, retry_s * JITTER.uniform(0.5, 1.0))
        return retry_s

    def _dial(self) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(self._path)
        except OSError:
            connection.close()
            return None
        with self._lock:
            if self._closed:
                connection.close()
                return None
            self._connection = connection
            self._sent.clear()
            self._resume_from = self._directive
        _LOG.info("connected to the sidecar at %s", self._path)
        return connection

    def _disconnect(self) -> None:
        """Wake both threads of the connection; call with the lock held."""
        if self._connection is not None:
            try:
                self._connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                _LOG.debug("the sidecar at %s had already closed the connection", self._path)
            self._connection = None

    def _send_records(self, connection: socket.socket) -> None:
        while (records := self._next_records(connection)) is not None:
            try:
                connection.sendall(_encoded(records))
            except OSError as error:
                _LOG.warning("lost the sidecar at %s: %s; training continues", self._path, error)
                break
        with self._lock:
            if self._connection is connection:
                self._disconnect()

    def _next_records(self, connection: socket.socket) -> list[TrainerRecord] | None:
        """Block until there is something to send; None when this connection is over."""
        with self._lock:
            is_due = self._lock.wait_for(
                lambda: (
                    self._connection is not connection
                    or self._resume_from
                    or self._events
                    or any(self._sent.get(kind) is not s for kind, s in self._states.items())
                ),
                ALIVE_INTERVAL_S,
            )
            if self._connection is not connection:
                return None
            if not is_due:
                return [TrainerAlive()]
            # The last directive comes first, so that a new sidecar need not decide again.
            records: list[TrainerRecord] = [] if self._resume_from is None else [self._resume_from]
            records += [s for kind, s in self._states.items() if self._sent.get(kind) is not s]
            records += self._events
            self._resume_from = None
            self._sent.update(self._states)
            self._events.clear()
            return records

    def _listen(self, connection: socket.socket) -> None:
        rest = b""
        try:
            while chunk := connection.recv(_RECEIVE_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._process_line(line)
                if len(rest) > MAX_LINE_BYTES:
                    raise ContractError(f"a line of more than {MAX_LINE_BYTES} bytes")
        except OSError as error:
            _LOG.debug("reading from the sidecar at %s ended: %s", self._path, error)
        except ContractError as error:
            _LOG.warning(
                "invalid data from the sidecar at %s: %s; its image must be of this release (%s)."
                " Reconnecting",
                self._path,
                error,
                VERSION,
            )
        with self._lock:
            if self._connection is connection:
                self._disconnect()
            self._lock.notify_all()

    def _process_line(self, line: bytes) -> None:
        record, call = decode(line), None
        with self._lock:
            if isinstance(record, Directive):
                self._directive, call = record, self._on_directive
            elif isinstance(record, MeasuringEndpoint):
                self._endpoint = record.address
            elif not isinstance(record, MeasuringRefused | MeasuringSent):
                raise ContractError(f"a sidecar does not send {type(record).__name__}")
            self._lock.notify_all()
        if call is not None and isinstance(record, Directive):
            call(record)
        if isinstance(record, MeasuringRefused) and self._on_refused is not None:
            self._on_refused(record.words)
        if isinstance(record, MeasuringSent) and self._on_sent is not None:
            self._on_sent(record.peer, record.sent_bytes)


def _encoded(records: Iterable[TrainerRecord]) -> bytes:
    """The records as lines, except one that has no line: the others must still arrive."""
    lines = []
    for record in records:
        try:
            lines.append(encode(record))
        except ContractError as error:
            _LOG.error("defect: the sidecar does not get a record: %s", error)
    return b"".join(lines)
