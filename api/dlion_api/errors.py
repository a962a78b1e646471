"""The hierarchy of errors. The class determines whether a retry can help.

Messages state what happened, to which object, the given and the allowed values, and what to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dlion_api.exit_codes import ExitCode


class DLionError(Exception):
    """Base class of DLion's errors."""

    exit_code = ExitCode.FAILED
    """Exit code of a process that ends with this error."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a document.

    `path` is dotted with indices (`spec.sites[0].groups[1].workers`). `value` is the given value in
    the user's notation, `allowed` the allowed values, `advice` what to do next. `line` counts from
    1; None: unknown.
    """

    path: str
    message: str
    value: str = ""
    allowed: str = ""
    advice: str = ""
    line: int | None = None

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line is not None else ""
        text = f"{where}{self.path}: {self.message}"
        if self.value:
            text += f" (given: {self.value})"
        if self.allowed:
            text += f"; allowed: {self.allowed}"
        if self.advice:
            text += f". {self.advice}"
        return text


class SpecError(DLionError):
    """A document is invalid; carries *all* of its problems. A retry does not help."""

    exit_code = ExitCode.SPEC

    def __init__(self, problems: Sequence[Problem], *, source: str = "") -> None:
        self.problems = tuple(problems)
        self.source = source
        head = f"{source}: " if source else ""
        super().__init__(
            f"{head}{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}:\n"
            + "\n".join(f"  {problem}" for problem in self.problems)
        )


class ContractError(DLionError):
    """A peer, a sidecar or a file violates the protocol: refuse it."""


class UnavailableError(DLionError):
    """Something is unavailable now: a retry may help."""

    exit_code = ExitCode.UNAVAILABLE


class AbsentError(UnavailableError):
    """A named object is not in the cluster, or its kind is unknown there."""


class DeniedError(DLionError):
    """The cluster refuses the request: missing rights, invalid credentials, a conflict."""

    exit_code = ExitCode.DENIED


class ProgramError(DLionError):
    """The user's model or data program raised or violated its protocol."""

    exit_code = ExitCode.PROGRAM


class DataError(DLionError):
    """A data set is missing, corrupt or not as the manifest declares it."""

    exit_code = ExitCode.DATA


class DivergedError(DLionError):
    """Loss, gradient or weights are no longer finite: a restart does not help."""

    exit_code = ExitCode.DIVERGED
