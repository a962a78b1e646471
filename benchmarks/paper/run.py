"""The published evaluations again, simulated: DLion and the systems that it is compared with.

    python benchmarks/paper/run.py --data ../shared/data [--only systems slides] [--seeds 5]
    python benchmarks/paper/run.py --data DIR --check        validate everything, run nothing
    python benchmarks/paper/run.py --data DIR --scale 0.02 --seeds 1 --only delays    only a look
    python benchmarks/paper/run.py --data DIR --reduced      a small network, links to match

`--data` holds cifar10/ and mnist/ with train.tfrecord and test.tfrecord each. Every part is one
call of `dlion compare` or several (published.py says which); the same command goes on where it was
broken off. Says first how long it will take at most, from gradients measured on this machine.
Writes `results.json` and a page with pictures (`paper.md`) to OUT, and to `--page DIR` where all
was run at full scale with five seeds. `--reduced` has a page of its own (`paper-reduced.md`), which
may hold some parts and environments alone, and says which. Exit code 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import estimate
from bars import Results, verdicts
from page import write_page
from published import Comparison, comparisons
from reduced_edition import NAME as REDUCED
from reduced_edition import PARAMETERS, Reduction

from dlion_api.atomic_file import write_atomically
from dlion_cli.compare import COMPARISON, PICTURE, compare

sys.path.append(str(Path(__file__).resolve().parents[1]))
from local_runs import commit

FULL_SEEDS = 5


def main() -> int:
    arguments = _arguments()
    chosen = _chosen(arguments)
    if not chosen:
        sys.exit("nothing is left to run: look at --only and --environments")
    for comparison in chosen:
        print(f"{comparison.part}/{comparison.name}: {_checked(comparison, arguments)}", flush=True)
    if arguments.check:
        return 0
    _tell_time(chosen, arguments)
    if arguments.estimate:
        return 0
    results: dict[str, tuple[Comparison, Any]] = {}
    for comparison in chosen:
        print(f"\n== {comparison.name} ==", flush=True)
        _run(comparison, arguments)
        text = (_folder(comparison, arguments) / COMPARISON).read_text()
        results[comparison.name] = (comparison, json.loads(text))
    return _report(results, arguments)


def _arguments() -> argparse.Namespace:
    parts = list(dict.fromkeys(one.part for one in comparisons()))
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, required=True, help="holds cifar10/ and mnist/")
    parser.add_argument("--only", nargs="+", choices=parts, metavar="PART",
                        help=f"of {', '.join(parts)}; without it all but gpu")  # fmt: skip
    parser.add_argument("--environments", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--seeds", type=int, default=FULL_SEEDS)
    parser.add_argument("--scale", type=float, default=1.0,
                        help="of the virtual time; below 1 for a look")  # fmt: skip
    parser.add_argument("--reduced", action="store_true",
                        help="a small network, and links slower in proportion")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=Path("runs/paper"))
    parser.add_argument("--page", type=Path, metavar="DIR", help="put the page part there as well")
    parser.add_argument(
        "--estimate", action="store_true", help="say how long it takes, run nothing"
    )
    parser.add_argument("--check", action="store_true", help="validate everything, run nothing")
    arguments = parser.parse_args()
    if not 0 < arguments.scale <= 1 or arguments.seeds < 1 or arguments.jobs < 1:
        parser.error("--scale is above 0 and at most 1; --seeds and --jobs are at least 1")
    is_look = arguments.scale < 1 or arguments.seeds < FULL_SEEDS
    is_partial = not arguments.reduced and (arguments.only or arguments.environments)
    if arguments.page and (is_look or is_partial):
        parser.error(f"--page takes everything at full scale, with {FULL_SEEDS} seeds")
    arguments.edition = REDUCED if arguments.reduced else ""
    return arguments


def _chosen(arguments: argparse.Namespace) -> list[Comparison]:
    """The comparisons asked for, each with the environments asked for."""
    chosen = []
    for one in comparisons():
        by_default = arguments.check or one.part != "gpu"
        if not (one.part in arguments.only if arguments.only else by_default):
            continue
        # Rates are chosen where they are chosen in a whole run.
        tuned_in = one.tuned_in or one.environments[0]
        places = tuple(
            place
            for place in one.environments
            if not arguments.environments or place in arguments.environments
        )
        if places:
            chosen.append(replace(one, environments=places, tuned_in=tuned_in))
    if not arguments.reduced:
        return chosen
    reduction = Reduction(_root(arguments) / "environments")
    return [small for one in chosen if (small := reduction.of(one)) is not None]


def _root(arguments: argparse.Namespace) -> Path:
    """Runs of another edition, or of another scale, are others."""
    root: Path = arguments.out / arguments.edition
    return root if arguments.scale == 1 else root / f"scale-{arguments.scale:g}"


def _folder(comparison: Comparison, arguments: argparse.Namespace) -> Path:
    """Of one comparison's runs."""
    return _root(arguments) / comparison.name


