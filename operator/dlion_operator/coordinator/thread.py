"""The coordinator in a thread with a loop of its own, for `dlion run`.

The operator needs none of this: it starts `CoordinatorServer` in kopf's loop.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from dlion_api.membership import Membership
    from dlion_api.names import JobKey
    from dlion_api.refusals import RefusalReason
    from dlion_operator.coordinator.server import CoordinatorServer


class CoordinatorThread:
    """Runs a `CoordinatorServer` with one run; its methods may be called from any thread.

    The run's `on_record` is called in this object's thread.
    """

    def __init__(self, server: CoordinatorServer, run: JobKey) -> None:
        """The server must not have been started, and that run be open."""
        self._server = server
        self._job = run
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="dlion-coordinator", daemon=True)

    @property
    def authority_pem(self) -> bytes:
        """What a worker trusts this server by; empty without TLS."""
        return self._server.authority_pem

    def start(self) -> int:
        """Opens the port and yields its number.

        Raises:
            UnavailableError: the address cannot be listened on.
        """
        self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result()

    def stop(self, reason: str) -> None:
        """Asks every worker to end the run; returns at once."""
        self._loop.call_soon_threadsafe(self._server.stop, self._job, reason)

    def membership(self) -> Membership:
        """The membership as it stands."""
        return asyncio.run_coroutine_threadsafe(self._membership(), self._loop).result()

    def refusals(self) -> Mapping[RefusalReason, int]:
        """Refused calls by reason since the start."""
        return self._server.refusals()

    def close(self) -> None:
        """Closes port, streams, loop and thread; may be called twice."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._server.shut_down(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        if not self._loop.is_closed():
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _membership(self) -> Membership:
        return self._server.membership(self._job)
