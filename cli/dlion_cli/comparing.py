"""The runs of a comparison: carried out in processes, taken up again, read.

Called by `compare`. A run that is there already, finished and started with the same settings, is
not run again.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from dlion_api.atomic_file import write_atomically
from dlion_api.exit_codes import ExitCode
from dlion_cli.comparison_folder import DIVERGED, as_one_file, begin, end, is_done
from dlion_cli.comparison_matrix import Matrix, Planned
from dlion_cli.run_identity import identity
from dlion_cli.side_by_side import Processes, failure
from dlion_worker.environments import as_one_machine, load_environment
from dlion_worker.results.comparison import Figures, Row, better, diverged, figures_of

if TYPE_CHECKING:
    from rich.console import Console


class Runs:
    """Carries runs out, so many at a time, below one folder."""

    def __init__(self, out: Path, *, data_root: Path, jobs: int, console: Console) -> None:
        self._out, self._data_root = out, data_root
        self._jobs, self._console = jobs, console
        self._lock = threading.Lock()
        self._processes = Processes()
        self._made: set[Planned] = set()
        self._done = self._count = 0

    def compared(self, matrix: Matrix) -> list[Row]:
        """All rows, learning rates chosen first. Raises: EndedError where a run fails."""
        rates = self._chosen_rates(matrix)
        planned = [
            Planned(variant, environment, rates[variant.name], seed)
            for environment in matrix.environments
            for variant in matrix.variants
            for seed in matrix.seeds
        ]
        figures = self._all(planned, matrix)
        return [
            Row(
                Path(environment).stem,
                variant.name,
                rates[variant.name],
                tuple(
                    figures[one]
                    for one in planned
                    if one.environment == environment and one.variant == variant
                ),
            )
            for environment in matrix.environments
            for variant in matrix.variants
        ]

    def _chosen_rates(self, matrix: Matrix) -> dict[str, float]:
        """For each column the learning rate that does best for its family with the first seed."""
        planned = matrix.tuning()
        figures = self._all(planned, matrix)
        best: dict[str, Row] = {}
        for one in planned:
            row = Row(one.environment, one.variant.name, one.learning_rate, (figures[one],))
            family = one.variant.family
            if family not in best or better(row, best[family]):
                best[family] = row
        return {
            variant.name: best[variant.family].learning_rate
            if variant.family in best
            else matrix.grid(variant)[0]
            for variant in matrix.variants
        }

    def _all(self, planned: Sequence[Planned], matrix: Matrix) -> dict[Planned, Figures]:
        """All runs; the first failure ends the others."""
        self._done, self._count = 0, len(planned)
        self._tell_taken(planned, matrix)
        with ThreadPoolExecutor(self._jobs) as executor:
            try:
                running = {one: executor.submit(self._one, one, matrix) for one in planned}
                wait(running.values(), return_when=FIRST_EXCEPTION)
                for failed in (run for run in running.values() if run.done() and run.exception()):
                    failed.result()
                return {one: run.result() for one, run in running.items()}
            except BaseException:
                self._processes.give_up()
                executor.shutdown(cancel_futures=True)
                raise

    def _one(self, planned: Planned, matrix: Matrix) -> Figures:
        from dlion_worker.results.report.runs import load_run

        folder = self._out / planned.folder
        command = self.command(planned, matrix, folder)
        asked = self._asked(planned, matrix)
        if not is_done(folder, asked):
            begin(folder, asked)
            self._run(command, planned, folder)
            end(folder)
            self._made.add(planned)
        if (folder / DIVERGED).exists():
            figures = diverged(planned.seed)
        else:
            run = load_run(folder, planned.variant.name)
            figures = figures_of(run, matrix.goal, seed=planned.seed)
        self._tell(planned, figures)
        return figures

    def _asked(self, planned: Planned, matrix: Matrix) -> str:
        """What is kept beside a run, by which it is known for what it was asked for."""
        command = self.command(planned, matrix, self._out / planned.folder)
        return json.dumps(identity(command, planned, matrix), indent=2) + "\n"

    def command(self, planned: Planned, matrix: Matrix, folder: Path) -> list[str]:
        """What is started for a run, whose result folder becomes `folder`."""
        settings = [word for one in planned.settings(matrix) for word in ("--set", one)]
        return [
            sys.executable, "-m", "dlion_cli", "simulate", str(matrix.file),
            "--environment", self._environment(planned, matrix), "--seed", str(planned.seed),
            "--threads", "1", "--no-report", "--out", str(folder),
            "--data-root", str(self._data_root), "-o", "json", *_costs(matrix), *settings,
        ]  # fmt: skip

    def _environment(self, planned: Planned, matrix: Matrix) -> str:
        """By name, or the file of the one machine that has it all."""
        if not planned.variant.is_ideal:
            return planned.environment
        loaded = load_environment(planned.environment)
        document = as_one_machine(loaded, duration_s=matrix.seconds)
        path = as_one_file(self._out, planned.environment)
        text = yaml.safe_dump(document, sort_keys=False).encode()
        with self._lock:
            if not path.exists() or path.read_bytes() != text:
                write_atomically(path, text, mode=0o644)
        return str(path)

    def _run(self, command: list[str], planned: Planned, folder: Path) -> None:
        """One whose model lacks a worker that the environment took away for good counts: so it
        is under every policy there. One that ended early has no figures at its end.

        Raises: EndedError with the run's own words where it fails, or ended early.
        """
        code, said = self._processes.run(command)
        if code == ExitCode.DIVERGED:
            (folder / DIVERGED).write_text(f"{said[-2000:]}\n")
        elif code not in (ExitCode.OK, ExitCode.PARTIAL):
            raise failure(str(planned.folder), code, said)

    def _tell_taken(self, planned: Sequence[Planned], matrix: Matrix) -> None:
        """How many of these are from before, and not run again."""
        there = sum(
            is_done(self._out / one.folder, self._asked(one, matrix))
            for one in planned
            if one not in self._made
        )
        if planned:
            self._console.print(f"{there} of {len(planned)} runs are there already")

    def _tell(self, planned: Planned, figures: Figures) -> None:
        with self._lock:
            self._done += 1
            number = f"{self._done}/{self._count}"
        accuracy = "—" if figures.accuracy is None else f"{figures.accuracy:.1%}"
        accuracy = "diverged" if figures.diverged else accuracy
        accuracy += " (partial: its model lacks a worker)" if figures.partial else ""
        self._console.print(f"{number} {planned.folder}: {accuracy}", highlight=False)


def _costs(matrix: Matrix) -> list[str]:
    """What of a step's costs is given on to the simulation."""
    words = []
    if matrix.calibration is not None:
        words += ["--calibration", str(matrix.calibration)]
    if matrix.step_overhead_s is not None:
        words += ["--step-overhead", repr(matrix.step_overhead_s)]
    return words
