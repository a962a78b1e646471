"""Sentences on how the workers of a run spent their time, and what held them up most.

`dlion run` prints these sentences, and the report shows them above its bars.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dlion_api.protocol.progress import END_PHASES, START_PHASES
from dlion_results.summary.culprit import HARDLY_WAITS, STANDS_OUT

MIN_NAMED_WAIT: Final = 0.1
"""Share of the time from which on the worker is named that others waited for most."""
MIN_SHOWN_S: Final = 0.05
"""Shorter phases of start and end are left out."""
_START: Final = ("launch_s", *START_PHASES)
_NAMES: Final = {"final_wait_s": "waiting for others"}
_PHASES: Final = ("select", "encode", "send", "decode", "apply")


def time_sentences(summary: Mapping[str, Any]) -> list[str]:
    """The shares of all workers' time; start and end; the culprit and what to do about it, or else
    the worker that the others waited for most.

    Empty without a step. Names are as in the summary, unescaped.
    """
    if (use := summary["time_use"]) is None:
        return []
    sentences = [f"Time: {shares_text(use)}", *process_sentences(summary)]
    if (culprit := summary.get("culprit")) is not None:
        return [*sentences, culprit["sentence"], culprit["advice"]]
    workers = {each["rank"]: each for each in summary["workers"]}
    named = use["waited_for"] and use["wait_fraction"] >= MIN_NAMED_WAIT
    first = use["waited_for"][0] if named else None
    if first is not None and first["fraction"] > STANDS_OUT / len(workers):
        share = _percent(first["fraction"])
        sentences.append(f"{share} of the waiting was for {_cause(workers, first['rank'])}")
    return sentences


def process_sentences(summary: Mapping[str, Any]) -> list[str]:
    """How long start and end took at the worker where each took longest, or that a simulation has
    none. One that no worker has reported is left out, as the end of a run that was killed."""
    if summary["ending"].get("virtual_time"):
        return ["Start-up and ending: none, as a simulation starts no processes"]
    known = [
        {**process, "name": worker["name"], "command_s": summary["ending"].get("command_s") or 0.0}
        for worker in summary["workers"]
        if (process := worker.get("process"))
    ]
    if not known:
        return []
    sentences = []
    for title, names in (("Start-up", ("command_s", *_START)), ("Ending", END_PHASES)):
        slowest = max(known, key=lambda process: _sum(process, names))
        if not _sum(slowest, names):
            continue
        seconds = {name: slowest[name] or 0.0 for name in names}
        parts = (f"{_NAMES.get(name, name.removesuffix('_s'))} {took_s:.1f} s"
                 for name, took_s in seconds.items() if took_s >= MIN_SHOWN_S)  # fmt: skip
        took = f"{title}: {_sum(slowest, names):.1f} s at {slowest['name']}"
        sentences.append(": ".join(filter(None, (took, ", ".join(parts)))))
    return sentences


def start_and_end_s(worker: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Seconds from the run's start to a worker's first step, and from its last step to its end.
    Without a launch, the first are those of its processes alone."""
    process = worker.get("process")
    return (_sum(process, _START), _sum(process, END_PHASES)) if process else (None, None)


def _sum(process: Mapping[str, Any], names: Sequence[str]) -> float:
    return float(sum(process[name] or 0.0 for name in names))


def _cause(workers: Mapping[int, Mapping[str, Any]], rank: int) -> str:
    """Why the others waited for that worker, as far as its own times show."""
    if (worker := workers.get(rank)) is None:
        return f"worker {rank}"
    if worker["waited_s"] < HARDLY_WAITS * worker["compute_s"]:
        return f"{worker['name']}, which waited little itself: its steps take the longest"
    return f"{worker['name']}, which waited itself, too: its messages arrive late"


def shares_text(use: Mapping[str, float | None]) -> str:
    """Shares of the time that add up to 100 %, from fields that end in `_fraction`.

    >>> shares_text({"compute_fraction": 0.5, "wait_fraction": 0.25})
    'computing 50.0 %, waiting 25.0 %, exchange and the rest 25.0 %'
    """
    computed, waited = use["compute_fraction"] or 0.0, use["wait_fraction"] or 0.0
    text = f"computing {_percent(computed)}, waiting {_percent(waited)}"
    rest = max(0.0, 1 - computed - waited)
    if use.get("select_fraction") is None:  # not recorded
        return f"{text}, exchange and the rest {_percent(rest)}"
    phases = {name: use.get(f"{name}_fraction") or 0.0 for name in _PHASES}
    parts = ", ".join(f"{name} {_percent(value)}" for name, value in phases.items())
    other = max(0.0, rest - sum(phases.values()))
    return f"{text}, exchange {_percent(sum(phases.values()))} ({parts}), other {_percent(other)}"


def _percent(value: float) -> str:
    return f"{value * 100:.1f} %"
