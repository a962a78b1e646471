"""What is asked of `dlion compare`, as a matrix of runs, or everything that is wrong with it.

Owns the columns that policies and variants come to, and every check that is made before a run
starts. Called by `compare`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import click

from dlion_api.errors import Problem, SpecError
from dlion_api.spec import Job
from dlion_cli.comparison_folder import refuse_foreign
from dlion_cli.comparison_matrix import (
    LONGEST_PART_BYTES,
    Matrix,
    Planned,
    Variant,
    by_themselves,
    names_a_folder,
)
from dlion_cli.manifests import apply_set, load_manifest
from dlion_cli.needed_files import refuse_without_files
from dlion_cli.run import tell_unreached
from dlion_worker.environments import Environment, load_environment
from dlion_worker.policies.catalogue import find, names
from dlion_worker.results.comparison import Goal

IDEAL: Final = "ideal"

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Wanted:
    """Columns, places and the goal, as they stand on the command line."""

    file: Path
    document: dict[str, Any]
    policies: tuple[str, ...]
    variants: tuple[str, ...]
    environments: tuple[str, ...]
    assignments: tuple[str, ...]
    seeds: int
    target_accuracy: float | None
    seconds: float | None
    rates: tuple[tuple[str, tuple[float, ...]], ...]
    tuned_in: str | None
    step_overhead_s: float | None
    calibration: Path | None


@dataclass
class Found:
    """Problems of several documents and options, each of them once."""

    problems: dict[Problem, str] = field(default_factory=dict)
    """And in whose manifest or option it was found first."""

    def of(self, place: str, make: Callable[P, T], *given: P.args, **named: P.kwargs) -> T | None:
        """What is made; None where that is a problem. `place`: goes before a problem's path."""
        try:
            return make(*given, **named)
        except SpecError as error:
            for problem in error.problems:
                self.problems.setdefault(problem, place)
            return None

    def refuse(self, source: str) -> None:
        """Raises: SpecError with all that was found."""
        if self.problems:
            raise SpecError(
                [
                    replace(problem, path=f"{place}: {problem.path}" if place else problem.path)
                    for problem, place in self.problems.items()
                ],
                source=source,
            )


def matrix_of(wanted: Wanted) -> Matrix:
    """All runs that are asked for. Raises: SpecError with every problem of manifest, goal,
    policies, variants and environments; UsageError."""
    found, source = Found(), str(wanted.file)
    job = found.of("", _job, wanted, (), source)
    goal = None if job is None else found.of("", _goal, job, wanted)
    columns = [
        *(found.of("", _policy_variant, name, job) for name in wanted.policies),
        *(_variant(text, wanted, found) for text in wanted.variants),
    ]
    environments = dict.fromkeys((*wanted.environments, wanted.tuned_in))
    for environment in environments:
        if environment is not None:
            found.of("", load_environment, environment)
    for problem in _folder_problems(columns, wanted):
        found.problems.setdefault(problem, "")
    found.refuse(source)
    assert job is not None
    assert goal is not None
    rates = dict(wanted.rates)
    return Matrix(
        file=wanted.file,
        variants=by_themselves([one for one in columns if one is not None], list(rates)),
        environments=wanted.environments,
        assignments=(*wanted.assignments, f"trainer.stop={{maxSeconds: {goal.at_s!r}}}"),
        seeds=tuple(range(1, wanted.seeds + 1)),
        learning_rates=rates.get("", (job.spec.trainer.optimizer.learning_rate,)),
        target_accuracy=goal.target_accuracy,
        seconds=goal.at_s,
        family_rates={name: own for name, own in rates.items() if name},
        tuned_in=_tuned_in(wanted),
        calibration=wanted.calibration,
        step_overhead_s=wanted.step_overhead_s,
    )


def check(
    matrix: Matrix, document: dict[str, Any], held: str | None, *, out: Path, data_root: Path
) -> None:
    """Every column fits its manifest and every environment the job, its files are there, and
    nothing in `out` is in the way, before anything is run.

    Raises: SpecError with every problem, DataError, ProgramError, UsageError.
    """
    _check_names(matrix, held)
    found, jobs = Found(), {}
    for environment in dict.fromkeys((matrix.tuned_in, *matrix.environments)):
        loaded = load_environment(environment)
        for variant in matrix.variants:
            for rate in matrix.grid(variant):
                one = Planned(variant, environment, rate, 1)
                place = f"{variant.name} in {loaded.name}"
                job = found.of(place, _fitting, one, matrix, document, loaded)
                if job is not None:
                    jobs[variant.name] = job
        tell_unreached(loaded, matrix.seconds)
    found.refuse(str(matrix.file))
    refuse_foreign(out, matrix.folders(), matrix.as_one())
    refuse_without_files(jobs, matrix.file, data_root)


