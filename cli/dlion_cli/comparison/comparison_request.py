"""Turns the options of `dlion compare` into a matrix of runs, and checks them before any run."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import click

from dlion_api.errors import Problem, SpecError
from dlion_api.spec import Job
from dlion_api.suggestions import did_you_mean
from dlion_cli.comparison.comparison_folder import reject_foreign_files
from dlion_cli.comparison.comparison_matrix import (
    MAX_NAME_BYTES,
    TUNING_SEED,
    Matrix,
    PlannedRun,
    Variant,
    is_valid_folder_name,
    separate_families,
)
from dlion_cli.inputs.downloads import fetch_downloads
from dlion_cli.inputs.manifests import apply_set, load_manifest
from dlion_cli.inputs.required_files import require_files
from dlion_cli.inputs.unreached import warn_unreached
from dlion_core.policies.catalogue import find, names
from dlion_environments.loading import load_environment
from dlion_environments.model import Environment
from dlion_results.comparison import Goal

IDEAL: Final = "ideal"

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class ComparisonRequest:
    """The options of the command."""

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
    tuning_seeds: int
    step_overhead_s: float | None
    calibration: Path | None


@dataclass
class ProblemCollector:
    """Collects the problems of several documents and options, each once."""

    problems: dict[Problem, str] = field(default_factory=dict)
    """The place of each problem's first occurrence."""

    def collect(
        self, place: str, make: Callable[P, T], *given: P.args, **named: P.kwargs
    ) -> T | None:
        """Call `make` and return its result, or None if it raises SpecError.

        `place` precedes the paths of its problems.
        """
        try:
            return make(*given, **named)
        except SpecError as error:
            for problem in error.problems:
                self.problems.setdefault(problem, place)
            return None

    def raise_if_any(self, source: str) -> None:
        """Raises: SpecError with all problems."""
        if self.problems:
            raise SpecError(
                [
                    replace(problem, path=f"{place}: {problem.path}" if place else problem.path)
                    for problem, place in self.problems.items()
                ],
                source=source,
            )


def build_matrix(request: ComparisonRequest) -> Matrix:
    """All requested runs.

    Raises: SpecError with every problem of manifest, target, policies, variants and environments;
    UsageError.
    """
    problems, source = ProblemCollector(), str(request.file)
    job = problems.collect("", _job, request, (), source)
    goal = None if job is None else problems.collect("", _goal, job, request)
    columns = [
        *(problems.collect("", _policy_variant, name, job) for name in request.policies),
        *(_variant(text, request, problems) for text in request.variants),
    ]
    environments = dict.fromkeys((*request.environments, request.tuned_in))
    for environment in environments:
        if environment is not None:
            problems.collect("", load_environment, environment)
    for problem in _folder_problems(columns, request):
        problems.problems.setdefault(problem, "")
    problems.raise_if_any(source)
    assert job is not None
    assert goal is not None
    rates = dict(request.rates)
    return Matrix(
        file=request.file,
        variants=separate_families([one for one in columns if one is not None], list(rates)),
        environments=request.environments,
        assignments=(
            *request.assignments,
            f"trainer.stop={{maxSeconds: {goal.at_s!r}}}",
            *_set_limits(request.assignments),
        ),
        seeds=tuple(range(1, request.seeds + 1)),
        learning_rates=rates.get("", (job.spec.trainer.optimizer.learning_rate,)),
        target_accuracy=goal.target_accuracy,
        seconds=goal.at_s,
        family_rates={name: own for name, own in rates.items() if name},
        tuned_in=_tuning_environment(request),
        tuning_seeds=tuple(range(TUNING_SEED, TUNING_SEED + request.tuning_seeds)),
        calibration=request.calibration,
        step_overhead_s=request.step_overhead_s,
    )


def check_matrix(
    matrix: Matrix, document: dict[str, Any], subject: str | None, *, out: Path, data_root: Path
) -> None:
    """Check each column's manifest in each environment, its files, and the content of `out`.

    Raises: SpecError with every problem, DataError, ProgramError, UsageError, and OSError or
    UnavailableError if a download fails.
    """
    _check_names(matrix, subject)
    problems, jobs = ProblemCollector(), {}
    for environment in dict.fromkeys((*matrix.tuning_environments(), *matrix.environments)):
        loaded = load_environment(environment)
        for variant in matrix.variants:
            for rate in matrix.learning_rate_grid(variant):
                one = PlannedRun(variant, environment, rate, 1)
                place = f"{variant.name} in {loaded.name}"
                job = problems.collect(place, _checked_job, one, matrix, document, loaded)
                if job is not None:
                    jobs[variant.name] = job
        warn_unreached(loaded, matrix.seconds)
    problems.raise_if_any(str(matrix.file))
    reject_foreign_files(out, matrix.folders(), matrix.aggregated_environments())
    for job in jobs.values():
        fetch_downloads(job)
    require_files(jobs, matrix.file, data_root)


def _checked_job(
    one: PlannedRun, matrix: Matrix, document: dict[str, Any], environment: Environment
) -> Job:
    """The job of that run. Raises: SpecError if it is invalid or does not fit the environment."""
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


