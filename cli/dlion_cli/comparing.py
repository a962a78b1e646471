"""The runs of a comparison: planned, carried out in processes, taken up again, read.

Called by `compare`. A run that is there already, finished and started with the same settings, is
not run again.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from dlion_api.atomic_file import write_atomically
from dlion_api.document import to_document
from dlion_api.errors import DLionError
from dlion_api.exit_codes import ExitCode
from dlion_cli.manifests import apply_set, load_manifest, read_document
from dlion_cli.run import program_root_of
from dlion_worker.environments import as_one_machine, load_environment
from dlion_worker.results.comparison import Figures, Goal, Row, better, diverged, figures_of
from dlion_worker.results.folder import SUMMARY

if TYPE_CHECKING:
    from rich.console import Console

ASKED = "compared.json"
DIVERGED = "diverged.txt"
"""In the folder of a run that diverged: what it said. It is not run again."""

_ONE_WORKER = (
    "sites=[{name: ideal, groups: [{name: all, workers: 1}]}]",
    "minSites=1",
    "exchange.policy=none",
    "exchange.parameters={}",
    "exchange.residual=none",
    "exchange.topology=allToAll",
    "exchange.degree=null",
    "exchange.propagation=all",
    "trainer.dataset.partition=iid",
    "trainer.dataset.siteClasses=[]",
    "batching.policy=even",
    "synchronization.mode=bounded",
    "synchronization.backupWorkers=0",
)


@dataclass(frozen=True)
class Variant:
    """One column: a name and what of the manifest it changes."""

    name: str
    settings: tuple[str, ...]
    is_ideal: bool = False
    """One machine with the summed compute of the environment, and no network."""
    family: str = ""
    """Variants of one family (an exchange policy) train at the learning rate of its first."""


def by_themselves(variants: Sequence[Variant], named: Iterable[str]) -> tuple[Variant, ...]:
    """The variants; of those names that are no family's, each the only one of its own."""
    alone = set(named) - {variant.family for variant in variants}
    return tuple(
        replace(variant, family=variant.name) if variant.name in alone else variant
        for variant in variants
    )


@dataclass(frozen=True)
class Matrix:
    """Everything that is compared."""

    file: Path
    variants: tuple[Variant, ...]
    environments: tuple[str, ...]
    assignments: tuple[str, ...]
    seeds: tuple[int, ...]
    learning_rates: tuple[float, ...]
    target_accuracy: float
    seconds: float
    family_rates: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Grids of families that have their own."""
    tuned_in: str = ""
    """The environment in which learning rates are chosen; empty: the first."""
    calibration: Path | None = None
    """What a step costs, as `dlion calibrate` measured it; None: what the environments say."""
    step_overhead_s: float | None = None
    """What a step costs beside its samples; None: nothing, or what the calibration says."""

    @property
    def goal(self) -> Goal:
        """What is read off the runs."""
        return Goal(self.target_accuracy, self.seconds)

    def grid(self, variant: Variant) -> tuple[float, ...]:
        """Learning rates that are tried for its family."""
        return self.family_rates.get(variant.family, self.learning_rates)

    def tuned(self) -> list[Variant]:
        """The first variant of each family: those on which learning rates are tried."""
        first: dict[str, Variant] = {}
        for variant in self.variants:
            first.setdefault(variant.family, variant)
        return list(first.values())

    def tuning(self) -> list[Planned]:
        """The runs by which learning rates are chosen; none where there is no choice."""
        environment = self.tuned_in or self.environments[0]
        return [
            Planned(variant, environment, rate, self.seeds[0])
            for variant in self.tuned()
            for rate in self.grid(variant)
            if len(self.grid(variant)) > 1
        ]

    def run_count(self) -> int:
        """Runs at most: where a rate was tried and taken, its run counts in the table as well."""
        return len(self.tuning()) + len(self.variants) * len(self.environments) * len(self.seeds)


@dataclass(frozen=True)
class Planned:
    """One run."""

    variant: Variant
    environment: str
    learning_rate: float
    seed: int

    def settings(self, matrix: Matrix) -> tuple[str, ...]:
        """What is set in the manifest."""
        one = _ONE_WORKER if self.variant.is_ideal else ()
        rate = f"trainer.optimizer.learningRate={self.learning_rate!r}"
        return (*matrix.assignments, rate, *self.variant.settings, *one)

    @property
    def folder(self) -> Path:
        """Within the comparison's folder."""
        environment = Path(self.environment).stem
        parts = (environment, self.variant.name, f"lr-{self.learning_rate:g}", f"seed-{self.seed}")
        return Path(*(re.sub(r"[^\w.=+-]+", "-", part) for part in parts))


