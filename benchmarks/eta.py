"""Measure the predictions of a run's remaining time at 25, 50 and 75 %, for each stop rule.

    python benchmarks/eta.py FOLDER…                 of finished runs (folders with events.jsonl)
    python benchmarks/eta.py --simulate --out DIR    simulates digits in several settings and seeds

A run's records have the truth for every stop rule: when it reached its last step, epoch and second,
and when the mean accuracy of its replicas first reached a level. Levels are the highest tenth of a
percent reached by 90 % of the run, and 90 and 75 % of that. Records are replayed in order to the
estimator that `dlion run` and the operator use; it gets nothing after the time of the prediction.

By setting and rule the script prints the error of the predicted total time, as median and maximum
over runs and seeds. For a target accuracy it prints how often there is a range, how often the truth
is in it, how wide it is, and the error of its middle.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from local_runs import commit

from dlion_api.protocol.progress import EvaluationRecord, ProgressRecord, StepRecord
from dlion_api.remaining_time import Remaining, RemainingTime
from dlion_api.spec import Spec, Stop, load_job
from dlion_results.run_folder.events import read_events

SHARES = (0.25, 0.5, 0.75)
TARGETS = (1.0, 0.9, 0.75)
"""Targets, as shares of the highest accuracy."""
SETTINGS = {
    "quickstart, adaptive": ("quickstart", "exchange.policy=adaptive"),
    "quickstart, dlion": ("quickstart", "exchange.policy=dlion"),
    "unequal, stragglers, synchronous": ("stragglers", "synchronization.mode=synchronous"),
    "two-clouds, ako": ("two-clouds", "exchange.policy=ako"),
}
STRAGGLERS = {
    "name": "stragglers",
    "workers": [{"count": 3, "cores": 2, "mbitPerS": 20}, {"cores": 1, "mbitPerS": 10}],
    "stragglers": [{"slowdown": 3, "chance": 0.2}],
}
_TARGET = "targetAccuracy"
JOB = Path(__file__).parents[1] / "examples" / "digits.yaml"


@dataclass(frozen=True)
class Prediction:
    """One prediction. `error` is of the total time; None: no prediction."""

    error: float | None
    is_inside: bool = True
    ratio: float = 1.0
    """Longest over shortest total time of a range."""


@dataclass(frozen=True)
class Way:
    """One stop rule of a run, and when it was met."""

    rule: str
    stop: Stop
    began_s: float
    end_s: float


def ways(records: Sequence[ProgressRecord]) -> list[Way]:
    """Return the stop rules whose truth is in these records."""
    steps = [record for record in records if isinstance(record, StepRecord)]
    began_s, end_s = min(s.time_s - s.wall_s for s in steps), max(s.time_s for s in steps)
    most = max(step.iteration for step in steps)
    found = [
        Way("maxSeconds", Stop(max_seconds=end_s - began_s), began_s, end_s),
        Way(
            "maxSteps", Stop(max_steps=most), began_s,
            next(step.time_s for step in steps if step.iteration >= most),
        ),
    ]  # fmt: skip
    if epochs := max((step.epochs or 0.0 for step in steps), default=0.0):
        reached_s = next(step.time_s for step in steps if (step.epochs or 0.0) >= epochs)
        found.append(Way("maxEpochs", Stop(max_epochs=epochs), began_s, reached_s))
    means = mean_accuracies(records)
    before = [mean for time_s, mean in means if time_s <= began_s + 0.9 * (end_s - began_s)]
    for share in TARGETS if before else ():
        target = math.floor(1000 * share * max(before)) / 1000
        rule = f"{_TARGET}, {share:.0%} of the highest"
        reached_s = next(time_s for time_s, mean in means if mean >= target)
        found.append(Way(rule, Stop(target_accuracy=target), began_s, reached_s))
    return found


def mean_accuracies(records: Iterable[ProgressRecord]) -> list[tuple[float, float]]:
    """Return the mean of the replicas' latest accuracies, once all have one."""
    latest: dict[int, float] = {}
    ranks = {record.rank for record in records if isinstance(record, StepRecord)}
    found = []
    for record in records:
        if isinstance(record, EvaluationRecord) and not record.final:
            latest[record.rank] = record.accuracy
            if len(latest) == len(ranks):
                found.append((record.time_s, sum(latest.values()) / len(latest)))
    return found


def predictions(way: Way, spec: Spec, records: Iterable[ProgressRecord]) -> list[Prediction]:
    """Return one for each of SHARES, for the job with only that stop rule."""
    estimator = RemainingTime(replace(spec, trainer=replace(spec.trainer, stop=way.stop)))
    made: list[Prediction] = []
    due_s = [way.began_s + share * (way.end_s - way.began_s) for share in SHARES]
    for record in records:
        while len(made) < len(due_s) and record.time_s > due_s[len(made)]:
            now_s = due_s[len(made)]
            made.append(judged(way, now_s - way.began_s, estimator.predict(now_s)))
        if isinstance(record, StepRecord | EvaluationRecord):
            estimator.take(record)
    return made


