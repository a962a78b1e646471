"""Times of an environment file in seconds of the run. Called by `planning` and `happenings`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlion_api.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dlion_worker.environments.model import At


@dataclass(frozen=True)
class Times:
    """What a fraction of the run is taken of."""

    environment: str
    duration_s: float | None
    """The job's `stop.maxSeconds`."""
    source: str
    """The job, in words."""

    def seconds(self, at: At | None) -> float | None:
        """Seconds after the start; None where no time is given, or none can be told."""
        if at is None:
            return None
        if at.fraction is None:
            return at.seconds
        return None if self.duration_s is None else at.fraction * self.duration_s

    def problems(self, at: At | None, path: str) -> Iterable[Problem]:
        """A fraction of a run whose length is not known."""
        if at is not None and at.fraction is not None and self.duration_s is None:
            yield Problem(
                path=f"{path}.fraction",
                message=f"environment {self.environment} changes at a fraction of the run, but "
                f"{self.source} has no stop.maxSeconds to take the fraction of",
                value=str(at.fraction),
                advice="Set trainer.stop.maxSeconds, or give seconds.",
            )
