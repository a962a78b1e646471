"""A run's records as a data frame."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from dlion_api.errors import UnavailableError
from dlion_api.protocol.progress import (
    MAX_METRICS,
    EvaluationRecord,
    ProgressRecord,
    StepRecord,
)
from dlion_api.status_names import ACCURACY
from dlion_cli.terminal.failures import install_advice
from dlion_results.summary.accuracy_name import common_name

if TYPE_CHECKING:
    from dlion_api.spec import Job

COLUMNS: Final = (
    "time_s", "iteration", "worker", "site", "loss", "batch_size", "learning_rate", "accuracy",
    "evaluation_loss", "samples",
)  # fmt: skip
_NAN: Final = float("nan")


def metrics_frame(job: Job | None, records: Iterable[ProgressRecord]) -> Any:
    """A `pandas.DataFrame` of the steps and evaluations, by time.

    Its columns are `COLUMNS`, with R² of targets by its own name, then one for each other metric of
    `compile()`. The name of one that is a column already follows `metric_`.

    Raises: UnavailableError if pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise UnavailableError(
            f"metrics need pandas, which is missing ({error}). {install_advice('notebook')}"
        ) from None
    sites = {worker.rank: str(worker.site) for worker in (() if job is None else job.workers())}
    rows: list[tuple[Any, ...]] = []
    names: set[str] = set()
    metrics: dict[str, dict[int, float]] = {}
    for record in records:
        site = sites.get(record.rank, "")
        about = (record.time_s, record.iteration, int(record.rank), site)
        if isinstance(record, StepRecord):
            step = (record.loss, record.local_batch_size, record.learning_rate)
            rows.append((*about, *step, _NAN, _NAN, record.samples))
        elif isinstance(record, EvaluationRecord):
            names.add(record.accuracy_name)
            for name, value in record.metrics.items():
                if name in metrics or len(metrics) < MAX_METRICS:
                    metrics.setdefault(name, {})[len(rows)] = value
            rows.append((*about, _NAN, _NAN, _NAN, record.accuracy, record.loss, record.samples))
    accuracy = common_name(names)
    columns = [accuracy if name == ACCURACY else name for name in COLUMNS]
    frame = pd.DataFrame(rows, columns=columns)
    for name, values in metrics.items():
        column = name
        while column in frame:
            column = f"metric_{column}"
        frame[column] = pd.Series(values, dtype="float64")
    kinds = dict.fromkeys(("iteration", "worker", "samples"), "int64")
    kinds |= {name: "float64" for name in columns if name not in (*kinds, "site")}
    return frame.astype(kinds).sort_values("time_s", kind="stable", ignore_index=True)
