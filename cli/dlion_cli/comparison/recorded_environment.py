"""Reads latencies and CPU quotas from `environment.yaml` of a result folder.

Called by `dlion replay`, which writes the file too. The file is untrusted: any error is a DataError
or a SpecError.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dlion_api.document import parse
from dlion_api.errors import DataError
from dlion_api.names import Rank
from dlion_api.spec import Job
from dlion_environments.model import Environment
from dlion_environments.plan import Conditions
from dlion_results.run_folder.environment import (
    EnvironmentFigure,
    EnvironmentReport,
    LocalCommand,
)
from dlion_results.run_folder.layout import ENVIRONMENT
from dlion_simulator.calibration.recorded_run import Latencies, Link

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

MAX_BYTES = 64 << 20
MAX_LATENCY_S = 10.0
LATENCY, QUOTA = "latency, one way", "CPU quota"


@dataclass(frozen=True)
class RunEnvironment:
    """The environment recorded in a run's folder."""

    source: str
    figures: tuple[Mapping[str, Any], ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict)
    """The environment file; empty if there was none."""

    @property
    def has_quotas(self) -> bool:
        """Whether workers had CPU quotas."""
        return any(figure.get("quantity") == QUOTA for figure in self.figures)

    def latencies(self, job: Job) -> Latencies:
        """One-way latencies in seconds of each link, with the training time from which they apply.

        Recorded figures override the environment file: a measured latency, or 0 if none was
        imposed. Raises: SpecError, DataError.
        """
        configured = self._configured(job)
        measured = dict(self._measured())
        return [
            (time_s, {link: s for link, s in {**latencies, **measured}.items() if s > 0})
            for time_s, latencies in configured
        ]

    def _configured(self, job: Job) -> Latencies:
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
            (0.0, _latencies_of(plan.initial)),
            *((change.time_s, _latencies_of(change.conditions)) for change in plan.changes),
        ]

    def _measured(self) -> Iterable[tuple[Link, float]]:
        for figure in self.figures:
            rank, peer, value = (figure.get(name) for name in ("rank", "peer", "measured"))
            if figure.get("quantity") != LATENCY:
                continue
            if not isinstance(rank, int) or not isinstance(peer, int):
                continue
            yield (Rank(rank), Rank(peer)), 0.0 if value is None else self._seconds(value)

    def _seconds(self, value: object) -> float:
        """Convert milliseconds."""
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
        # An integer may be too large for a float.
        if not 0 <= number <= MAX_LATENCY_S * 1000:
            shown = f"{value!r:.40}"
            raise DataError(
                f"{self.source}: latency of {shown} ms (allowed: 0 to {MAX_LATENCY_S * 1000:g})"
            )
        return number / 1000


def read_environment(folder: Path) -> RunEnvironment:
    """The environment of a run; empty if it had none. Raises: DataError."""
    path = folder / ENVIRONMENT
    if not path.exists():
        return RunEnvironment(str(path))
    recorded = read_object(path, yaml.safe_load)
    figures, document = recorded.get("figures"), recorded.get("document")
    return RunEnvironment(
        str(path),
        tuple(f for f in figures if isinstance(f, dict)) if isinstance(figures, list) else (),
        document if isinstance(document, dict) else {},
    )


def read_object(path: Path, reader: Callable[[bytes], Any]) -> dict[str, Any]:
    """The mapping in a file. Raises: DataError."""
    try:
        with path.open("rb") as file:
            document = reader(file.read(MAX_BYTES))
    except _UNREADABLE as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise DataError(f"{path}: cannot be read: it contains no object")
    return document


def recorded_environment(conditions: Conditions, notes: tuple[str, ...]) -> EnvironmentReport:
    """The conditions of a replay, so that it can be replayed itself."""
    figures = tuple(
        EnvironmentFigure(rank, LATENCY, "ms", seconds * 1000, seconds * 1000, peer)
        for (rank, peer), seconds in sorted(_latencies_of(conditions).items())
    )
    return EnvironmentReport("recorded", figures, notes, command=LocalCommand.REPLAY)


def _latencies_of(conditions: Conditions) -> dict[Link, float]:
    return {
        (worker.rank, peer): min(seconds, MAX_LATENCY_S)
        for worker in conditions.workers
        for peer, seconds in worker.latency_s.items()
        if seconds > 0
    }
