"""The columns, environments and runs of a comparison.

Created by `comparison_request`, run by `comparison_runner`. Does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from dlion_results.comparison import Goal

MAX_NAME_BYTES: Final = 200
"""Limit of folder names; file systems allow 255."""

TUNING_SEED: Final = 101
"""The first of the seeds that choose learning rates. Those of the figures are at most 100: a rate
must not owe its choice to the luck of a seed that is reported."""

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
    """A column: a name and its settings of the manifest."""

    name: str
    settings: tuple[str, ...]
    is_ideal: bool = False
    """One machine with the total compute of the environment and no network."""
    family: str = ""
    """Variants of a family (an exchange policy) share the learning rate of its first variant."""


def separate_families(variants: Sequence[Variant], named: Iterable[str]) -> tuple[Variant, ...]:
    """The variants; each named one that is not a family becomes its own family."""
    alone = set(named) - {variant.family for variant in variants}
    return tuple(
        replace(variant, family=variant.name) if variant.name in alone else variant
        for variant in variants
    )


@dataclass(frozen=True)
class Matrix:
    """Everything to compare."""

    file: Path
    variants: tuple[Variant, ...]
    environments: tuple[str, ...]
    assignments: tuple[str, ...]
    seeds: tuple[int, ...]
    learning_rates: tuple[float, ...]
    target_accuracy: float
    seconds: float
    family_rates: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Learning rates of families that have their own."""
    tuned_in: str = ""
    """The environment for choosing learning rates; empty: each environment has its own rates."""
    tuning_seeds: tuple[int, ...] = (TUNING_SEED,)
    calibration: Path | None = None
    """Costs of a step from `dlion calibrate`; None: those of the environments."""
    step_overhead_s: float | None = None
    """Fixed cost of a step; None: the calibration's, or 0."""

    @property
    def goal(self) -> Goal:
        """What the figures refer to."""
        return Goal(self.target_accuracy, self.seconds)

    def learning_rate_grid(self, variant: Variant) -> tuple[float, ...]:
        """The learning rates to try for the variant's family."""
        return self.family_rates.get(variant.family, self.learning_rates)

    def tuned_variants(self) -> list[Variant]:
        """The first variant of each family."""
        first: dict[str, Variant] = {}
        for variant in self.variants:
            first.setdefault(variant.family, variant)
        return list(first.values())

    def tuning_environment(self, environment: str) -> str:
        """The environment whose learning rates are used in `environment`."""
        return self.tuned_in or environment

    def tuning_environments(self) -> list[str]:
        return [self.tuned_in] if self.tuned_in else list(self.environments)

    def tuning_runs(self, variant: Variant, environment: str, rate: float) -> list[PlannedRun]:
        """The runs that judge a learning rate. They end at the target."""
        return [
            PlannedRun(variant, environment, rate, seed, is_tuning=True)
            for seed in self.tuning_seeds
        ]

    def planned_runs(self) -> list[PlannedRun]:
        """All runs with the given learning rates, each once."""
        tuning = [
            run
            for environment in self.tuning_environments()
            for variant in self.tuned_variants()
            for rate in self.learning_rate_grid(variant)
            if len(self.learning_rate_grid(variant)) > 1
            for run in self.tuning_runs(variant, environment, rate)
        ]
        compared = [
            PlannedRun(variant, environment, rate, seed)
            for environment in self.environments
            for variant in self.variants
            for rate in self.learning_rate_grid(variant)
            for seed in self.seeds
        ]
        return [*tuning, *compared]

    def folders(self) -> list[Path]:
        return [one.folder for one in self.planned_runs()]

    def aggregated_environments(self) -> list[str]:
        """Environments of ideal variants, whose machines are combined into one."""
        ideal = (one.environment for one in self.planned_runs() if one.variant.is_ideal)
        return list(dict.fromkeys(ideal))

    def run_count(self) -> int:
        """The number of runs, without further learning rates."""
        tuning = sum(one.is_tuning for one in self.planned_runs())
        return tuning + len(self.variants) * len(self.environments) * len(self.seeds)


@dataclass(frozen=True)
class PlannedRun:
    """One run."""

    variant: Variant
    environment: str
    learning_rate: float
    seed: int
    is_tuning: bool = False
    """Whether it judges the learning rate, and ends at the target."""

    def settings(self, matrix: Matrix) -> tuple[str, ...]:
        """All settings of the manifest."""
        one = _ONE_WORKER if self.variant.is_ideal else ()
        rate = f"trainer.optimizer.learningRate={self.learning_rate!r}"
        stop = f"trainer.stop.targetAccuracy={matrix.target_accuracy!r}"
        ending = (stop,) if self.is_tuning else ()
        return (*matrix.assignments, *ending, rate, *self.variant.settings, *one)

    @property
    def folder(self) -> Path:
        """Relative to the comparison's folder."""
        environment = Path(self.environment).stem
        rate = f"lr-{rate_name(self.learning_rate)}"
        return Path(*map(folder_name, (environment, self.variant.name, rate, f"seed-{self.seed}")))


def rate_name(rate: float) -> str:
    """The shortest exact text: different rates have different names.

    >>> [rate_name(rate) for rate in (0.05, 1e-7, 100.0, 0.12345671, 0.1 + 0.2)]
    ['0.05', '1e-07', '100', '0.12345671', '0.30000000000000004']
    """
    short = f"{rate:g}"
    return short if float(short) == rate else repr(rate)


def folder_name(name: str) -> str:
    """The name with invalid characters replaced by dashes.

    >>> folder_name("no transfer"), folder_name("a/../b")
    ('no-transfer', 'a-..-b')
    """
    return re.sub(r"[^\w.=+-]+", "-", name)


def is_valid_folder_name(name: str) -> bool:
    """Whether `folder_name` makes a usable folder name of it.

    >>> [is_valid_folder_name(name) for name in ("..", ".", "...", "a/b", "x" * 300)]
    [False, False, True, True, False]
    """
    made = folder_name(name)
    return made not in ("", ".", "..") and len(made.encode()) <= MAX_NAME_BYTES