def _words(comparison: Comparison, arguments: argparse.Namespace) -> list[str]:
    return comparison.arguments(
        seeds=arguments.seeds,
        scale=arguments.scale,
        out=_folder(comparison, arguments),
        data=arguments.data,
    )


def _checked(comparison: Comparison, arguments: argparse.Namespace) -> str:
    """What a dry run says. Raises: DLionError for manifests or columns that are wrong."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        words = [*_words(comparison, arguments), "--dry-run"]
        compare.main(words, prog_name="dlion compare", standalone_mode=False)
    return said.getvalue().strip()


def _tell_time(chosen: list[Comparison], arguments: argparse.Namespace) -> None:
    total_s = 0.0
    print("\nHow long it takes at most (gradients measured here; waiting workers take less):")
    for one in chosen:
        cost = estimate.cost(one, data=arguments.data, keep_in=arguments.out)
        core_s = estimate.core_seconds(one, cost, seeds=arguments.seeds, scale=arguments.scale)
        done = len(list(_folder(one, arguments).rglob("compared.json")))
        wall_s = core_s / min(arguments.jobs, len(os.sched_getaffinity(0)))
        total_s += wall_s
        kept = f"; {done} runs are there already" if done else ""
        print(f"  {one.name}: {wall_s / 3600:.2f} h, {cost.sample_s * 1e3:.2f} ms a sample{kept}")
    print(f"  together: {total_s / 3600:.1f} h", flush=True)


def _run(comparison: Comparison, arguments: argparse.Namespace) -> None:
    words = [*_words(comparison, arguments), "--jobs", str(arguments.jobs)]
    done = subprocess.run([sys.executable, "-m", "dlion_cli", "compare", *words], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def _report(results: Results, arguments: argparse.Namespace) -> int:
    """Writes and prints what came of it; the exit code."""
    judged = verdicts(results)
    is_whole = arguments.scale == 1 and arguments.seeds >= FULL_SEEDS
    head = (
        f"Commit {commit()}, `python benchmarks/paper/run.py {' '.join(sys.argv[1:])}`, "
        f"{arguments.seeds} seeds, scale {arguments.scale:g}; medians, and ranges in brackets."
    )
    if arguments.reduced:
        head += (
            f" A network of {PARAMETERS:,} parameters, and links slower in proportion"
            " ([why](benchmarks.md#the-published-evaluations)); parts and environments that are not"
            " below have not been run."
        )
    if not is_whole:
        judged = [replace(one, met=None) for one in judged]
        head = f"**Only a look, from which nothing follows: no bar is judged.** {head}"
    root = _root(arguments)
    document = {
        "commit": commit(),
        "seeds": arguments.seeds,
        "scale": arguments.scale,
        "edition": arguments.edition or "full",
        "bars": [asdict(one) for one in judged],
        "comparisons": {name: found for name, (_, found) in results.items()},
    }
    text = json.dumps(document, indent=2) + "\n"
    write_atomically(root / "results.json", text.encode(), mode=0o644)
    pictures = {
        name: _folder(comparison, arguments) / PICTURE for name, (comparison, _) in results.items()
    }
    page = write_page(root, results, pictures, judged, head, edition=arguments.edition)
    print(f"\n{page.read_text()}\nFigures: {root / 'results.json'}\nPage: {page}")
    if arguments.page:
        write_page(arguments.page, results, pictures, judged, head, edition=arguments.edition)
    return int(any(one.met is False for one in judged))


if __name__ == "__main__":
    sys.exit(main())