def _fitting(
    one: Planned, matrix: Matrix, document: dict[str, Any], environment: Environment
) -> Job:
    """The job of that run. Raises: SpecError where it, or the environment for it, is wrong."""
    source = str(matrix.file)
    job = load_manifest(apply_set(document, one.settings(matrix)), source=source, lines=None)
    if not one.variant.is_ideal:
        environment.plan(
            job.workers(),
            machine_cores=None,
            duration_s=job.spec.trainer.stop.max_seconds,
            source=source,
        )
        environment.check(job, source=source)
    return job


def _job(wanted: Wanted, settings: Iterable[str], source: str) -> Job:
    document = apply_set(wanted.document, (*wanted.assignments, *settings))
    return load_manifest(document, source=source, lines=None)


def _goal(job: Job, wanted: Wanted) -> Goal:
    """As asked for, else the manifest's. Raises: SpecError where neither says it."""
    stop = job.spec.trainer.stop
    seconds = wanted.seconds or stop.max_seconds
    target_accuracy = wanted.target_accuracy or stop.target_accuracy
    problems = [
        Problem(f"spec.trainer.stop.{path}", "is not given", advice=f"Give {flag}")
        for value, flag, path in (
            (seconds, "--seconds", "maxSeconds"),
            (target_accuracy, "--target-accuracy", "targetAccuracy"),
        )
        if value is None
    ]
    if problems:
        raise SpecError(problems)
    return Goal(float(target_accuracy or 0), float(seconds or 0))


def _policy_variant(name: str, job: Job | None) -> Variant:
    """A column for a policy; what the manifest says of its own policy holds for that one.

    Raises: SpecError where there is no such policy.
    """
    if name == IDEAL or (job is not None and name == job.spec.exchange.policy):
        return Variant(name, (), is_ideal=name == IDEAL, family=name)
    if name not in names():
        problem = Problem(
            "--policies",
            "there is no exchange policy of that name here",
            value=name,
            allowed=", ".join((*names(), IDEAL)),
            advice="A policy of your own is installed with its package.",
        )
        raise SpecError([problem])
    find(name)
    weighting = ("exchange.weighting=dlion_ratio",) if name == "dlion-published" else ()
    bare = ("exchange.parameters={}", "exchange.residual=none", "exchange.propagation=all")
    return Variant(name, (f"exchange.policy={name}", *bare, *weighting), family=name)


def _variant(text: str, wanted: Wanted, found: Found) -> Variant | None:
    name, colon, settings = text.partition(":")
    if not colon or not name.strip() or "=" not in settings:
        raise click.UsageError(f"--variant {text!r}; allowed: NAME:PATH=VALUE[;PATH=VALUE…]")
    parts = tuple(part.strip() for part in settings.split(";") if part.strip())
    name = name.strip()
    source = f"--variant {name}"
    job = found.of(source, _job, wanted, parts, source)
    return None if job is None else Variant(name, parts, family=job.spec.exchange.policy)


def _folder_problems(columns: Sequence[Variant | None], wanted: Wanted) -> Iterable[Problem]:
    """Runs of a column, or of an environment, lie in a folder of its name."""
    named = [("--variant", column.name) for column in columns if column is not None]
    named += [("--environment", Path(environment).stem) for environment in wanted.environments]
    if wanted.tuned_in is not None:
        named.append(("--tuned-in", Path(wanted.tuned_in).stem))
    for option, name in named:
        if not names_a_folder(name):
            yield Problem(
                option,
                "a folder is named so, in which its runs lie",
                value=name if len(name) <= LONGEST_PART_BYTES else f"{name[:40]}…",
                allowed="letters, digits, ., _, +, = and - (all else becomes -), at most "
                f"{LONGEST_PART_BYTES} bytes, and not just . or two of them",
                advice="Give it another name",
            )


def _tuned_in(wanted: Wanted) -> str:
    """As it is spelled among the environments, where it is one of them."""
    given = wanted.tuned_in or wanted.environments[0]
    places = {Path(one).resolve(): one for one in wanted.environments}
    return places.get(Path(given).resolve(), given)


def _check_names(matrix: Matrix, held: str | None) -> None:
    """Raises: UsageError where an option names what there is not, or a folder would be two's."""
    columns = [variant.name for variant in matrix.variants]
    if not columns:
        raise click.UsageError("nothing to compare: give --policies or --variant")
    if held is not None and held not in columns:
        raise click.UsageError(f"--against {held!r}; allowed: {', '.join(columns)}")
    unused = set(matrix.family_rates) - {variant.family for variant in matrix.variants}
    if unused:
        known = dict.fromkeys((*(variant.family for variant in matrix.variants), *columns))
        raise click.UsageError(
            f"--learning-rates for {min(unused)!r}; columns and their policies that have no "
            f"other rates of their own: {', '.join(known)}"
        )
    compared = [
        Planned(variant, environment, 0.0, 1).folder
        for environment in matrix.environments
        for variant in matrix.variants
    ]
    for folders in (compared, matrix.folders()):
        if len(set(folders)) < len(folders):
            twice, _ = Counter(folders).most_common(1)[0]
            raise click.UsageError(
                "two columns or environments would have the same folder, "
                f"{twice.parent.parent}: give them other names"
            )
