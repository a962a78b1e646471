"""Where the time and the bytes of a run went, in parts that add up to the whole.

Computed from the tally for `summary`. `time_use` puts them into sentences.
"""

from collections.abc import Iterable
from typing import Final

from dlion_api.protocol.progress import END_PHASES, START_PHASES
from dlion_results.run_folder.stored_values import MAX_FIGURE
from dlion_results.summary.tally import MAIN_PHASES, PHASES, LinkTally, WorkerTally

MIN_PACE_ROWS: Final = 16
"""Fewer steps say nothing about a change of pace."""


def time_parts(worker: WorkerTally) -> dict[str, float | None]:
    """Seconds of one worker from its first step to the end of its last.

    `compute_s`, `waited_s`, the phases and `other_s` add up to `wall_s`. `other_s` is what passes
    between steps (reports, checkpoints, copies for the evaluation, pauses, restarts) and the rest
    of steps. Phases are None if the run did not record them; `other_s` then has them. The last two
    are of the exchange's thread, beside the wall time.
    """
    phases = {name: worker.phase_s.get(name) for name in PHASES}
    known_s = sum(phases[name] or 0.0 for name in MAIN_PHASES)
    other_s = max(0.0, worker.span_s - worker.compute_s - worker.waited_s - known_s)
    return {"wall_s": worker.span_s, **phases, "other_s": other_s}


def process_parts(
    worker: WorkerTally, first_step_s: float | None
) -> dict[str, float | None] | None:
    """Seconds of a worker's trainer processes by phase, over all starts; None: not reported.

    `launch_s` is from the run's start to that of the first process. It is None if that process is
    not the worker's first, or began after the run's first step (`first_step_s`): the time before
    was not a launch. The others add up to `process_s`.
    """
    if not worker.processes:
        return None
    phases = dict.fromkeys((*START_PHASES, "train_s", *END_PHASES), 0.0)
    for record in worker.processes.values():
        for name in phases:
            phases[name] += _seconds(getattr(record, name))
    first = worker.processes[min(worker.processes)]
    began_s = first.time_s - sum(_seconds(getattr(first, name)) for name in phases)
    is_late = worker.imported_s < began_s or (first_step_s is not None and first_step_s < began_s)
    launch_s = None if is_late else _seconds(began_s)
    return {"launch_s": launch_s, **phases, "process_s": sum(phases.values())}


def _seconds(value: float) -> float:
    return min(max(0.0, value), MAX_FIGURE)


def fractions(workers: Iterable[WorkerTally]) -> dict[str, float | None]:
    """Shares of all these workers' time by part; the names end in `_fraction`.

    Those of the main thread, with computing and waiting, add up to 1.
    """
    parts = [time_parts(worker) for worker in workers]
    wall_s = sum(each["wall_s"] or 0.0 for each in parts)
    made: dict[str, float | None] = {}
    for name in (*PHASES, "other_s"):
        known = [seconds for each in parts if (seconds := each[name]) is not None]
        share = min(1.0, sum(known) / wall_s) if known and wall_s > 0 else None
        made[f"{name.removesuffix('_s')}_fraction"] = share
    return made


def link_bytes(links: Iterable[LinkTally]) -> dict[str, int]:
    """Bytes by kind. The first three add up to the links' `sent_bytes`, the others come beside
    it."""
    all_links = list(links)
    weights = sum(link.weights_bytes for link in all_links)
    control = sum(link.control_bytes for link in all_links)
    sent = sum(link.sent_bytes for link in all_links)
    return {
        "gradient_bytes": max(0, sent - weights - control),
        "weights_bytes": weights,
        "control_bytes": control,
        "header_bytes": sum(link.header_bytes for link in all_links),
        "state_bytes": sum(link.state_bytes for link in all_links),
        "probe_bytes": sum(link.probe_bytes for link in all_links),
    }


def pace_change(worker: WorkerTally) -> dict[str, float | None]:
    """`pace_change`: samples per second of computing in the last quarter of the steps, over those
    in the first. `batch_change`: the same of the mean batch.

    None with few steps. The very first step is left out: TensorFlow traces the model in it. A step
    has a fixed cost, so a smaller batch alone lowers the pace, at most as much as the batch.
    """
    rows = worker.pace_curve.points()[1:]
    if len(rows) < MIN_PACE_ROWS:
        return {"pace_change": None, "batch_change": None}
    quarter = len(rows) // 4
    _, samples, compute_s, steps = rows[quarter] - rows[0]
    _, last_samples, last_compute_s, last_steps = rows[-1] - rows[-1 - quarter]
    return {
        "pace_change": _ratio(last_samples * compute_s, samples * last_compute_s),
        "batch_change": _ratio(last_samples * steps, samples * last_steps),
    }


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole > 0 else None
