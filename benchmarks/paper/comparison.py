"""One comparison of the paper, and the arguments with which `dlion compare` runs it.

It owns the folder of manifests and environments. published.py defines the comparisons.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

HERE = Path(os.path.relpath(Path(__file__).resolve().parent))
"""Relative, so that runs resume in another checkout."""
CIFAR10, SLIDES, MNIST = (HERE / f"{name}.yaml" for name in ("cifar10", "slides", "mnist"))
DECODED: Mapping[Path, str] = {CIFAR10: "cifar10", SLIDES: "cifar10", MNIST: "mnist"}
"""Data sets of manifests whose images run.py decodes into arrays once, instead of each of hundreds
of runs."""
ENVIRONMENTS = HERE / "environments"

Grids: TypeAlias = "Mapping[str, tuple[float, ...]]"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One call of `dlion compare`."""

    part: str
    name: str
    file: Path
    columns: Mapping[str, str]
    """Settings of each, separated by semicolons."""
    environments: tuple[str, ...]
    target: float
    seconds: int
    """Virtual seconds."""
    grids: Grids
    held: str
    """The column that is compared with the others."""
    settings: tuple[str, ...] = ()
    """Settings of all columns."""
    with_ideal: bool = False
    tuned_in: str = ""
    """The environment whose rates are used in all; empty: each has its own."""
    workers: int = 6
    batch: int = 192
    """Samples of all workers in an iteration, at the start."""

    @property
    def has_server(self) -> bool:
        """Report whether a worker has the server's role; others then send only to it."""
        return all("server: 0" in one or "=fedat" in one for one in self.columns.values())

    def family(self, column: str) -> str:
        """Return the columns with one learning rate: of one exchange policy, or one alone."""
        policy = re.search(r"exchange\.policy=([\w-]+)", self.columns.get(column, ""))
        return column if column in self.grids or policy is None else policy[1]

    def arguments(self, *, seeds: int, scale: float, out: Path, data: Path) -> list[str]:
        """Return the arguments of `dlion compare`."""
        words = [str(self.file), "--policies", "ideal" if self.with_ideal else ""]
        for name, settings in self.columns.items():
            words += ["--variant", f"{name}:{settings}"]
        for name in self.environments:
            words += ["--environment", environment(name)]
        for family, rates in self.grids.items():
            words += ["--learning-rates", f"{family}:{','.join(map(str, rates))}"]
        for setting in (*self.settings, *decoded_settings(self.file)):
            words += ["--set", setting]
        if self.tuned_in:
            words += ["--tuned-in", environment(self.tuned_in)]
        words += ["--target-accuracy", str(self.target), "--seeds", str(seeds)]
        words += ["--seconds", str(scaled_seconds(self.seconds, scale)), "--against", self.held]
        if scale < 1:  # otherwise a short run has almost no evaluation
            every = scaled_evaluation(scale)
            words += ["--set", f"trainer.evaluation.everySamples={every}"]
        return [*words, "--out", str(out), "--data-root", str(data)]


def decoded_settings(file: Path) -> tuple[str, ...]:
    """Return the settings for a manifest's decoded images, if it has any."""
    if file not in DECODED:
        return ()
    folder = f"trainer.dataset.{{}}={DECODED[file]}"
    train, test = folder.format("path"), folder.format("evaluationPath")
    return ("trainer.dataset.format=npz", f"{train}/train.npz", f"{test}/test.npz")


def scaled_seconds(seconds: int, scale: float) -> int:
    """Return the virtual seconds of a run at that scale."""
    return max(1, round(seconds * scale))


def scaled_evaluation(scale: float) -> int:
    """Return the samples between two evaluations at a scale below 1."""
    return max(100, round(4000 * scale))


def environment(name: str) -> str:
    """Return a published environment by its name, another one by its file."""
    own = ENVIRONMENTS / f"{name}.yaml"
    return str(own) if own.exists() else name
