"""What the scale benchmark needs to know of an operator: its jobs, its processes, its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class JobKind:
    """The jobs of an operator, and how its requests and passes are recognised."""

    resource: str
    path: str
    """The path of the jobs of a namespace."""
    manifest: Callable[[int, int], dict[str, Any]]
    """Returns the manifest of the job of that number, with so many workers."""
    agents: tuple[str, ...]
    """The user agents of its processes begin with one of these."""
    passes: str
    """The metric that counts passes over jobs."""
    defects: str
    """The metric that counts failed passes."""


class Operator(Protocol):
    """The process of an operator, or its processes together."""

    def launch(self) -> None:
        """Start it without waiting."""

    def kill(self) -> None:
        """Send SIGKILL; return when it is gone."""

    def is_ready(self) -> bool:
        """Report whether it can serve."""

    def is_running(self) -> bool:
        """Report whether it has not ended."""

    def last_log_lines(self) -> str:
        """Return the end of its log."""

    def metric(self, name: str) -> float:
        """Return the sum of the samples whose name and labels begin so."""

    def memory_mb(self) -> float:
        """Return the resident memory, MB."""

    def cpu_s(self) -> float:
        """Return the CPU time since its start, seconds."""


class Workers(Protocol):
    """The simulated workers of all jobs."""

    def at_work(self) -> int:
        """Return how many the operator knows to be at work."""

    def described(self) -> str:
        """Return their state for an error message."""

    def refused(self) -> int:
        """Return the number of refused calls."""

    def wait_for_loss(self) -> None:
        """Return when those with a connection to a killed operator have noticed its end."""

    def close(self) -> None:
        """End them."""
