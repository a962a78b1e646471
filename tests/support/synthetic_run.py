"""Records of an invented but plausible run, for tests of results and of the live view.

Six unequal workers at two sites learn. Batches follow capacities, links have budgets, and one
worker is killed and restarts. Nothing here is measured or shipped as a result.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dlion_api.names import Rank
from dlion_api.protocol.progress import (
    DirectiveRecord,
    EvaluationRecord,
    EventRecord,
    LinkRecord,
    ProgressRecord,
    StepRecord,
)
from dlion_api.spec import Job, load_job
from dlion_results.summary.tally import MAIN_PHASES

if TYPE_CHECKING:
    from collections.abc import Iterator

CAPACITIES = (240.0, 240.0, 120.0, 120.0, 40.0, 40.0)
UPLINK_BYTES_PER_S = (6.25e6, 6.25e6, 4.375e6, 4.375e6, 2.5e6, 2.5e6)
SKETCH = 32


@dataclass(frozen=True)
class Story:
    """The properties of the invented run."""

    workers: int = 6
    seconds: float = 300.0
    step_s: float = 0.8
    top_accuracy: float = 0.78
    learning_s: float = 70.0
    exchange: bool = True
    weighted: bool = True
    killed: tuple[int, float, float] | None = (4, 140.0, 18.0)
    seed: int = 1
    metric_names: tuple[str, ...] = ()
    """The metrics of `compile()`; every second one is an error that falls from 5 to -4."""

    phases: tuple[float, ...] | None = None
    """Parts of the time other than computing, in the order of MAIN_PHASES; None if not recorded."""

    @property
    def waiting(self) -> float:
        """The part of the time other than computing."""
        return 1.0 if self.phases is None else max(0.0, 0.9 - sum(self.phases))

    def metrics(self, accuracy: float, time_s: float) -> dict[str, float]:
        values = (math.sqrt(accuracy), 9 * math.exp(-time_s / self.learning_s) - 4)
        return {name: values[place % 2] for place, name in enumerate(self.metric_names)}


def description(story: Story, *, name: str = "cifar10", target: float | None = 0.65) -> Job:
    """The job of that story, loaded like any manifest."""
    groups = [("plant-a", "small", min(4, story.workers)), ("plant-b", "gpu", story.workers - 4)]
    stop: dict[str, object] = {"maxSeconds": int(story.seconds)}
    if target is not None:
        stop["targetAccuracy"] = target
    document = {
        "apiVersion": "dlion.dev/v1alpha1",
        "kind": "DLionJob",
        "metadata": {"name": name},
        "spec": {
            "sites": [
                {"name": site, "groups": [{"name": group, "workers": count}]}
                for site, group, count in groups
                if count > 0
            ],
            "trainer": {
                "program": {"builtin": "cipher"},
                "dataset": {"name": "digits"},
                "stop": stop,
            },
            "batching": {"policy": "weighted" if story.weighted else "even"},
            "exchange": {"policy": "dlion" if story.exchange else "none"},
        },
    }
    return load_job(document)


def records(story: Story) -> Iterator[ProgressRecord]:
    """All records of the run, ordered by time."""
    streams = [_worker(story, Rank(r)) for r in range(story.workers)]
    yield from heapq.merge(*streams, key=lambda record: record.time_s)


def _share(story: Story, rank: int) -> float:
    if not story.weighted:
        return 1 / story.workers
    return CAPACITIES[rank % 6] / sum(CAPACITIES[r % 6] for r in range(story.workers))


def _accuracy(story: Story, rank: int, time_s: float, rng: np.random.Generator) -> float:
    top = story.top_accuracy if story.exchange else 0.35 + 0.02 * rank
    pace = story.learning_s * (1 + 0.03 * rank) * (1 if story.weighted else 1.6)
    learned = 0.1 + (top - 0.1) * (1 - math.exp(-time_s / pace))
    return float(np.clip(learned + rng.normal(0, 0.006), 0, 1))


def _worker(story: Story, rank: Rank) -> Iterator[ProgressRecord]:
    rng = np.random.default_rng([story.seed, rank])
    shared = np.random.default_rng(story.seed).normal(size=SKETCH)
    own = rng.normal(size=SKETCH)
    peers = [Rank(p) for p in range(story.workers) if p != rank and story.exchange]
    time_s, iteration, samples, incarnation, sent_s = 1.0 + 0.1 * rank, 0, 0, 1, 0.0
    capacities = {Rank(r): CAPACITIES[r % 6] for r in range(story.workers)}
    yield EventRecord(time_s, rank, 0, "WorkerStarted", "links to all peers are up")
    killed = story.killed if story.killed and story.killed[0] == rank else None
    evaluated_s = -9.0
    while time_s < story.seconds:
        iteration += 1
        if killed and time_s >= killed[1]:
            yield EventRecord(time_s, rank, iteration, "WorkerLost", "its stream broke", True)
            time_s += killed[2]
            incarnation, killed, sent_s = 2, None, time_s
            yield EventRecord(time_s, rank, iteration, "WorkerRejoined", "state pulled from peer 2")
        gbs = 192 * (1 + min(4, int(time_s // 50)))
        lbs = max(1, round(gbs * _share(story, rank)))
        compute_s = lbs / capacities[rank] * (1 + abs(rng.normal(0, 0.03)))
        wall_s = max(story.step_s * gbs / 192, compute_s) + abs(rng.normal(0, 0.02))
        if iteration % 25 == 1:
            yield DirectiveRecord(
                time_s, rank, iteration, lbs, gbs, dict.fromkeys(peers, 500_000), capacities,
                dict.fromkeys(peers, UPLINK_BYTES_PER_S[rank % 6] / 5), "capacities measured",
            )  # fmt: skip
        time_s += wall_s
        samples += lbs
        loss = 2.3 * math.exp(-time_s / story.learning_s) + 0.4 + abs(rng.normal(0, 0.15))
        yield StepRecord(
            time_s, rank, incarnation, iteration, loss, lbs, gbs, 0.05, compute_s, wall_s,
            compute_s * 0.4, 0.02 * wall_s, story.waiting * max(0.0, wall_s - compute_s), samples,
            waited_for=tuple(peers[:2]),
            **({} if story.phases is None else _phases(wall_s - compute_s, story.phases)),
        )  # fmt: skip
        if time_s - sent_s >= 1:
            rate = UPLINK_BYTES_PER_S[rank % 6] / 5 * (0.4 if 180 < time_s < 230 else 1.0)
            for peer in peers:
                sent = int(rate * (time_s - sent_s) * min(1, rng.normal(0.93, 0.03)))
                yield LinkRecord(
                    time_s, rank, peer, iteration, sent, int(sent * 0.98), int(sent * 0.3), 0,
                    int(rate * wall_s), rate * 1.01, 0, True,
                )  # fmt: skip
            sent_s = time_s
        if time_s - evaluated_s >= 6:
            evaluated_s = time_s
            yield _evaluation(story, rank, time_s, iteration, samples, shared, own, rng)
    yield _evaluation(story, rank, time_s, iteration, samples, shared, own, rng, final=True)


def _phases(free_s: float, parts: tuple[float, ...]) -> dict[str, float]:
    """Select, encode, send, decode, apply: parts of the time other than computing."""
    return {name: part * max(0.0, free_s) for name, part in zip(MAIN_PHASES, parts, strict=True)}


def _evaluation(
    story: Story, rank: Rank, time_s: float, iteration: int, samples: int,
    shared: np.ndarray, own: np.ndarray, rng: np.random.Generator, *, final: bool = False,
) -> EvaluationRecord:  # fmt: skip
    accuracy = _accuracy(story, rank, time_s, rng)
    apart = 0.05 * (1 + math.sin(time_s / 15)) if story.exchange else 0.002 * time_s
    sketch = shared * (1 + time_s / 300) + apart * own
    classes = tuple(float(np.clip(accuracy + rng.normal(0, 0.05), 0, 1)) for _ in range(10))
    return EvaluationRecord(
        time_s, rank, iteration, samples, accuracy, 2.3 - 2 * accuracy,
        10_000 if final else 2000, classes, tuple(float(v) for v in sketch),
        float(np.linalg.norm(sketch)), final, story.metrics(accuracy, time_s),
    )  # fmt: skip