def _job(request: ComparisonRequest, settings: Iterable[str], source: str) -> Job:
    document = apply_set(request.document, (*request.assignments, *settings))
    return load_manifest(document, source=source, lines=None)


def _set_limits(assignments: Iterable[str]) -> Iterable[str]:
    """Limits that `--set` gives all columns, as for equal samples. Those of the manifest are for
    one run, and would end the columns after different times."""
    paths = ("trainer.stop", "spec.trainer.stop")
    given = [each for each in assignments if each.lstrip().startswith(paths)]
    trainer = apply_set({"spec": {"trainer": {"stop": {}}}}, given)["spec"]["trainer"]
    for name, value in (trainer.get("stop") or {}).items():
        if name in {"maxEpochs", "maxSteps"}:
            yield f"trainer.stop.{name}={value}"


def _goal(job: Job, request: ComparisonRequest) -> Goal:
    """The target of the options, else of the manifest. Raises: SpecError if neither has one."""
    stop = job.spec.trainer.stop
    seconds = request.seconds or stop.max_seconds
    target_accuracy = request.target_accuracy or stop.target_accuracy
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
    """A column for a policy. The manifest's policy parameters apply only to the manifest's policy.

    Raises: SpecError if there is no such policy.
    """
    if name == IDEAL or (job is not None and name == job.spec.exchange.policy):
        return Variant(name, (), is_ideal=name == IDEAL, family=name)
    if name not in (known := (*names(), IDEAL)):
        advice = "Install the package of a custom policy."
        problem = Problem(
            "--policies",
            "there is no exchange policy of that name here",
            value=name,
            allowed=", ".join(known),
            advice=f"{did_you_mean(name, known)} {advice}".lstrip(),
        )
        raise SpecError([problem])
    find(name)
    weighting = ("exchange.weighting=dlion_ratio",) if name == "dlion-published" else ()
    bare = ("exchange.parameters={}", "exchange.residual=none", "exchange.propagation=all")
    return Variant(name, (f"exchange.policy={name}", *bare, *weighting), family=name)


def _variant(text: str, request: ComparisonRequest, problems: ProblemCollector) -> Variant | None:
    name, colon, settings = text.partition(":")
    if not colon or not name.strip() or "=" not in settings:
        raise click.UsageError(f"--variant {text!r}; allowed: NAME:PATH=VALUE[;PATH=VALUE…]")
    parts = tuple(part.strip() for part in settings.split(";") if part.strip())
    name = name.strip()
    source = f"--variant {name}"
    job = problems.collect(source, _job, request, parts, source)
    return None if job is None else Variant(name, parts, family=job.spec.exchange.policy)


def _folder_problems(
    columns: Sequence[Variant | None], request: ComparisonRequest
) -> Iterable[Problem]:
    """Columns and environments with names that are not valid folder names."""
    named = [("--variant", column.name) for column in columns if column is not None]
    named += [("--environment", Path(environment).stem) for environment in request.environments]
    if request.tuned_in is not None:
        named.append(("--tuned-in", Path(request.tuned_in).stem))
    for option, name in named:
        if not is_valid_folder_name(name):
            yield Problem(
                option,
                "is not a valid folder name, and a folder for its runs gets this name",
                value=name if len(name) <= MAX_NAME_BYTES else f"{name[:40]}…",
                allowed="letters, digits, ., _, +, = and - (all else becomes -), at most "
                f"{MAX_NAME_BYTES} bytes, and neither . nor ..",
                advice="Give it another name",
            )


def _tuning_environment(request: ComparisonRequest) -> str:
    """The environment for choosing all learning rates, as `environments` names it if it is there;
    empty: each for itself."""
    given = request.tuned_in
    if given is None:
        return ""
    places = {Path(one).resolve(): one for one in request.environments}
    return places.get(Path(given).resolve(), given)


def _check_names(matrix: Matrix, subject: str | None) -> None:
    """Raises: UsageError for unknown names, or if two columns would share a folder."""
    columns = [variant.name for variant in matrix.variants]
    if not columns:
        raise click.UsageError("nothing to compare: give --policies or --variant")
    for what, given in (("column", columns), ("environment", matrix.environments)):
        name, count = Counter(given).most_common(1)[0]
        if count > 1:
            raise click.UsageError(f"{what} {name!r} is given {count} times: give it once")
    if subject is not None and subject not in columns:
        raise click.UsageError(f"--against {subject!r}; allowed: {', '.join(columns)}")
    unused = set(matrix.family_rates) - {variant.family for variant in matrix.variants}
    if unused:
        known = dict.fromkeys((*(variant.family for variant in matrix.variants), *columns))
        raise click.UsageError(
            f"--learning-rates for {min(unused)!r}; columns, and policies without other rates: "
            f"{', '.join(known)}"
        )
    columns_run = {(one.environment, one.variant): one for one in matrix.planned_runs()}
    folders = Counter(one.folder.parent.parent for one in columns_run.values())
    duplicate, count = folders.most_common(1)[0]
    if count > 1:
        raise click.UsageError(
            f"two columns or environments would have the same folder, {duplicate}: give them "
            "other names"
        )
