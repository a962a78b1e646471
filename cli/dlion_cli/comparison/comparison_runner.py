"""Runs the simulations of a comparison in processes and reads their figures.

Finished runs with the same settings are reused.
"""

import json
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import click
import yaml
from rich.console import Console

from dlion_api.atomic_file import write_atomically
from dlion_api.exit_codes import ExitCode
from dlion_api.protocol.progress import EventRecord
from dlion_api.reasons import EventReason
from dlion_api.status_names import ACCURACY
from dlion_cli.__main__ import main
from dlion_cli.comparison.child_processes import ChildProcesses, subprocess_error
from dlion_cli.comparison.comparison_folder import (
    DIVERGED,
    aggregate_environment_file,
    begin_run,
    end_run,
    is_done,
)
from dlion_cli.comparison.comparison_matrix import Matrix, PlannedRun
from dlion_cli.comparison.rate_search import RateSearch
from dlion_cli.comparison.run_identity import identity
from dlion_environments.aggregate_machine import single_machine_document
from dlion_environments.loading import load_environment
from dlion_results.comparison import VariantRow, VariantRun, diverged, variant_run
from dlion_results.summary.accuracy_name import accuracy_text


class ComparisonRunner:
    """Runs simulations below one folder, up to `jobs` at a time."""

    def __init__(self, out: Path, *, data_root: Path, jobs: int, console: Console) -> None:
        self._out, self._data_root = out, data_root
        self._jobs, self._console = jobs, console
        self._lock = threading.Lock()
        self._processes = ChildProcesses()
        self._finished_here: set[PlannedRun] = set()
        self._slow: set[tuple[str, str]] = set()
        """Columns and environments whose runs are shorter than an exchange."""
        self._done = self._count = 0

    def comparison_rows(self, matrix: Matrix) -> list[VariantRow]:
        """All rows, after choosing learning rates. Raises: SubprocessFailedError."""
        searches = self._choose_learning_rates(matrix)
        planned = [
            PlannedRun(variant, environment, rate, seed)
            for environment in matrix.environments
            for variant in matrix.variants
            for rate in [searches[matrix.tuning_environment(environment), variant.family].best]
            for seed in matrix.seeds
        ]
        figures = self._run_all(planned, matrix)
        rows: dict[tuple[str, str, float], list[VariantRun]] = {}
        for one in planned:
            place = Path(one.environment).stem, one.variant.name, one.learning_rate
            rows.setdefault(place, []).append(figures[one])
        return [VariantRow(*place, tuple(runs)) for place, runs in rows.items()]

    def _choose_learning_rates(self, matrix: Matrix) -> dict[tuple[str, str], RateSearch]:
        """The finished searches, by environment and family."""
        families = {variant.family: variant for variant in matrix.tuned_variants()}
        searches = {
            (environment, family): RateSearch(matrix.learning_rate_grid(variant))
            for environment in matrix.tuning_environments()
            for family, variant in families.items()
        }
        while wanted := {
            (environment, family, rate): matrix.tuning_runs(families[family], environment, rate)
            for (environment, family), search in searches.items()
            for rate in search.untried()
        }:
            figures = self._run_all([run for runs in wanted.values() for run in runs], matrix)
            for (environment, family, rate), runs in wanted.items():
                own = tuple(figures[run] for run in runs)
                searches[environment, family].record(VariantRow(environment, family, rate, own))
        for (environment, family), search in searches.items():
            if not search.is_bracketed:
                self._console.print(
                    f"{Path(environment).stem}: the best learning rate of {family},"
                    f" {search.best:g}, lies at the end of those tried",
                    highlight=False,
                )
        return searches

    def _run_all(
        self, planned: Sequence[PlannedRun], matrix: Matrix
    ) -> dict[PlannedRun, VariantRun]:
        """Run all; the first failure ends the others."""
        self._done, self._count = 0, len(planned)
        self._print_reused(planned, matrix)
        with ThreadPoolExecutor(self._jobs) as executor:
            try:
                running = {one: executor.submit(self._run_one, one, matrix) for one in planned}
                wait(running.values(), return_when=FIRST_EXCEPTION)
                for failed in (run for run in running.values() if run.done() and run.exception()):
                    failed.result()
                return {one: run.result() for one, run in running.items()}
            except BaseException:
                self._processes.terminate_all()
                executor.shutdown(cancel_futures=True)
                raise

    def _run_one(self, planned: PlannedRun, matrix: Matrix) -> VariantRun:
        from dlion_results.report.runs import load_run

        folder = self._out / planned.folder
        command = self.command(planned, matrix, folder)
        request = self._request_document(planned, matrix)
        if not is_done(folder, request):
            begin_run(folder, request)
            self._run(command, planned, folder)
            end_run(folder)
            self._finished_here.add(planned)
        if (folder / DIVERGED).exists():
            figures = diverged(planned.seed)
        else:
            run = load_run(folder, planned.variant.name)
            figures = variant_run(run, matrix.goal, seed=planned.seed)
            self._warn_of_slow_exchange(planned, run.tally.events)
        self._print_run(planned, figures)
        return figures

    def _request_document(self, planned: PlannedRun, matrix: Matrix) -> str:
        """The text stored beside a run that identifies its settings."""
        command = self.command(planned, matrix, self._out / planned.folder)
        return json.dumps(identity(command, planned, matrix), indent=2) + "\n"

    def command(self, planned: PlannedRun, matrix: Matrix, folder: Path) -> list[str]:
        """The arguments of `dlion` for a run with result folder `folder`."""
        settings = [word for one in planned.settings(matrix) for word in ("--set", one)]
        return [
            "simulate", str(matrix.file),
            "--environment", self._environment(planned, matrix), "--seed", str(planned.seed),
            "--threads", "1", "--no-report", "--out", str(folder),
            "--data-root", str(self._data_root), "-o", "json", *_cost_options(matrix), *settings,
        ]  # fmt: skip

    def _environment(self, planned: PlannedRun, matrix: Matrix) -> str:
        """The environment's name, or the file with its machines combined into one."""
        if not planned.variant.is_ideal:
            return planned.environment
        loaded = load_environment(planned.environment)
        document = single_machine_document(loaded, duration_s=matrix.seconds)
        path = aggregate_environment_file(self._out, planned.environment)
        text = yaml.safe_dump(document, sort_keys=False).encode()
        with self._lock:
            if not path.exists() or path.read_bytes() != text:
                write_atomically(path, text, mode=0o644)
        return str(path)

    def _run(self, command: list[str], planned: PlannedRun, folder: Path) -> None:
        """Raises: SubprocessFailedError if the run fails or ends early."""
        code, errors = self._processes.run(main, command)
        if code == ExitCode.DIVERGED:
            (folder / DIVERGED).write_text(f"{errors[-2000:]}\n")
        # A partial model is a result: the environment removed a worker under every policy.
        elif code not in (ExitCode.OK, ExitCode.PARTIAL):
            raise subprocess_error(str(planned.folder), code, errors)

    def _print_reused(self, planned: Sequence[PlannedRun], matrix: Matrix) -> None:
        reused = sum(
            is_done(self._out / one.folder, self._request_document(one, matrix))
            for one in planned
            if one not in self._finished_here
        )
        if planned:
            self._console.print(f"{reused} of {len(planned)} runs already exist")

    def _warn_of_slow_exchange(self, planned: PlannedRun, events: Iterable[EventRecord]) -> None:
        """Print once for each column and environment what its runs report before the first step."""
        place = planned.variant.name, Path(planned.environment).stem
        found = [each for each in events if each.reason == EventReason.EXCHANGE_TOO_LONG]
        with self._lock:
            is_new = bool(found) and place not in self._slow
            self._slow.update([place] if found else [])
        if is_new:
            click.echo(f"dlion: {' in '.join(place)}: {found[0].message}", err=True)

    def _print_run(self, planned: PlannedRun, figures: VariantRun) -> None:
        with self._lock:
            self._done += 1
            number = f"{self._done}/{self._count}"
        name = figures.accuracy_name
        accuracy = accuracy_text(figures.accuracy, name)
        if name != ACCURACY and figures.accuracy is not None:
            accuracy = f"{name} {accuracy}"
        accuracy = "diverged" if figures.diverged else accuracy
        accuracy += " (partial: its model lacks a worker)" if figures.partial else ""
        self._console.print(f"{number} {planned.folder}: {accuracy}", highlight=False)


def _cost_options(matrix: Matrix) -> list[str]:
    options = []
    if matrix.calibration is not None:
        options += ["--calibration", str(matrix.calibration)]
    if matrix.step_overhead_s is not None:
        options += ["--step-overhead", repr(matrix.step_overhead_s)]
    return options
