"""The Unix socket between a sidecar and its trainer: passes records and directives."""

import asyncio
import logging
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from dlion_api import VERSION
from dlion_api.errors import ContractError, Problem, SpecError
from dlion_api.protocol.measurements import MeasuringEndpoint, MeasuringRefused, MeasuringSent
from dlion_api.protocol.sidecar_protocol import (
    MAX_LINE_BYTES,
    SidecarRecord,
    TrainerRecord,
    decode,
    encode,
)
from dlion_api.protocol.worker_config import MAX_SOCKET_PATH_BYTES

_LOG = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 1 << 20
"""A trainer with more unread bytes than this is disconnected; it reconnects."""
MAX_CONNECTIONS = 8
"""A trainer has one. The oldest is closed for a further one: a restarted trainer is the newest."""
END_S = 1.0
"""How long an end waits for connections that were aborted, which takes one turn of the loop."""


class TrainerSocket:
    """Serves the trainer; connections may overlap while a trainer restarts."""

    def __init__(
        self,
        path: str | Path,
        *,
        on_record: Callable[[TrainerRecord], None],
        on_connected: Callable[[], tuple[SidecarRecord, ...]],
    ) -> None:
        """`on_connected` returns the first records for a new connection."""
        self._path = Path(path)
        self._on_record, self._on_connected = on_record, on_connected
        self._server: asyncio.Server | None = None
        self._writers: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        """Each connection, and the task that serves it."""

    async def start(self) -> None:
        """Listen; replace a socket that an ended sidecar left.

        Raises: SpecError if the path is too long or in use; OSError if the socket cannot be
        created.
        """
        listener = _listen(self._path)
        self._server = await asyncio.start_unix_server(
            self._serve, sock=listener, limit=MAX_LINE_BYTES, backlog=MAX_CONNECTIONS
        )
        _LOG.info("listening for the trainer at %s", self._path)

    def send(self, record: SidecarRecord) -> None:
        """Send to the trainer if connected; otherwise it gets the latest state on connecting."""
        line = encode(record)
        for writer in tuple(self._writers):
            if writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
                _LOG.warning("the trainer does not read; disconnecting it")
                writer.transport.abort()
            else:
                writer.write(line)

    def connected(self) -> bool:
        return bool(self._writers)

    async def close(self) -> None:
        """Disconnect and remove the socket file."""
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
        for writer in self._writers:
            writer.transport.abort()
        if self._writers:  # cancelled at the end of the loop, each would log a traceback
            await asyncio.wait(self._writers.values(), timeout=END_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        # Those that are closing already are among them.
        for oldest in tuple(self._writers)[: max(0, len(self._writers) + 1 - MAX_CONNECTIONS)]:
            oldest.transport.abort()
        self._writers[writer] = task
        try:
            for initial in self._on_connected():
                writer.write(encode(initial))
            while line := await reader.readline():
                record = decode(line)
                if isinstance(record, MeasuringEndpoint | MeasuringRefused | MeasuringSent):
                    raise ContractError(f"a trainer does not send {type(record).__name__}")
                self._on_record(record)
        except (ContractError, ValueError) as error:  # ValueError: a line longer than the limit
            _LOG.error(
                "invalid message from the trainer, whose image must be of this release (%s): %s."
                " Disconnecting",
                VERSION,
                error,
            )
        except OSError as error:
            _LOG.info("the trainer disconnected: %s", error)
        finally:
            del self._writers[writer]
            writer.transport.abort()


def _listen(path: Path) -> socket.socket:
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH_BYTES:
        problem = Problem(
            "socket_path",
            f"is {size} bytes long",
            value=str(path),
            allowed=f"at most {MAX_SOCKET_PATH_BYTES} bytes",
            advice="Choose a shorter folder for the run",
        )
        raise SpecError([problem])
    _clear(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Set the mode at creation: a later chmod would leave a gap.
    old_mask = os.umask(0o117)
    try:
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(old_mask)
    return listener


def _clear(path: Path) -> None:
    """Remove the socket of an ended sidecar; refuse to remove anything else."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            problem = "is taken by something that is not a socket"
            raise SpecError([Problem("socket_path", problem, value=str(path))])
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    problem = "is in use by another sidecar that is running"
    raise SpecError([Problem("socket_path", problem, value=str(path))])
