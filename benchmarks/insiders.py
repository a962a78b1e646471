"""Measure the effect of one bad worker of four on a job, by the method of `exchange.robustness`.

    python benchmarks/insiders.py --out runs.jsonl [--seeds 1 2] [--methods clip] [--part 0/2]
    python benchmarks/insiders.py --out site.jsonl --site [--seeds 1 2]
    python benchmarks/insiders.py --clean 25 --out clean.jsonl [--steps 1400] [--part 0/2]
    python benchmarks/insiders.py --table runs.jsonl
    python benchmarks/insiders.py --table clean.jsonl

Each run is the quick start's job (digits, four unequal workers at sites of three and one) in
virtual time. Worker 1, one of three at its site, attacks from its own machine or with its own data
(tests/support/insider_runs.py). With `--site` both workers of one of three sites do, each digit is
at two sites, and all sites have two workers. `--dense` takes the network of the tests, whose steps
need a fifth of the time. `--clean N` makes 4 N runs without an attacker, which count how
often an honest worker is reported; with `--steps` far beyond the usual, also once all is learned.
Runs are appended as JSON, one per line; a later call with the same file skips them. `--part i/n`
makes every n-th run, for several processes. A run takes three to four seconds of CPU.

The script prints the mean final accuracy of the honest replicas and its range over the seeds.
Marks: all attackers were named by an event `UnusualValues` (N), they were quarantined (Q, with
`--methods 'clip + quarantine'`), an honest worker was named (H).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

STEPS = {"adaptive": 90, "sparseloco": 90}
USUAL_STEPS = 120
METHODS = ("detect", "clip", "trimmed", "krum")
QUARANTINE = " + quarantine"
"""Suffix of a method with `exchange.quarantine: majority`."""
MAJORITY = {"exchange.quarantine": "majority"}
CLOSE = 0.02
"""An attack that costs at most this counts as harmless."""
SPLITS = ("iid", "bySite")
CLEAN = (("adaptive", "iid"), ("adaptive", "bySite"), ("full", "bySite"), ("dlion", "dirichlet"))
FIELDS = ("attack", "split", "policy", "method", "seed")


def main() -> None:
    """Make the runs, or print a table of existing ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to append runs to")
    parser.add_argument("--table", type=Path, nargs="+", help="print the runs of these files")
    parser.add_argument("--clean", type=int, metavar="N", help="4 N runs without an attacker")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--attacks", nargs="+", help="some of the attacks")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--policies", nargs="+", default=["adaptive"])
    parser.add_argument("--splits", nargs="+", default=list(SPLITS))
    parser.add_argument("--steps", type=int, help="steps of each run; one file for each number")
    parser.add_argument("--site", action="store_true", help="one bad site of three; its own file")
    parser.add_argument("--dense", action="store_true", help="a smaller network; its own file")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th run from the i-th on")
    arguments = parser.parse_args()
    if arguments.table:
        runs = [
            json.loads(line) for path in arguments.table for line in path.read_text().splitlines()
        ]
        _print_clean(runs) if all(one["attack"] == "none" for one in runs) else _print_table(runs)
        return
    if arguments.out is None:
        parser.error("--out FILE or --table FILE")
    _make(arguments)


def _wanted(arguments: argparse.Namespace) -> list[tuple[Any, ...]]:
    import insider_runs

    if arguments.clean:
        seeds = range(1, arguments.clean + 1)
        return [
            ("none", split, policy, f"detect{QUARANTINE}", seed)
            for seed in seeds
            for policy, split in CLEAN
        ]
    attacks = arguments.attacks or ["none", *insider_runs.ATTACKS, *insider_runs.DATA_ATTACKS]
    return [
        (attack, split, policy, method, seed)
        for seed, policy, method, attack, split in itertools.product(
            arguments.seeds, arguments.policies, arguments.methods, attacks, arguments.splits
        )
    ]


def _make(arguments: argparse.Namespace) -> None:
    import insider_runs

    done: set[tuple[Any, ...]] = set()
    if arguments.out.exists():
        lines = arguments.out.read_text().splitlines()
        done = {tuple(json.loads(line)[name] for name in FIELDS) for line in lines}
    settings = {"trainer.program": {"file": "dense.py"}} if arguments.dense else {}
    bad = insider_runs.SITE if arguments.site else insider_runs.WORKER
    part, parts = map(int, arguments.part.split("/"))
    for wanted in _wanted(arguments)[part::parts]:
        if wanted in done:
            continue
        attack, split, policy, method, seed = wanted
        began_s = time.process_time()
        run = insider_runs.run(
            attack, split=split, policy=policy, robustness=method.partition(" ")[0], seed=seed,
            steps=arguments.steps or STEPS.get(policy, USUAL_STEPS),
            settings={**settings, **(MAJORITY if QUARANTINE in method else {})},
            bad=bad,
        )  # fmt: skip
        found = dict(zip(FIELDS, wanted, strict=True))
        found |= {"accuracy": round(run.accuracy, 4), "steps": run.steps, "problem": run.problem}
        found |= {"named": {str(rank): list(reasons) for rank, reasons in run.named.items()}}
        found |= {"quarantined": list(run.quarantined), "bad": sorted(bad.ranks)}
        found |= {"cpu_s": round(time.process_time() - began_s, 1)}
        with arguments.out.open("a") as file:
            file.write(json.dumps(found) + "\n")


