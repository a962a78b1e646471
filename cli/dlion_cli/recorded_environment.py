"""What `environment.yaml` of a result folder says of a run's links: latencies, and what held CPU.

Owns that reading, and what a replay writes in its turn. Called by `dlion replay`. The file may be
anybody's: whatever it holds, it is read or refused in words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from dlion_api.document import parse
from dlion_api.errors import DataError
from dlion_api.names import Rank
from dlion_worker.environments.model import Environment
from dlion_worker.results.environment import EnvironmentFigure, EnvironmentReport
from dlion_worker.results.folder import ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from dlion_api.spec import Job
    from dlion_worker.environments.plan import Conditions
    from dlion_worker.simulation.recorded import Latencies, Link

# YAML's constructors raise plain errors: `!!bool x` a KeyError, `!!timestamp x` an AttributeError.
_UNREADABLE = (
    OSError,
    yaml.YAMLError,
    ValueError,
    KeyError,
    AttributeError,
    TypeError,
    RecursionError,
)

MOST_BYTES = 64 << 20
MOST_LATENCY_S = 10.0
LATENCY, QUOTA = "latency, one way", "CPU quota"


@dataclass(frozen=True)
class RunEnvironment:
    """The environment of a run as its folder has it."""

    source: str
    figures: tuple[Mapping[str, Any], ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict)
    """The environment file; empty where there was none."""

    @property
    def has_quotas(self) -> bool:
        """Whether a quota held the workers."""
        return any(figure.get("quantity") == QUOTA for figure in self.figures)

    def latencies(self, job: Job) -> Latencies:
        """One way in seconds, of each link that had any, from so many seconds of training on.

        Those of the environment file, except where a figure says what a link really had: a
        latency that was measured, or (with nothing measured) one that nothing imposed.

        Raises: SpecError, DataError where the file's part cannot be read.
        """
        asked = self._asked(job)
        had = dict(self._had())
        return [
            (time_s, {link: s for link, s in {**found, **had}.items() if s > 0})
            for time_s, found in asked
        ]

    def _asked(self, job: Job) -> Latencies:
        if not self.document:
            return [(0.0, {})]
        environment = parse(Environment, dict(self.document), source=self.source)
        plan = environment.plan(
            job.workers(),
            machine_cores=None,
            duration_s=job.spec.trainer.stop.max_seconds,
            source=self.source,
        )
        return [
            (0.0, _of(plan.initial)),
            *((change.time_s, _of(change.conditions)) for change in plan.changes),
        ]

    def _had(self) -> Iterable[tuple[Link, float]]:
        for figure in self.figures:
            rank, peer, value = (figure.get(name) for name in ("rank", "peer", "measured"))
            if figure.get("quantity") != LATENCY:
                continue
            if not isinstance(rank, int) or not isinstance(peer, int):
                continue
            yield (Rank(rank), Rank(peer)), 0.0 if value is None else self._seconds(value)

    def _seconds(self, value: object) -> float:
        """Of milliseconds."""
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
        # An integer may be too large for a float.
        if not 0 <= number <= MOST_LATENCY_S * 1000:
            shown = f"{value!r:.40}"
            raise DataError(
                f"{self.source}: latency of {shown} ms (allowed: 0 to {MOST_LATENCY_S * 1000:g})"
            )
        return number / 1000


def read_environment(folder: Path) -> RunEnvironment:
    """That of a run; empty where it had none. Raises: DataError."""
    path = folder / ENVIRONMENT
    if not path.exists():
        return RunEnvironment(str(path))
    found = read_object(path, yaml.safe_load)
    figures, document = found.get("figures"), found.get("document")
    return RunEnvironment(
        str(path),
        tuple(f for f in figures if isinstance(f, dict)) if isinstance(figures, list) else (),
        document if isinstance(document, dict) else {},
    )


def read_object(path: Path, reader: Callable[[bytes], Any]) -> dict[str, Any]:
    """The object in a file. Raises: DataError."""
    try:
        with path.open("rb") as file:
            document = reader(file.read(MOST_BYTES))
    except _UNREADABLE as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise DataError(f"{path}: cannot be read: no object in it")
    return document


def recorded_environment(conditions: Conditions, notes: tuple[str, ...]) -> EnvironmentReport:
    """What a replay had, so that it can be replayed itself."""
    figures = tuple(
        EnvironmentFigure(rank, LATENCY, "ms", seconds * 1000, seconds * 1000, peer)
        for (rank, peer), seconds in sorted(_of(conditions).items())
    )
    return EnvironmentReport("recorded", figures, notes)


def _of(conditions: Conditions) -> dict[Link, float]:
    return {
        (worker.rank, peer): min(seconds, MOST_LATENCY_S)
        for worker in conditions.workers
        for peer, seconds in worker.latency_s.items()
        if seconds > 0
    }
