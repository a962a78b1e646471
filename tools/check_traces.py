"""Compare the traces of three short simulated jobs with pinned ones.

    python tools/check_traces.py [--write]

The jobs are a synchronous one, an asynchronous one, and one in which a worker is lost and returns.
A change of the exchange, the policies, the controller or the simulator changes a trace: check that
it is intended, then pin the new traces with `--write`.

A trace is every record of the run without the values that TensorFlow computes (losses, accuracies,
weights), which processors round differently. It has times, bytes, iterations, batches, budgets and
events. They depend on such values only if gradients are selected.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PINNED = Path(__file__).with_name("pinned_traces.json")
JOB = ROOT / "examples" / "digits.yaml"
COMPUTED = frozenset({"loss", "accuracy", "class_accuracy", "sketch", "weights_norm", "metrics"})
"""Fields of records that processors round differently."""

Document = dict[str, Any]

BATCHES: Document = {
    "trainer.evaluation.everySamples": 400,
    "batching.globalBatchSize": {"initial": 80, "growth": False},
}
UNEQUAL = [
    {"count": 2, "cores": 4, "mbitPerS": 1},
    {"cores": 2, "mbitPerS": 0.5},
    {"cores": 6, "mbitPerS": 1},
]
JOBS: dict[str, tuple[Document, Document]] = {
    "synchronous": (
        {"workers": UNEQUAL},
        {
            "trainer.stop": {"maxSteps": 12},
            "exchange.policy": "dlion",
            "synchronization.mode": "synchronous",
            "knowledgeTransfer.everySteps": 5,
        },
    ),
    "asynchronous": (
        {"workers": UNEQUAL, "stragglers": [{"slowdown": 3, "chance": 0.3}]},
        {
            "trainer.stop": {"maxSteps": 12},
            "exchange.policy": "ako",
            "synchronization.mode": "asynchronous",
            "knowledgeTransfer.policy": "none",
        },
    ),
    "churn": (
        {
            "workers": [{"count": 4, "cores": 4, "mbitPerS": 100}],
            "absences": [{"worker": 1, "leaves": {"seconds": 2.2}, "comes": {"seconds": 4.1}}],
        },
        {
            "trainer.stop": {"maxSeconds": 8},
            "exchange.policy": "full",
            "synchronization.mode": "synchronous",
            "knowledgeTransfer.policy": "none",
        },
    ),
}
"""For each job the fields of its environment, and its changes to the example."""


def trace(name: str, folder: Path) -> Document:
    """Simulate that job in a new folder. Return the hash of its trace, and figures to compare."""
    from dlion_cli.commands.local.simulate import (
        simulate,
    )  # imports TensorFlow, so only in children

    environment, settings = JOBS[name]
    sites = [{"name": "plant-a", "workers": 3}, {"name": "plant-b", "workers": 1}]
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps({"name": name, "sites": sites, **environment}))
    words = [
        word
        for field, value in {**BATCHES, **settings}.items()
        for word in ("--set", f"{field}={json.dumps(value)}")
    ]
    out = folder / name
    arguments = [str(JOB), "-e", str(path), *words, "--no-report", "--out", str(out), "-o", "json"]
    code = simulate.main(arguments, standalone_mode=False)
    if code:
        sys.exit(f"{name}: dlion simulate ended with {code}")
    lines = (out / "events.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    events = [each for each in records if each["kind"] == "event"]
    kept = [{key: each[key] for key in each if key not in COMPUTED} for each in records]
    return {
        "hash": hashlib.blake2b(json.dumps(kept).encode(), digest_size=16).hexdigest(),
        "records": dict(sorted(Counter(each["kind"] for each in records).items())),
        "events": dict(sorted(Counter(each["reason"] for each in events).items())),
        "iterations": max(each["iteration"] for each in records),
        "seconds": max(each["time_s"] for each in records),
        "sentBytes": sum(each.get("sent_bytes", 0) for each in records),
    }


def traces() -> Document:
    """Return the traces of all jobs, one after the other so that TensorFlow is loaded once."""
    silent = os.open(os.devnull, os.O_WRONLY)
    shown = os.dup(1)
    os.dup2(silent, 1)  # the summaries of the runs
    try:
        with tempfile.TemporaryDirectory(prefix="dlion-traces-") as temporary:
            return {name: trace(name, Path(temporary)) for name in JOBS}
    finally:
        sys.stdout.flush()
        os.dup2(shown, 1)


def differences(pinned: Document, now: Document) -> list[str]:
    """Return a line for each figure that differs, with both values."""
    return [
        f"{name}: {figure} is {value}; pinned: {pinned.get(name, {}).get(figure)}"
        for name, figures in now.items()
        for figure, value in figures.items()
        if value != pinned.get(name, {}).get(figure)
    ]


def main() -> int:
    """Return the exit code: 1 if a trace differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--write", action="store_true", help="pin the traces as they are now")
    arguments = parser.parse_args()
    now = traces()
    if arguments.write:
        PINNED.write_text(json.dumps(now, indent=2) + "\n")
        return 0
    if lines := differences(json.loads(PINNED.read_text()), now):
        print("\n".join(lines))
        print("If this is intended, run tools/check_traces.py --write and commit with the reason.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