def _mark(runs: list[dict[str, Any]]) -> str:
    """Return mean and range of the accuracy of some runs, and marks for named and quarantined
    workers.
    """
    from insider_runs import ATTACKER

    each = [one["accuracy"] for one in runs]
    text = f"{_mean(runs):.1%} ({min(each):.1%} to {max(each):.1%})" if any(each) else "diverged"
    pairs = [(one, one.get("bad", [ATTACKER])) for one in runs]
    named = sum(set(map(str, bad)) <= set(one["named"]) for one, bad in pairs)
    honest = sum(not set(one["named"]) <= set(map(str, bad)) for one, bad in pairs)
    quarantined = sum(set(bad) <= set(one.get("quarantined", ())) for one, bad in pairs)
    if named:
        text += " N" if named == len(runs) else f" N {named}/{len(runs)}"
    if quarantined:
        text += f" Q {quarantined}/{len(runs)}" if quarantined < len(runs) else " Q"
    return text + (f" H {honest}/{len(runs)}" if honest else "")


def _print_table(runs: list[dict[str, Any]]) -> None:
    cells: defaultdict[tuple[str, str, str], dict[str, list[dict[str, Any]]]] = defaultdict(dict)
    for one in runs:
        row = cells[one["policy"], one["split"], one["attack"]]
        row.setdefault(one["method"], []).append(one)
    known = (*METHODS, f"clip{QUARANTINE}")
    methods = [name for name in known if any(name in row for row in cells.values())]
    print(f"| policy | data | attack | {' | '.join(methods)} |")
    print("|---" * (3 + len(methods)) + "|")
    for (policy, split, attack), row in cells.items():
        marks = [_mark(row[name]) if name in row else "" for name in methods]
        print(f"| {policy} | {split} | {attack} | {' | '.join(marks)} |")
    for method in methods:
        changes = [
            _mean(row[method]) - _mean(cells[policy, split, "none"][method])
            for (policy, split, attack), row in cells.items()
            if attack != "none" and method in row and method in cells[policy, split, "none"]
        ]
        close = sum(change >= -CLOSE for change in changes)
        print(f"{method}: {close} of {len(changes)} attacks cost {100 * CLOSE:g} points or less")
        _print_pairs(method, [one for one in runs if one["method"] == method])


def _print_pairs(method: str, runs: list[dict[str, Any]]) -> None:
    """Print how far attacked runs end below the clean run of the same policy, data and seed."""
    clean = {_job_of(one): one["accuracy"] for one in runs if one["attack"] == "none"}
    attacked = [one for one in runs if one["attack"] != "none" and _job_of(one) in clean]
    below = [clean[_job_of(one)] - one["accuracy"] for one in attacked]
    if below:
        close = sum(points <= CLOSE for points in below)
        print(
            f"{method}: {close} of {len(below)} attacked runs end at most {100 * CLOSE:g} points "
            f"below the clean run of their seed; the worst is {100 * max(below):.1f} below it"
        )


def _job_of(run: dict[str, Any]) -> tuple[Any, ...]:
    return run["policy"], run["split"], run["seed"]


def _mean(runs: list[dict[str, Any]]) -> float:
    return statistics.fmean(one["accuracy"] for one in runs)


def _print_clean(runs: list[dict[str, Any]]) -> None:
    by_job: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for one in runs:
        by_job[one["policy"], one["split"]].append(one)
    print("| policy | data | clean runs | with a worker named | with one quarantined | accuracy |")
    print("|---" * 6 + "|")
    for (policy, split), some in by_job.items():
        named = sum(bool(one["named"]) for one in some)
        quarantined = sum(bool(one.get("quarantined")) for one in some)
        print(f"| {policy} | {split} | {len(some)} | {named} | {quarantined} | {_mean(some):.1%} |")
    total = sum(bool(one["named"]) for one in runs)
    print(f"\n{len(runs)} clean runs; an honest worker was named in {total}")


if __name__ == "__main__":
    main()
