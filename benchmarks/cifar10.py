"""Six unequal workers on CIFAR-10 against one machine with all their cores, and each technique off.

    python benchmarks/cifar10.py --data ../shared/data/cifar10 [--only ideal dlion] [--out DIR]

Runs one after the other, by `dlion run`: the *ideal* (one process with the summed quota, no
network), the best worker alone on its own share of the data, `dlion`, and `dlion` with each
technique switched off, or with bounded staleness instead of lock step (to 50 % only). Prints a
table: time to 50 % and to 65 % (mean over replicas, from the first step on), final accuracy,
drift, bytes, and the ratio to the ideal. A run whose results are in `--out` already is not
repeated. As root, for real namespaces and quotas.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import yaml
from local_runs import Document, commit, started

from dlion_worker.environments import load_environment
from dlion_worker.results.report.page import write_report
from dlion_worker.results.report.picture import write_picture

ROOT = Path(__file__).resolve().parent.parent

TECHNIQUES: dict[str, dict[str, Any]] = {
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
    parser.add_argument("--out", type=Path, default=Path("runs/cifar10"))
    parser.add_argument("--report", type=Path, help="write the runs' report and picture there")
    arguments = parser.parse_args()
    rows, folders = [], []
    for name, document, environment in _runs(arguments):
        if arguments.only and name not in arguments.only:
            continue
        folder = arguments.out / name.replace(" ", "-")
        if not (folder / "summary.json").exists():  # else: the table alone is printed again
            with started(document, environment, folder) as run:
                run.finish()
        folders.append(folder)
        rows.append(_row(name, folder))
        print(json.dumps(rows[-1]), flush=True)
    _print(rows, arguments)
    if arguments.report:
        stem = arguments.report / f"cifar10-{arguments.environment}"
        labels = {str(row["run"]): folder for row, folder in zip(rows, folders, strict=True)}
        title = f"CIFAR-10 in {arguments.environment}"
        write_report([*labels.values()], stem.with_suffix(".html"), labels=[*labels], title=title)
        write_picture([*labels.values()], stem.with_suffix(".svg"), labels=[*labels], title=title)


def _runs(arguments: argparse.Namespace) -> list[tuple[str, Document, Document]]:
    job = yaml.safe_load((ROOT / "examples" / "cifar10.yaml").read_text())
    dataset = job["spec"]["trainer"]["dataset"]
    dataset["path"] = str((arguments.data / "train.tfrecord").resolve())
    dataset["evaluationPath"] = str((arguments.data / "test.tfrecord").resolve())
    job["spec"]["trainer"]["stop"]["maxSeconds"] = arguments.seconds
    environment = load_environment(arguments.environment)
    path = ROOT / "environments" / f"{arguments.environment}.yaml"
    shaped = yaml.safe_load(path.read_text())
    cores = [w.cores for w in environment.workers for _ in range(w.count)]
    scale = environment.core_scale or 0.76 * _machine_cores() / sum(cores)
    shaped["coreScale"] = scale
    alone = _alone(job, share=1 / len(cores))
    runs = [
        ("ideal", _alone(job, share=1.0), _one_machine(sum(cores), scale)),
        ("best worker alone", alone, _one_machine(max(cores), scale)),
    ]
    for name, sections in TECHNIQUES.items():
        document = json.loads(json.dumps(job))
        for section, values in sections.items():
            document["spec"].setdefault(section, {}).update(values)
        if sections:  # a technique is off: its effect is judged by the time to 50 %
            document["spec"]["trainer"]["stop"]["targetAccuracy"] = 0.5
        runs.append((name, document, shaped))
    return runs


def _machine_cores() -> int:
    return len(os.sched_getaffinity(0))


def _alone(job: Document, *, share: float) -> Document:
    """The same job on one worker, with that share of the training data."""
    document = json.loads(json.dumps(job))
    spec = document["spec"]
    spec["sites"] = [{"name": "alone", "groups": [{"name": "one", "workers": 1}]}]
    spec["exchange"] = {"policy": "none"}
    spec["trainer"]["dataset"]["keepFraction"] = share
    return document


def _one_machine(cores: float, scale: float) -> Document:
    return {"name": "one-machine", "workers": [{"cores": cores}], "coreScale": scale}


def _row(name: str, folder: Path) -> dict[str, Any]:
    summary = json.loads((folder / "summary.json").read_text())
    began_s = min(
        record["time_s"]
        for record in map(json.loads, (folder / "events.jsonl").read_text().splitlines())
        if record.get("reason") == "TrainingStarted"
    )
    levels = {
        level["accuracy"]: level["time_s"] - began_s
        for level in summary["levels"]
        if level["time_s"] is not None
    }
    return {
        "run": name,
        "to_50_s": levels.get(0.5),
        "to_65_s": levels.get(0.65),
        "accuracy": summary["accuracy"]["mean"],
        "worst": summary["accuracy"]["min"],
        "samples_per_s": summary["samples_per_s"],
        "drift": summary["drift"]["last"],
        "sent_mb": summary["sent_bytes"] / 1e6,
        "exchange_cpu": summary["exchange_cpu_fraction"],
    }


def _print(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    ideal = next((row for row in rows if row["run"] == "ideal"), None)
    print(f"\ncommit {commit()}, environment {arguments.environment}, one run each\n")
    head = ["run", "to 50 %", "to 65 %", "to 65 % / ideal", "accuracy", "worst replica",
            "samples/s", "drift", "sent", "CPU of exchange"]  # fmt: skip
    print("| " + " | ".join(head) + " |")
    print("|---" * len(head) + "|")
    for row in rows:
        ratio = None
        if ideal is not None and ideal["to_65_s"] and row["to_65_s"]:
            ratio = row["to_65_s"] / ideal["to_65_s"]
        cells = [
            row["run"],
            _text(row["to_50_s"], "{:.0f} s"),
            _text(row["to_65_s"], "{:.0f} s"),
            _text(ratio, "{:.2f}"),
            _text(row["accuracy"], "{:.1%}"),
            _text(row["worst"], "{:.1%}"),
            _text(row["samples_per_s"], "{:.0f}"),
            _text(row["drift"], "{:.3f}"),
            _text(row["sent_mb"], "{:.0f} MB"),
            _text(row["exchange_cpu"], "{:.0%}"),
        ]
        print("| " + " | ".join(cells) + " |")


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


if __name__ == "__main__":
    main()
