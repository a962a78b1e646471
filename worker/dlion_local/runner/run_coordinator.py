"""Interface of the coordinator that the local runner needs; the operator implements it."""

from __future__ import annotations

from typing import Protocol

from dlion_api.names import Rank, WorkerIdentity
from dlion_api.protocol.progress import ProgressRecord


class RunCoordinator(Protocol):
    """The coordinator of one run."""

    def start(self, host: str) -> str:
        """Serve on that host at any port. Return the address."""
        ...

    def token(self, worker: WorkerIdentity) -> str:
        """The token with which that worker authenticates."""
        ...

    def authority_pem(self) -> bytes | None:
        """The CA for its certificate; None: plain text."""
        ...

    def request_stop(self, reason: str) -> None:
        """Ask every worker to finish its iteration and end the run."""
        ...

    def lost(self, rank: Rank) -> None:
        """Mark a worker as permanently lost."""
        ...

    def take(self, record: ProgressRecord) -> None:
        """Accept a record that did not come in a worker's report."""
        ...
