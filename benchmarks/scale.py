"""Measure the capacity of one operator: a thousand jobs, five thousand pods, a real API server.

    python benchmarks/scale.py [--jobs 1000] [--workers 5] [--runs 5] [--baseline COMMIT]
    python benchmarks/scale.py --kubeflow --jobs 100 --probes 30 --out runs/beside

Run as root. Each run starts a site of the testbed (etcd, API server, controllers, scheduler) with
KWOK in place of kubelets. It has one operator process, and one process that joins the coordinator
for each running pod (`benchmarks/scaling`). Jobs are created as fast as the API server accepts
them, and idle. Then the operator is killed and restarted, and jobs are changed, one after the
other. With `--baseline` each run is followed by one of that commit's operator. With
`--kubeflow` each is followed by one of Kubeflow Trainer and JobSet with TrainJobs of as many nodes
(`benchmarks/scaling/kubeflow.py`), and changes suspend jobs, which both operators report.

A complete run is stored in DIR and not measured again. The script prints a table of the medians
with the ranges over the runs, and the bars; with `--picture` it draws a figure. Exit code 1 if a
bar is missed, which means nothing on a machine with other load: see the load average.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "benchmarks" / "scaling")]

from local_runs import commit  # noqa: E402
from one_run import Figures, Size, measure, quantile  # noqa: E402

from dlion_api.atomic_file import write_atomically  # noqa: E402
from dlion_api.errors import UnavailableError  # noqa: E402

CODE = ("api", "operator", "worker", "cli")
Run = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    unit: str
    value: Callable[[Figures], float]
    bar: str = ""
    keeps: Callable[[float], bool] = lambda _: True
    digits: int = 1


ROWS = (
    Row("jobs created", "per s", lambda it: it.created_per_s, ">= 20", lambda v: v >= 20),
    Row("all jobs train after", "s", lambda it: it.all_train_s, digits=0),
    Row("lag of a change at rest, p50", "s", lambda it: quantile(it.probe_lags_s, 0.5), digits=2),
    Row("lag of a change at rest, p99", "s", lambda it: quantile(it.probe_lags_s, 0.99),
        "<= 2", lambda v: v <= 2, 2),
    Row("lag of a new job in the burst, p50", "s", lambda it: quantile(it.burst_lags_s, 0.5)),
    Row("lag of a new job in the burst, p99", "s", lambda it: quantile(it.burst_lags_s, 0.99)),
    Row("requests per job, creation", "", lambda it: _per_job(it, it.create_requests)),
    Row("requests per job and minute at rest", "", lambda it: it.rest_requests_per_job_minute,
        "about 0", lambda v: v <= 0.1, 3),
    Row("restart to steady", "s", lambda it: it.restart_s, "<= 60", lambda v: v <= 60, 0),
    Row("requests per job, restart", "", lambda it: _per_job(it, it.restart_requests)),
    Row("memory at rest", "MB", lambda it: it.rest_mb, digits=0),
    Row("memory, peak", "MB", lambda it: it.peak_mb, "<= 400", lambda v: v <= 400, 0),
    Row("CPU of a job's creation", "ms", lambda it: 1e3 * it.create_cpu_s / it.size["jobs"]),
    Row("CPU at rest", "of a core", lambda it: it.rest_core, digits=3),
    Row("CPU of a restart", "s", lambda it: it.restart_cpu_s, digits=0),
)  # fmt: skip


def _per_job(figures: Figures, requests: dict[str, int]) -> float:
    return sum(requests.values()) / figures.size["jobs"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1000, help="(1000)")
    parser.add_argument("--workers", type=int, default=5, help="of each job (5)")
    parser.add_argument("--runs", type=int, default=5, help="(5)")
    parser.add_argument("--probes", type=int, default=120, help="jobs that are changed (120)")
    parser.add_argument("--rest", type=float, default=65.0, help="idle seconds (65)")
    parser.add_argument("--baseline", metavar="COMMIT", help="measure its operator, too")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "scale", help="(runs/scale)")
    parser.add_argument("--picture", type=Path, help="draw the figure, as SVG")
    parser.add_argument("--kubeflow", action="store_true", help="measure Kubeflow Trainer, too")
    options = parser.parse_args()
    size = Size(
        options.jobs, options.workers, options.rest, options.probes, suspends=options.kubeflow
    )
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        found = _measured(options, size)
    except UnavailableError as error:
        sys.exit(f"scale: {error}\nComplete runs are kept in {options.out}: run it again.")
    print(_table(found))
    if options.picture is not None:
        from picture import draw

        draw({name: [each for each, _ in runs] for name, runs in found.items()}, options.picture)
        print(f"\n{options.picture}")
    (first, *_) = found.values()
    sys.exit(0 if all(_keeps(row, [each for each, _ in first]) for row in ROWS) else 1)


def _measured(options: argparse.Namespace, size: Size) -> dict[str, list[tuple[Figures, str]]]:
    """Return the runs of each operator, each with its commit or version."""
    operators: dict[str, Callable[[Size], Run]] = {"this tree": _of_this_tree}
    if options.baseline:
        operators[f"{options.baseline:.12}"] = lambda size: _of_commit(options.baseline, size)
    if options.kubeflow:
        operators["Kubeflow Trainer"] = _of_kubeflow
    found: dict[str, list[tuple[Figures, str]]] = {name: [] for name in operators}
    for number in range(options.runs):
        for name, runs in found.items():
            kept = options.out / f"{name.replace(' ', '-')}-{size.jobs}-{number}.json"
            if not kept.exists():
                print(f"{name}, {size.jobs} jobs of {size.workers} workers, run {number + 1}")
                run = operators[name](size)
                write_atomically(kept, json.dumps(run).encode(), mode=0o644)
            run = json.loads(kept.read_text())
            if (other := run["figures"]["size"]) != asdict(size):
                sys.exit(f"scale: {kept} has a run of another size, {other}: give another --out")
            runs.append((Figures(**run["figures"]), run["commit"]))
    return found


def _of_this_tree(size: Size) -> Run:
    figures = measure(size, code=_code(ROOT), definition=ROOT / "crds" / "dlionjob.yaml")
    return {"commit": commit(), "figures": asdict(figures)}


def _of_kubeflow(size: Size) -> Run:
    import kubeflow

    return {"commit": kubeflow.version(), "figures": asdict(kubeflow.measure(size))}


def _of_commit(baseline: str, size: Size) -> Run:
    with tempfile.TemporaryDirectory(prefix="dlion-baseline-") as folder:
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", baseline, *CODE, "crds"],
            capture_output=True,
            check=True,
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        definition = Path(folder) / "crds" / "dlionjob.yaml"
        figures = measure(size, code=_code(Path(folder)), definition=definition)
    return {"commit": baseline, "figures": asdict(figures)}


def _code(tree: Path) -> dict[str, str]:
    return {"PYTHONPATH": ":".join(str(tree / each) for each in CODE)}


def _keeps(row: Row, runs: list[Figures]) -> bool:
    return row.keeps(statistics.median(map(row.value, runs)))


def _table(found: dict[str, list[tuple[Figures, str]]]) -> str:
    lines = [
        f"| | bar | {' | '.join(found)} |",
        f"|---|---|{'---|' * len(found)}",
    ]
    for row in ROWS:
        cells = []
        for runs in found.values():
            values = [row.value(each) for each, _ in runs]
            middle, low, high = (
                f"{value:.{row.digits}f}"
                for value in (statistics.median(values), min(values), max(values))
            )
            cells.append(middle if low == high else f"{middle} ({low} to {high})")
        what = f"{row.what}{f', {row.unit}' if row.unit else ''}"
        lines.append(f"| {what} | {row.bar} | {' | '.join(cells)} |")
    for name, runs in found.items():
        commits = ", ".join(sorted({commit for _, commit in runs}))
        loads = [load for each, _ in runs for load in each.load_average]
        first = runs[0][0].size
        lines.append(
            f"\n{name} at {commits}; {len(runs)} runs of {first['jobs']} jobs with "
            f"{first['workers']} workers each; load average {min(loads):.1f} to {max(loads):.1f}"
        )
        for what, requests in (
            ("creation", runs[0][0].create_requests),
            ("rest", runs[0][0].rest_requests),
        ):
            most = "; ".join(f"{kind} {count}" for kind, count in list(requests.items())[:12])
            lines.append(f"- requests in {what}, first run: {most}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
