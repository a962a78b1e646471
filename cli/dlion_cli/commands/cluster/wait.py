"""`dlion wait`: wait for a condition of jobs, for their end or for their deletion."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from dlion_api.errors import AbsentError
from dlion_api.exit_codes import ExitCode
from dlion_api.status_names import ConditionType, Reason
from dlion_api.suggestions import did_you_mean
from dlion_cli.cluster.cluster_jobs import JobClient
from dlion_cli.cluster.cluster_options import cluster_options, names_argument, wait_timeout
from dlion_cli.cluster.documents import mapping_of, mappings_in
from dlion_cli.views.job_status import JobStatus
from dlion_cli.views.job_updates import WaitTimeoutError, follow
from dlion_cli.views.job_watch import print_outcome

_STATES: Final = ("training", "ended")
_DELETE: Final = "delete"
_CONDITION: Final = "condition="
_STATUSES: Final = ("True", "False", "Unknown")
_TRAINS: Final = frozenset({Reason.TRAINING, Reason.PEERS_LOST, Reason.KEEPER_UNAVAILABLE})


@dataclass(frozen=True)
class WaitTarget:
    """What to wait for: a condition with a status, or one of the words."""

    text: str
    word: str = ""
    condition: str = ""
    status: str = "True"


class WaitTargetType(click.ParamType[WaitTarget]):
    """`delete`, `training`, `ended` or `condition=TYPE[=STATUS]`."""

    name = "target"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> WaitTarget:
        if isinstance(value, WaitTarget):
            return value
        given = str(value)
        if given.lower() in (_DELETE, *_STATES):
            return WaitTarget(given, word=given.lower())
        if not given.startswith(_CONDITION):
            allowed = ", ".join((*_STATES, _DELETE, f"{_CONDITION}TYPE[=STATUS]"))
            self.fail(f"{given!r}: allowed: {allowed}", param, ctx)
        type_, _, status = given.removeprefix(_CONDITION).partition("=")
        known = _spelt_as(type_, tuple(map(str, ConditionType)))
        if known is None:
            hint = did_you_mean(type_, map(str, ConditionType))
            message = f"{type_!r} is not a condition of a job. {hint}".rstrip()
            self.fail(f"{message} Allowed: {', '.join(ConditionType)}", param, ctx)
        state = _spelt_as(status or "True", _STATUSES)
        if state is None:
            self.fail(f"status {status!r}: allowed: {', '.join(_STATUSES)}", param, ctx)
        return WaitTarget(given, condition=known, status=state)

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002 - click's signature
        param: click.Parameter,  # noqa: ARG002 - click's signature
        incomplete: str,
    ) -> list[CompletionItem]:
        """The words, and all conditions."""
        words = [*_STATES, _DELETE, *(f"{_CONDITION}{type_}" for type_ in ConditionType)]
        return [CompletionItem(word) for word in words if word.startswith(incomplete)]


def _spelt_as(given: str, known: tuple[str, ...]) -> str | None:
    """The known spelling, whatever the case, as kubectl compares them."""
    return next((each for each in known if each.lower() == given.lower()), None)


@click.command()
@names_argument(required=True)
@click.option(
    "--for", "target", type=WaitTargetType(), default="ended", show_default=True, metavar="TARGET",
    help="ended, training, delete, or condition=TYPE[=STATUS].",
)  # fmt: skip
@wait_timeout
@cluster_options
def wait(
    jobs: JobClient, names: tuple[str, ...], target: WaitTarget, timeout_s: float | None
) -> int:
    """Wait until jobs NAME… are as --for requires; --timeout is for all of them together.

    With `ended`, and with `training` if the run fails first, the exit code is that of `dlion
    watch`. Otherwise: 0 jobs are as required; 124 they are not within --timeout; 69 a job does not
    exist or was deleted.

    \b
    dlion wait cifar10 && dlion fetch cifar10
    dlion wait cifar10 --for=condition=Degraded=False
    """
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    first_code = int(ExitCode.OK)
    for name in dict.fromkeys(names):
        left_s = None if deadline_s is None else max(0.001, deadline_s - time.monotonic())
        try:
            code = _wait_for(jobs, name, target, left_s)
        except WaitTimeoutError:
            click.echo(
                f"dlion: {name}: {target.text} was not reached within {timeout_s:g} s. "
                f"`dlion describe {name}` shows why",
                err=True,
            )
            code = ExitCode.DEADLINE
        first_code = first_code or code
    return first_code


def _wait_for(jobs: JobClient, name: str, target: WaitTarget, left_s: float | None) -> int:
    """Wait for one job; return its exit code. Raises: as `follow`."""

    def connection_lost(message: str) -> None:
        click.echo(f"dlion: connection lost, retrying: {message}", err=True)

    check: Callable[[JobStatus], int | None]
    if target.word == _DELETE:
        check = lambda _job: None  # noqa: E731 - no state of the job ends the wait
    elif target.word:
        check = lambda job: _reached(job, name, target.word)  # noqa: E731
    else:
        check = lambda job: _condition_met(job, name, target)  # noqa: E731
    try:
        for job in follow(jobs, name, timeout_s=left_s, on_disconnect=connection_lost):
            if (code := check(job)) is not None:
                return code
    except AbsentError:
        if target.word != _DELETE:
            raise
    if target.word == _DELETE:
        click.echo(f"dlionjob.dlion.dev/{name} condition met")
        return ExitCode.OK
    raise AbsentError(f"DLionJob {name!r} was deleted while waiting")


def _reached(job: JobStatus, name: str, word: str) -> int | None:
    """The exit code if the job has reached that state or ended; None: not yet."""
    outcome = job.outcome
    if outcome is not None:
        if word == "training" and outcome.type == ConditionType.SUCCEEDED:
            return _met(name)
        return print_outcome(name, outcome)
    ready = job.condition(ConditionType.READY)
    trains = ready is not None and ready.is_true and ready.reason in _TRAINS
    if word == "training" and trains and job.is_observed:
        return _met(name)
    return None


def _condition_met(job: JobStatus, name: str, target: WaitTarget) -> int | None:
    status = mapping_of(job.document.get("status"))
    generation = mapping_of(job.document.get("metadata")).get("generation")
    for condition in mappings_in(status.get("conditions")):
        if condition.get("type") != target.condition:
            continue
        observed = condition.get("observedGeneration")
        is_old = isinstance(observed, int) and isinstance(generation, int) and observed < generation
        if condition.get("status") == target.status and not is_old:
            return _met(name)
    return None


def _met(name: str) -> int:
    click.echo(f"dlionjob.dlion.dev/{name} condition met")
    return ExitCode.OK
