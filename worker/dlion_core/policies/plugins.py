"""Policies of installed packages: turn their failures into one error that names policy and line.

Used by `catalogue`, `plugin_guards` and the simulator, never for DLion's own policies: a failure
there is a bug and keeps its traceback.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from dlion_api.errors import DLionError, ProgramError
from dlion_api.plain_text import error_text

_MAX_ERROR_CHARACTERS: Final = 1000


@dataclass(frozen=True)
class PolicyPlugin:
    """A policy by its entry point."""

    name: str
    value: str
    """`module:attribute`."""

    @contextmanager
    def code(
        self, doing: str, *, at: object = None, passing: tuple[type[Exception], ...] = ()
    ) -> Iterator[None]:
        """Convert any error of the policy's code into a ProgramError with file and line.

        DLion's own errors and those in `passing` are unchanged. `at`: the called function, for
        errors that none of its lines raised.
        """
        unchanged: tuple[type[Exception], ...] = (DLionError, *passing)
        try:
            yield
        except unchanged:
            raise
        # It may raise anything, and `sys.exit` must not end a worker in silence.
        except (Exception, SystemExit) as error:
            place = self._place(error) or _defined(at)
            text = error_text(error)[:_MAX_ERROR_CHARACTERS]
            message = f"{doing} failed{place}: {type(error).__name__}: {text}"
            raise self.error(message) from error

    def error(self, message: str) -> ProgramError:
        """Return the error to raise for a failure of this policy."""
        return ProgramError(
            f"policy {self.name} ({self.value}): {message}. This policy is not part of DLion: "
            "correct its package (docs/writing-a-policy.md), or choose another exchange.policy"
        )

    def wrong_result(self, function: object, answer: object, wanted: str) -> ProgramError:
        """Return the error to raise for a function that returns an invalid result."""
        name = getattr(function, "__name__", "what it names")
        return self.error(
            f"{name}{_defined(function)} yields {type(answer).__name__}; allowed: {wanted}"
        )

    def _place(self, error: BaseException) -> str:
        """Return ` at file:line` of the innermost line of its package, or an empty string."""
        if isinstance(error, SyntaxError) and error.filename:
            return f" at {error.filename}:{error.lineno}"
        package = self.value.partition(":")[0].partition(".")[0]
        own = [
            f" at {frame.f_code.co_filename}:{line}"
            for frame, line in traceback.walk_tb(error.__traceback__)
            if str(frame.f_globals.get("__name__")).partition(".")[0] == package
        ]
        return own[-1] if own else ""


def _defined(function: Any) -> str:
    """Return ` at file:line` of its definition; empty if it is not written in Python."""
    code = getattr(function, "__code__", None)
    return "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"
