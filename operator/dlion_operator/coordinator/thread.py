"""Run the coordinator in its own thread and event loop, for `dlion run`."""

import asyncio
import threading
from collections.abc import Sequence

from dlion_api.names import JobKey, WorkerIdentity
from dlion_api.protocol.revocation import Revocation
from dlion_operator.coordinator.server import CoordinatorServer


class CoordinatorThread:
    """Run a `CoordinatorServer` with one run. Methods are thread-safe.

    The run's `on_record` is called in this object's thread.
    """

    def __init__(self, server: CoordinatorServer, run: JobKey) -> None:
        """`server` must not be started yet, and `run` must be open on it."""
        self._server = server
        self._job = run
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="dlion-coordinator", daemon=True)

    @property
    def authority_pem(self) -> bytes:
        return self._server.authority_pem

    def start(self) -> int:
        """Open the port and return its number.

        Raises: UnavailableError if the server cannot listen on the address.
        """
        self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result()

    def stop(self, reason: str) -> None:
        """Ask every worker to end the run; return immediately."""
        self._loop.call_soon_threadsafe(self._server.runs[self._job].stop, reason)

    def revoke(self, revocations: Sequence[Revocation], workers: Sequence[WorkerIdentity]) -> None:
        """Refuse these workers, and no others, from now on; return immediately."""
        revoke = self._server.runs[self._job].revoke
        self._loop.call_soon_threadsafe(revoke, tuple(revocations), tuple(workers))

    def close(self) -> None:
        """Close port, streams, loop and thread. Idempotent."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._server.shut_down(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        if not self._loop.is_closed():
            self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
