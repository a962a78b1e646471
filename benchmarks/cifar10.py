"""Compare six unequal workers on CIFAR-10 with one machine, and with each technique off.

    python benchmarks/cifar10.py --data ../shared/data/cifar10 [--only ideal adaptive] [--out DIR]

Runs follow one another, by `dlion run`. First is the *ideal* (one process with the summed quota, no
network). Then follow the best worker alone on its own share of the data, `adaptive`, and `dlion`.
Last, `dlion` runs with each technique switched off, or with bounded staleness instead of lock step
(only to 50 %). The script prints a table: time to 50 % and to 65 % (mean over replicas, from the
first step on), final accuracy over all test images, drift, bytes, and the ratio to the ideal of the
same round. Several rounds (`--runs`) give the median and the range. A run whose results are in
`--out` is not repeated. Run as root, for real namespaces and quotas.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import yaml
from local_runs import Document, commit, started

from dlion_environments.loading import load_environment
from dlion_results.report.page import write_report
from dlion_results.report.picture import write_picture

ROOT = Path(__file__).resolve().parent.parent
ALONE = "best worker alone"

Row = dict[str, float | None]

DLION: dict[str, dict[str, Any]] = {
    "batching": {"globalBatchSize": {"initial": 1920, "growth": False}},
    "exchange": {"policy": "dlion"},
    "knowledgeTransfer": {"policy": "best2all", "everySteps": 25},
}
WHOLE = ("adaptive", "dlion")
TECHNIQUES: dict[str, dict[str, Any]] = {
    "adaptive": {"exchange": {"policy": "adaptive"}},
    "dlion": {},
    "even batches": {"batching": {"policy": "even"}},
    "whole gradients": {"exchange": {"prioritization": False}},
    "no knowledge transfer": {"knowledgeTransfer": {"policy": "none"}},
    "bounded staleness": {"synchronization": {"mode": "bounded"}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of train/test.tfrecord")
    parser.add_argument("--environment", default="hetero-sys-a")
    parser.add_argument("--seconds", type=float, default=600.0, help="longest time of a run")
    parser.add_argument("--only", nargs="*", help="names of the rows to run")
    parser.add_argument("--runs", type=int, default=1, help="rounds of all rows")
    parser.add_argument("--out", type=Path, default=Path("runs/cifar10"))
    parser.add_argument("--report", type=Path, help="write the runs' report and picture there")
    arguments = parser.parse_args()
    if arguments.report:
        arguments.report.mkdir(parents=True, exist_ok=True)
    rounds: list[dict[str, Row]] = []
    labels: dict[str, Path] = {}
    for number in range(1, arguments.runs + 1):
        rounds.append({})
        for name, document, environment in _runs(arguments):
            if arguments.only and name not in arguments.only:
                continue
            suffix = "" if number == 1 else f"-{number}"
            folder = arguments.out / (name.replace(" ", "-") + suffix)
            if not (folder / "summary.json").exists():  # otherwise only the table is printed again
                with started(document, environment, folder, data_root=arguments.data) as run:
                    run.finish()
            labels.setdefault(name, folder)
            rounds[-1][name] = _row(folder)
            print(json.dumps({"run": name, "round": number, **rounds[-1][name]}), flush=True)
    _print(rounds, arguments)
    if arguments.report:
        stem = arguments.report / f"cifar10-{arguments.environment}"
        title = f"CIFAR-10 in {arguments.environment} (benchmarks/cifar10.py at {commit()})"
        write_report(
            [*labels.values()],
            stem.with_suffix(".html"),
            labels=[*labels],
            title=title,
            reference=ALONE
            if ALONE in labels
            else None,  # not the ideal, which also has one worker
        )
        write_picture([*labels.values()], stem.with_suffix(".svg"), labels=[*labels], title=title)


def _runs(arguments: argparse.Namespace) -> list[tuple[str, Document, Document]]:
    job = yaml.safe_load((ROOT / "examples" / "cifar10.yaml").read_text())
    dataset = job["spec"]["trainer"]["dataset"]
    dataset["path"], dataset["evaluationPath"] = "train.tfrecord", "test.tfrecord"
    job["spec"]["trainer"]["stop"]["maxSeconds"] = arguments.seconds
    job["spec"] |= json.loads(json.dumps(DLION))
    environment = load_environment(arguments.environment)
    path = ROOT / "environments" / f"{arguments.environment}.yaml"
    shaped = yaml.safe_load(path.read_text())
    cores = [w.cores for w in environment.workers for _ in range(w.count)]
    scale = environment.core_scale or 0.76 * _machine_cores() / sum(cores)
    shaped["coreScale"] = scale
    alone = _alone(job, share=1 / len(cores))
    runs = [
        ("ideal", _alone(job, share=1.0), _one_machine(sum(cores), scale)),
        (ALONE, alone, _one_machine(max(cores), scale)),
    ]
    for name, sections in TECHNIQUES.items():
        document = json.loads(json.dumps(job))
        for section, values in sections.items():
            document["spec"].setdefault(section, {}).update(values)
        if name not in WHOLE:  # a technique is off: the time to 50 % shows its effect
            document["spec"]["trainer"]["stop"]["targetAccuracy"] = 0.5
        runs.append((name, document, shaped))
    return runs


def _machine_cores() -> int:
    return len(os.sched_getaffinity(0))


def _alone(job: Document, *, share: float) -> Document:
    """Return the same job on one worker, with that share of the training data."""
    document = json.loads(json.dumps(job))
    spec = document["spec"]
    spec["sites"] = [{"name": "alone", "groups": [{"name": "one", "workers": 1}]}]
    spec["exchange"] = {"policy": "none"}
    spec["trainer"]["dataset"]["keepFraction"] = share
    return document


def _one_machine(cores: float, scale: float) -> Document:
    return {"name": "one-machine", "workers": [{"cores": cores}], "coreScale": scale}


def _row(folder: Path) -> Row:
    summary = json.loads((folder / "summary.json").read_text())
    levels = {level["accuracy"]: level["training_time_s"] for level in summary["levels"]}
    return {
        "to_50_s": levels.get(0.5),
        "to_65_s": levels.get(0.65),
        "accuracy": summary["accuracy"]["mean"],
        "worst": summary["accuracy"]["min"],
        "samples_per_s": summary["samples_per_s"],
        "drift": summary["drift"]["last"],
        "sent_mb": summary["sent_bytes"] / 1e6,
        "exchange_cpu": summary["exchange_cpu_fraction"],
    }


COLUMNS = {
    "to_50_s": ("to 50 %", "{:.0f} s"),
    "to_65_s": ("to 65 %", "{:.0f} s"),
    "ratio": ("to 65 % / ideal", "{:.2f}"),
    "accuracy": ("accuracy", "{:.1%}"),
    "worst": ("worst replica", "{:.1%}"),
    "samples_per_s": ("samples/s", "{:.0f}"),
    "drift": ("drift", "{:.3f}"),
    "sent_mb": ("sent", "{:.0f} MB"),
    "exchange_cpu": ("CPU of exchange", "{:.0%}"),
}


def _print(rounds: list[dict[str, Row]], arguments: argparse.Namespace) -> None:
    for rows in rounds:
        ideal_s = rows["ideal"]["to_65_s"] if "ideal" in rows else None
        for row in rows.values():
            row["ratio"] = row["to_65_s"] / ideal_s if ideal_s and row["to_65_s"] else None
    print(f"\ncommit {commit()}, environment {arguments.environment}, rounds: {len(rounds)}\n")
    print("| " + " | ".join(["run", *(head for head, _ in COLUMNS.values())]) + " |")
    print("|---" * (1 + len(COLUMNS)) + "|")
    for name in rounds[0]:
        cells = [
            _text([row[name][key] for row in rounds], form) for key, (_, form) in COLUMNS.items()
        ]
        print("| " + " | ".join([name, *cells]) + " |")


def _text(values: list[float | None], form: str) -> str:
    """Return the median, and the range of several values; `-` if a round has none."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "-"
    middle = form.format(statistics.median(known))
    spread = f" ({form.format(min(known))} to {form.format(max(known))})"
    return middle + (spread if len(known) > 1 else "")


if __name__ == "__main__":
    main()
