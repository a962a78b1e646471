"""What a comparison consists of: its columns, its environments and the runs that follow from them.

Made by `compare` of what is asked for; carried out by `comparing`. Runs and reads nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from dlion_worker.results.comparison import Goal

LONGEST_PART_BYTES: Final = 200
"""Of a folder's name that is made of a column's; file systems take 255."""

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

    def possible(self) -> list[Planned]:
        """All runs that there may be, whichever learning rates are chosen; each of them once."""
        compared = [
            Planned(variant, environment, rate, seed)
            for environment in self.environments
            for variant in self.variants
            for rate in self.grid(variant)
            for seed in self.seeds
        ]
        return list(dict.fromkeys((*self.tuning(), *compared)))

    def folders(self) -> list[Path]:
        """Of all runs that there may be."""
        return [one.folder for one in self.possible()]

    def as_one(self) -> list[str]:
        """Environments whose machines are put together as one, in a file of its own."""
        ideal = (one.environment for one in self.possible() if one.variant.is_ideal)
        return list(dict.fromkeys(ideal))

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
        rate = f"lr-{rate_name(self.learning_rate)}"
        return Path(*map(folder_name, (environment, self.variant.name, rate, f"seed-{self.seed}")))


def rate_name(rate: float) -> str:
    """Short where that says it exactly: different rates have different names.

    >>> [rate_name(rate) for rate in (0.05, 1e-7, 100.0, 0.12345671, 0.1 + 0.2)]
    ['0.05', '1e-07', '100', '0.12345671', '0.30000000000000004']
    """
    short = f"{rate:g}"
    return short if float(short) == rate else repr(rate)


def folder_name(name: str) -> str:
    """The name as a folder's: what may not stand in one becomes a dash.

    >>> folder_name("no transfer"), folder_name("a/../b")
    ('no-transfer', 'a-..-b')
    """
    return re.sub(r"[^\w.=+-]+", "-", name)


def names_a_folder(name: str) -> bool:
    """Whether `folder_name` makes the name of a folder of its own out of it.

    >>> [names_a_folder(name) for name in ("..", ".", "...", "a/b", "x" * 300)]
    [False, False, True, True, False]
    """
    made = folder_name(name)
    return made not in ("", ".", "..") and len(made.encode()) <= LONGEST_PART_BYTES
