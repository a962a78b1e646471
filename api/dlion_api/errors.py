"""The one tree of errors. Who raises what decides whether a retry helps.

Every message says what happened, to which object, the value given, the values allowed, and what
to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class DLionError(Exception):
    """Anything that DLion itself reports."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a document.

    `path` is dotted with indices (`spec.sites[0].groups[1].workers`), `value` is the value given
    as the user would read it, `allowed` the values that would do, `advice` what to do next.
    `line` counts from 1, and is None where the text is not at hand.
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
    """A document that no retry will make right; carries *all* of its problems at once."""

    def __init__(self, problems: Sequence[Problem], *, source: str = "") -> None:
        self.problems = tuple(problems)
        self.source = source
        head = f"{source}: " if source else ""
        super().__init__(
            f"{head}{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}:\n"
            + "\n".join(f"  {problem}" for problem in self.problems)
        )


class ContractError(DLionError):
    """A peer, a sidecar or a file said something that the protocol does not allow: refuse it."""


class UnavailableError(DLionError):
    """Something is not there just now: a retry may help."""


class AbsentError(UnavailableError):
    """An object that is named is not in the cluster, or its kind is not known there."""


class DeniedError(DLionError):
    """The cluster knows what was asked for and refuses it: rights, credentials, a conflict."""


class ProgramError(DLionError):
    """The user's own model or data program raised, or did not keep to its protocol."""


class DataError(DLionError):
    """A data set is missing, corrupt or not what the manifest says."""


class DivergedError(DLionError):
    """Loss, gradient or weights are no longer finite: no restart of a worker helps."""