def judged(way: Way, done_s: float, predicted: Remaining) -> Prediction:
    """Compare the prediction with the truth."""
    truth_s = way.end_s - way.began_s
    if not way.rule.startswith(_TARGET):
        return Prediction(
            None if predicted.seconds is None else (done_s + predicted.seconds) / truth_s - 1
        )
    if predicted.target_s is None:
        return Prediction(None)
    low_s, high_s = (done_s + each for each in predicted.target_s)
    is_inside = 0.99 * low_s <= truth_s <= 1.01 * high_s
    return Prediction(math.sqrt(low_s * high_s) / truth_s - 1, is_inside, high_s / low_s)


def simulated(out: Path, seeds: int, seconds: int) -> list[tuple[str, Path]]:
    """Return the folders of all settings and seeds; existing ones are not simulated again."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "stragglers.yaml").write_text(yaml.safe_dump(STRAGGLERS))
    found = []
    for name, (environment, change) in SETTINGS.items():
        for seed in range(1, seeds + 1):
            folder = out / name.replace(", ", "-") / str(seed)
            found.append((name, folder))
            if (folder / "summary.json").exists():
                continue
            folder.parent.mkdir(exist_ok=True)
            where = str(out / "stragglers.yaml") if environment == "stragglers" else environment
            command = [
                sys.executable, "-m", "dlion_cli", "simulate", str(JOB), "-e", where,
                "--out", str(folder), "--no-report", "--set", change,
                "--set", f"trainer.seed={seed}", "--set", f"trainer.stop={{maxSeconds: {seconds}}}",
                "--set", "trainer.evaluation.everySamples=500",
                "--set", "batching.globalBatchSize={initial: 48}",
                "--set", "trainer.optimizer.learningRate=0.02",
            ]  # fmt: skip
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return found


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="*", help="result folders of finished runs")
    parser.add_argument("--simulate", action="store_true", help="simulate runs, too")
    parser.add_argument("--out", type=Path, default=Path("eta"), help="their folder")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=100, help="virtual time of each")
    arguments = parser.parse_args()
    runs = [("given", folder) for folder in arguments.folders]
    if arguments.simulate:
        runs += simulated(arguments.out, arguments.seeds, arguments.seconds)
    if not runs:
        parser.error("give folders of finished runs, or --simulate")
    found: dict[tuple[str, str], list[list[Prediction]]] = defaultdict(list)
    for name, folder in runs:
        records = list(read_events(folder / "events.jsonl"))
        spec = load_job(yaml.safe_load((folder / "job.yaml").read_text())).spec
        for way in ways(records):
            found[name, way.rule].append(predictions(way, spec, records))
    print(f"commit {commit()}: {len(runs)} runs\n")
    heads = "".join(f" at {100 * share:.0f} % |" for share in SHARES)
    print(f"Error of the total time, middle (worst)\n\n| setting | rule |{heads}")
    print("|---|---|" + "---|" * len(SHARES))
    for (name, rule), made in found.items():
        if not rule.startswith(_TARGET):
            print(f"| {name} | {rule} |" + cells(made, exact))
    print("\nTarget accuracy: ranges, truth within, longest / shortest, error of the middle\n")
    print(f"| setting | rule |{heads}\n|---|---|" + "---|" * len(SHARES))
    for (name, rule), made in found.items():
        if rule.startswith(_TARGET):
            print(f"| {name} | {rule} |" + cells(made, a_range))


def cells(made: Sequence[Sequence[Prediction]], form: object) -> str:
    assert callable(form)
    columns = zip(*made, strict=True)
    return "".join(f" {form(column)} |" for column in columns)


def exact(column: Sequence[Prediction]) -> str:
    errors = [abs(each.error) for each in column if each.error is not None]
    if not errors:
        return "unknown"
    return f"{statistics.median(errors):.1%} ({max(errors):.1%})"


def a_range(column: Sequence[Prediction]) -> str:
    predicted = [each for each in column if each.error is not None]
    if not predicted:
        return f"0 of {len(column)}"
    inside = sum(each.is_inside for each in predicted)
    errors = [abs(each.error) for each in predicted if each.error is not None]
    ratio = statistics.median(each.ratio for each in predicted)
    return (
        f"{len(predicted)} of {len(column)}; {inside} within; {ratio:.1f}; "
        f"{statistics.median(errors):.0%} ({max(errors):.0%})"
    )


if __name__ == "__main__":
    main()
