"""Simulate the published evaluations: DLion and the systems that it is compared with.

    python benchmarks/paper/run.py --data ../shared/data [--only systems slides] [--seeds 5]
    python benchmarks/paper/run.py --data DIR --check        validate everything, run nothing
    python benchmarks/paper/run.py --data DIR --scale 0.02 --seeds 1 --only delays    a short trial
    python benchmarks/paper/run.py --data DIR --reduced      a small network, with matching links
    python benchmarks/paper/run.py --reduced --page docs --remake    the page of recorded figures

`--data` has cifar10/ and mnist/ with train.tfrecord and test.tfrecord each. Every part is one or
several calls of `dlion compare` for each environment (published.py); the same command resumes after
an interrupt. It first estimates its time from gradients measured on this machine. It writes
`results.json` and a page with pictures (`paper.md`) of these runs to OUT.

`--page DIR` records the figures of each environment in the repository (records.py) as soon as its
runs are done, at full scale and with five seeds. It writes a page of all recorded figures there.
`--reduced` has its own figures and page. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import estimate
import numpy as np
from bars import Results, verdicts
from comparison import CIFAR10, DECODED, MNIST, Comparison, scaled_seconds
from page import write_page
from published import comparisons
from records import Piece, figures, record, recorded
from reduced_edition import NAME as REDUCED
from reduced_edition import NETWORKS, Reduction

from dlion_api.atomic_file import write_atomically
from dlion_cli.commands.local.compare import COMPARISON, compare
from dlion_results.comparison import VariantRow
from dlion_worker.training.datasets.tfrecord import TFRecordSource

sys.path.append(str(Path(__file__).resolve().parents[1]))
from local_runs import commit

FULL_SEEDS = 5


def main() -> int:
    arguments = _arguments()
    if arguments.remake:
        return _report(_all_recorded(arguments), arguments, arguments.page)
    chosen = _chosen(arguments)
    if not chosen:
        sys.exit("nothing is left to run: look at --only and --environments")
    if names := {DECODED[one.file] for one in chosen if one.file in DECODED}:
        arguments.data = decoded(arguments.data, arguments.out / "data", names)
    for comparison in chosen:
        print(f"{comparison.part}/{comparison.name}: {_checked(comparison, arguments)}", flush=True)
    if arguments.check:
        return 0
    _print_estimate(chosen, arguments)
    if arguments.estimate:
        return 0
    pieces = [_run(one, arguments) for whole in chosen for one in _by_environment(whole)]
    missed = _report(pieces, arguments, _root(arguments))
    if arguments.page:
        _report(_all_recorded(arguments), arguments, arguments.page)
    return missed


def _arguments() -> argparse.Namespace:
    parts = list(dict.fromkeys(one.part for one in comparisons()))
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, help="holds cifar10/ and mnist/")
    parser.add_argument("--only", nargs="+", choices=parts, metavar="PART",
                        help=f"of {', '.join(parts)}; without it all (gpu: --reduced)")  # fmt: skip
    parser.add_argument("--environments", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--seeds", type=int, default=FULL_SEEDS)
    parser.add_argument("--scale", type=float, default=1.0,
                        help="of the virtual time; below 1 for a trial")  # fmt: skip
    parser.add_argument("--reduced", action="store_true",
                        help="a small network, and links slower in proportion")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=Path("runs/paper"))
    parser.add_argument("--page", type=Path, metavar="DIR",
                        help="record figures, and write their page there")  # fmt: skip
    parser.add_argument("--remake", action="store_true", help="run nothing: only that page")
    parser.add_argument(
        "--estimate", action="store_true", help="print the estimated time, run nothing"
    )
    parser.add_argument("--check", action="store_true", help="validate everything, run nothing")
    arguments = parser.parse_args()
    if not 0 < arguments.scale <= 1 or arguments.seeds < 1 or arguments.jobs < 1:
        parser.error("--scale is above 0 and at most 1; --seeds and --jobs are at least 1")
    arguments.is_look = arguments.scale < 1 or arguments.seeds < FULL_SEEDS
    if arguments.page and arguments.is_look:
        parser.error(f"--page takes runs at full scale, with {FULL_SEEDS} seeds")
    if arguments.remake and not arguments.page:
        parser.error("--remake takes --page DIR")
    if not arguments.remake and not arguments.data:
        parser.error("--data DIR is missing: it holds cifar10/ and mnist/")
    arguments.edition = REDUCED if arguments.reduced else ""
    arguments.commit = commit()  # before the first record
    return arguments


def decoded(data: Path, folder: Path, names: Collection[str]) -> Path:
    """Return the folder with the arrays of all images of these data sets (published.DECODED)."""
    for name in sorted(names):
        for part in ("train", "test"):
            path, records = folder / name / f"{part}.npz", data / name / f"{part}.tfrecord"
            if path.exists() and path.stat().st_mtime >= records.stat().st_mtime:
                continue
            source = TFRecordSource(records)
            arrays = io.BytesIO()
            images = source.read(np.arange(len(source.labels)))
            np.savez(arrays, x=images, y=source.labels)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, arrays.getvalue(), mode=0o644)
    return folder


def _chosen(arguments: argparse.Namespace) -> list[Comparison]:
    """Return the requested comparisons, each with the requested environments."""
    chosen = []
    for one in _edition(arguments):
        by_default = arguments.check or arguments.reduced or one.part != "gpu"
        if not (one.part in arguments.only if arguments.only else by_default):
            continue
        places = tuple(
            place
            for place in one.environments
            if not arguments.environments or Path(place).stem in arguments.environments
        )
        if places:
            chosen.append(replace(one, environments=places))
    return chosen


def _edition(arguments: argparse.Namespace) -> list[Comparison]:
    if not arguments.reduced:
        return comparisons()
    reduction = Reduction(_root(arguments) / "environments")
    return [reduction.of(one) for one in comparisons()]


def _by_environment(comparison: Comparison) -> list[Comparison]:
    return [replace(comparison, environments=(place,)) for place in comparison.environments]


def _all_recorded(arguments: argparse.Namespace) -> list[Piece]:
    """Return the recorded pieces of the edition in the order of the page."""
    found = (
        recorded(arguments.edition, one)
        for whole in _edition(arguments)
        for one in _by_environment(whole)
    )
    return [piece for piece in found if piece is not None]


def _root(arguments: argparse.Namespace) -> Path:
    """Return the folder of the runs, by edition and scale."""
    root: Path = arguments.out / arguments.edition
    return root if arguments.scale == 1 else root / f"scale-{arguments.scale:g}"


def _folder(comparison: Comparison, arguments: argparse.Namespace) -> Path:
    """Return the folder of one comparison's runs."""
    return _root(arguments) / comparison.name


