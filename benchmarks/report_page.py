"""Measure the cost of the report page: time to write it, and its size.

    python benchmarks/report_page.py [FOLDER…] [--runs 5] [--against REV]

One page is of the given result folders together, one of a generated run of 96 workers. Each is
written by a new process with the modules that `dlion run` has loaded at its end. The script prints
seconds, CPU seconds and kB as median (range). With `--against` it also prints the same of another
commit, whose processes alternate with those of this tree, and the ratios of pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from local_runs import commit
from start_up import ROOT, checked_out, print_rounds

PARTS = ("seconds", "CPU seconds", "kB")
PACKAGES = ("api", "worker")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, help="result folders of one page")
    parser.add_argument("--runs", type=int, default=5, help="pages of each tree (5)")
    parser.add_argument("--against", metavar="REV", help="another commit to compare with")
    parser.add_argument("--once", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(_measured_here(options.folders, options.once)))
        return
    with tempfile.TemporaryDirectory(prefix="dlion-report-page-") as name:
        folder = Path(name)
        trees = {commit(): ROOT}
        if options.against:
            trees[options.against] = checked_out(options.against, folder, PACKAGES)
        pages = {f"{len(options.folders)} given": options.folders} if options.folders else {}
        pages["96 workers"] = [_invented(folder / "wide")]
        for words, folders in pages.items():
            rounds = [
                {
                    name: _measured(tree, folders, folder / "page.html")
                    for name, tree in trees.items()
                }
                for _ in range(options.runs + 1)  # the first one leaves compiled files
            ][1:]
            print(f"\n{words}, {options.runs} pages each\n")
            print_rounds(list(trees), PARTS, rounds)


def _invented(path: Path) -> Path:
    """Write a result folder of 96 workers, 30 seconds long."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from dlion_results.run_folder.folder import ResultFolder
    from dlion_results.summary.summary import Ending
    from synthetic_run import Story, description, records

    story = Story(workers=96, seconds=30, step_s=3.0, killed=None)
    now = datetime(2026, 1, 2, tzinfo=UTC)
    with ResultFolder.create(path, description(story), now=now) as folder:
        for record in records(story):
            folder.append(record)
        folder.finish(Ending("maxSeconds"))
    return path


def _measured(tree: Path, folders: Sequence[Path], out: Path) -> dict[str, float]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(tree / package) for package in PACKAGES),
    }
    command = [sys.executable, str(Path(__file__)), "--once", str(out), *map(str, folders)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(done.stderr)
    parts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return parts


def _measured_here(folders: Sequence[Path], out: Path) -> dict[str, float]:
    import dlion_results.run_folder.folder  # noqa: F401 - a run has loaded it

    began_s, cpu_s = time.perf_counter(), time.process_time()
    from dlion_results.report.page import write_report

    write_report(folders, out)
    values = (
        time.perf_counter() - began_s,
        time.process_time() - cpu_s,
        out.stat().st_size / 1000,
    )
    return dict(zip(PARTS, values, strict=True))


if __name__ == "__main__":
    main()
