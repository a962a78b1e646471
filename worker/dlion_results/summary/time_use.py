"""Sentences on how the workers of a run spent their time, and which one they waited for.

`dlion run` prints these sentences, and the report shows them above its bars.
"""

from collections.abc import Mapping
from typing import Any, Final

MIN_NAMED_WAIT: Final = 0.1
"""Share of the time from which on the worker is named that others waited for most."""
STANDS_OUT: Final = 1.5
"""Times its equal part of all waiting, from which on a worker is named."""
HARDLY: Final = 0.15
"""Waiting over computing time of a worker that holds others up by its own steps."""


def time_sentences(summary: Mapping[str, Any]) -> list[str]:
    """The shares of all workers' time, and the worker that the others waited for most.

    Empty without a step. Names are as in the summary, unescaped.
    """
    if (use := summary["time_use"]) is None:
        return []
    computed, waited = use["compute_fraction"], use["wait_fraction"]
    other = _percent(max(0.0, 1 - computed - waited))
    text = f"Time: computing {_percent(computed)}, waiting {_percent(waited)}"
    sentences = [f"{text}, exchange and the rest {other}"]
    workers = {each["rank"]: each for each in summary["workers"]}
    first = use["waited_for"][0] if use["waited_for"] and waited >= MIN_NAMED_WAIT else None
    if first is not None and first["fraction"] > STANDS_OUT / len(workers):
        share = _percent(first["fraction"])
        sentences.append(f"{share} of the waiting was for {_cause(workers, first['rank'])}")
    return sentences


def _cause(workers: Mapping[int, Mapping[str, Any]], rank: int) -> str:
    """Why the others waited for that worker, as far as its own times show."""
    if (worker := workers.get(rank)) is None:
        return f"worker {rank}"
    waited, computed = worker["waited_s"], worker["compute_s"]
    if waited < HARDLY * computed:
        return f"{worker['name']}, which hardly waited itself: its steps take the longest"
    return f"{worker['name']}, which waited itself, too: its messages arrive late"


def _percent(value: float) -> str:
    return f"{value * 100:.1f} %"