def _words(comparison: Comparison, arguments: argparse.Namespace) -> list[str]:
    return comparison.arguments(
        seeds=arguments.seeds,
        scale=arguments.scale,
        out=_folder(comparison, arguments),
        data=arguments.data,
    )


def _checked(comparison: Comparison, arguments: argparse.Namespace) -> str:
    """Return the output of a dry run. Raises: DLionError for invalid manifests or columns."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        words = [*_words(comparison, arguments), "--dry-run"]
        compare.main(words, prog_name="dlion compare", standalone_mode=False)
    return output.getvalue().strip()


def _print_estimate(chosen: list[Comparison], arguments: argparse.Namespace) -> None:
    total_s = 0.0
    print("\nEstimated time without further learning rates (gradients measured here):")
    for one in chosen:
        cost = estimate.cost(one, data=arguments.data, keep_in=arguments.out)
        core_s = estimate.core_seconds(one, cost, seeds=arguments.seeds, scale=arguments.scale)
        done = len(list(_folder(one, arguments).rglob("compared.json")))
        wall_s = core_s / min(arguments.jobs, len(os.sched_getaffinity(0)))
        total_s += wall_s
        kept = f"; {done} runs already exist" if done else ""
        print(f"  {one.name}: {wall_s / 3600:.2f} h, {cost.sample_s * 1e3:.2f} ms a sample{kept}")
    print(f"  together: {total_s / 3600:.1f} h", flush=True)


def _run(comparison: Comparison, arguments: argparse.Namespace) -> Piece:
    """Run one environment; record it if a page is requested."""
    place = Path(comparison.environments[0]).stem
    print(f"\n== {comparison.name}, {place} ==", flush=True)
    words = [*_words(comparison, arguments), "--jobs", str(arguments.jobs)]
    done = subprocess.run([sys.executable, "-m", "dlion_cli", "compare", *words], check=False)
    if done.returncode:
        sys.exit(done.returncode)
    document = json.loads((_folder(comparison, arguments) / COMPARISON).read_text())
    rows = tuple(
        VariantRow(place, row["variant"], row["learningRate"], tuple(map(figures, row["runs"])))
        for row in document["rows"]
    )
    piece = Piece(comparison, rows, arguments.commit, arguments.seeds)
    if arguments.page:
        print(f"Recorded: {record(arguments.edition, piece)}", flush=True)
    return piece


def _report(pieces: Sequence[Piece], arguments: argparse.Namespace, folder: Path) -> int:
    """Write and print the results; return the exit code."""
    results = _results(pieces, arguments)
    judged = verdicts(results)
    head = (
        f"Made by `python benchmarks/paper/run.py --data DIR{' --reduced' * arguments.reduced}"
        " --page docs`: medians over seeds, and ranges in brackets. Each column has its own"
        " learning rate in each environment, chosen by three seeds that are not reported (one,"
        " where the commit is older than 568593f). Tables have the seconds to the target,"
        " MB sent until then, and the final accuracy. `-`: not reached. `=`: as with even"
        " batches. Rates and other figures are in `benchmarks/paper/figures`."
    )
    if arguments.reduced:
        head += (
            f" Networks of {NETWORKS[CIFAR10].parameters:,} parameters (CIFAR-10) and "
            f"{NETWORKS[MNIST].parameters:,} (MNIST), and links slower in proportion"
            " ([why](benchmarks.md#the-published-evaluations))."
        )
    if arguments.is_look:
        judged = [replace(one, met=None) for one in judged]
        head = (
            "**Only a look, from which nothing follows: no bar is judged.** Scale "
            f"{arguments.scale:g}. {head}"
        )
    page = write_page(folder, pieces, results, judged, head, edition=arguments.edition)
    print(f"Page: {page}")
    if folder == arguments.page:
        return int(any(one.met is False for one in judged))
    document = {
        "commit": arguments.commit,
        "seeds": arguments.seeds,
        "scale": arguments.scale,
        "edition": arguments.edition or "full",
        "bars": [asdict(one) for one in judged],
        "comparisons": {name: found for name, (_, found) in results.items()},
    }
    text = json.dumps(document, indent=2) + "\n"
    write_atomically(folder / "results.json", text.encode(), mode=0o644)
    print(f"\n{page.read_text()}\nFigures: {folder / 'results.json'}")
    return int(any(one.met is False for one in judged))


def _results(pieces: Sequence[Piece], arguments: argparse.Namespace) -> Results:
    """Return by name the whole comparison, and its figures."""
    wholes = {one.name: one for one in _edition(arguments)}
    return {
        name: (
            whole,
            {
                "targetAccuracy": whole.target,
                "seconds": scaled_seconds(whole.seconds, arguments.scale),
                "rows": [
                    row.document()
                    for piece in pieces
                    if piece.comparison.name == name
                    for row in piece.rows
                ],
            },
        )
        for name, whole in wholes.items()
        if any(piece.comparison.name == name for piece in pieces)
    }


if __name__ == "__main__":
    sys.exit(main())