class Runs:
    """Carries runs out, so many at a time, below one folder."""

    def __init__(self, out: Path, *, data_root: Path, jobs: int, console: Console) -> None:
        self._out, self._data_root = out, data_root
        self._jobs, self._console = jobs, console
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[bytes]] = set()
        self._given_up = False
        self._done = self._count = 0

    def compared(self, matrix: Matrix) -> list[Row]:
        """All rows, learning rates chosen first. Raises: DLionError where a run fails."""
        self._out.mkdir(parents=True, exist_ok=True)
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
        with ThreadPoolExecutor(self._jobs) as executor:
            try:
                running = {one: executor.submit(self._one, one, matrix) for one in planned}
                wait(running.values(), return_when=FIRST_EXCEPTION)
                for failed in (run for run in running.values() if run.done() and run.exception()):
                    failed.result()
                return {one: run.result() for one, run in running.items()}
            except BaseException:
                self._give_up()
                executor.shutdown(cancel_futures=True)
                raise

    def _give_up(self) -> None:
        """Ends what is running; nothing new begins."""
        with self._lock:
            self._given_up = True
            children = list(self._children)
        for child in children:
            child.terminate()

    def _one(self, planned: Planned, matrix: Matrix) -> Figures:
        from dlion_worker.results.report.runs import load_run

        folder = self._out / planned.folder
        command = self.command(planned, matrix, folder)
        asked = json.dumps(identity(command, planned, matrix), indent=2) + "\n"
        if not _is_done(folder, asked):
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            self._run(command, planned, folder)
            (folder / ASKED).write_text(asked)
        if (folder / DIVERGED).exists():
            figures = diverged(planned.seed)
        else:
            run = load_run(folder, planned.variant.name)
            figures = figures_of(run, matrix.goal, seed=planned.seed)
        self._tell(planned, figures)
        return figures

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
        path = self._out / f"{Path(planned.environment).stem}-as-one.yaml"
        text = yaml.safe_dump(document, sort_keys=False).encode()
        with self._lock:
            if not path.exists() or path.read_bytes() != text:
                write_atomically(path, text, mode=0o644)
        return str(path)

    def _run(self, command: list[str], planned: Planned, folder: Path) -> None:
        with self._lock:
            if self._given_up:
                raise DLionError("given up")
            child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            self._children.add(child)
        try:
            _, said = child.communicate()
        finally:
            with self._lock:
                self._children.discard(child)
        words = said.decode(errors="replace").strip()
        if child.returncode == ExitCode.DIVERGED:
            (folder / DIVERGED).write_text(f"{words[-2000:]}\n")
        elif child.returncode:
            raise DLionError(f"{planned.folder}: the run failed: {words[-2000:]}")

    def _tell(self, planned: Planned, figures: Figures) -> None:
        with self._lock:
            self._done += 1
            number = f"{self._done}/{self._count}"
        accuracy = "—" if figures.accuracy is None else f"{figures.accuracy:.1%}"
        accuracy = "diverged" if figures.diverged else accuracy
        self._console.print(f"{number} {planned.folder}: {accuracy}", highlight=False)


def _costs(matrix: Matrix) -> list[str]:
    """What of a step's costs is given on to the simulation."""
    words = []
    if matrix.calibration is not None:
        words += ["--calibration", str(matrix.calibration)]
    if matrix.step_overhead_s is not None:
        words += ["--step-overhead", repr(matrix.step_overhead_s)]
    return words


def identity(command: Iterable[str], planned: Planned, matrix: Matrix) -> dict[str, object]:
    """What a run was asked for: its command, and the files behind it as they then were."""
    environment = json.dumps(to_document(load_environment(planned.environment)), sort_keys=True)
    files = {
        "manifest": [matrix.file],
        "program": program_files(planned, matrix),
        "calibration": [] if matrix.calibration is None else [matrix.calibration],
    }
    return {
        "command": list(command)[1:],
        "environment": hashlib.sha256(environment.encode()).hexdigest(),
        "dlion": version("dlion"),
        **{name: _hash(paths) for name, paths in files.items() if paths},
    }


def program_files(planned: Planned, matrix: Matrix) -> list[Path]:
    """The run's own program, first, and the Python files beside it, which it may import.

    None for a built-in program. Raises: SpecError where the manifest is no longer one.
    """
    document, _ = read_document(matrix.file)
    source = f"{matrix.file}, {planned.variant.name}"
    job = load_manifest(apply_set(document, planned.settings(matrix)), source=source, lines=None)
    if not job.spec.trainer.program.file:
        return []
    program = program_root_of(job, matrix.file, None) / job.spec.trainer.program.file
    beside = (path for path in sorted(program.parent.glob("*.py")) if path != program)
    return [path for path in (program, *beside) if path.is_file()]


def _hash(paths: Iterable[Path]) -> str:
    """Of the names and contents of files."""
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _is_done(folder: Path, asked: str) -> bool:
    try:
        if (folder / ASKED).read_text() != asked:
            return False
        summary = json.loads((folder / SUMMARY).read_text())
        return (folder / DIVERGED).exists() or summary["ending"]["succeeded"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False
