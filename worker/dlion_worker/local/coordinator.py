"""What the local runner needs of a coordinator, which is the operator's part."""

from __future__ import annotations

from typing import Protocol

from dlion_api.names import Rank, WorkerIdentity
from dlion_api.progress import ProgressRecord


class Coordinator(Protocol):
    """What the runner needs of the operator's coordinator."""

    def start(self, host: str) -> str:
        """Serves on that host, any port; the address."""
        ...

    def token(self, worker: WorkerIdentity) -> str:
        """The secret by which that worker proves itself."""
        ...

    def authority_pem(self) -> bytes | None:
        """The CA that its certificate is held against; None: plain text."""
        ...

    def request_stop(self, reason: str) -> None:
        """Tells every worker to finish its iteration and end the run."""
        ...

    def lost(self, rank: Rank) -> None:
        """That worker never comes back."""
        ...

    def take(self, record: ProgressRecord) -> None:
        """Takes a record that came by another way than a worker's report."""
        ...
