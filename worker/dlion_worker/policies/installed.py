"""The border to policies of installed packages: whose code has failed is said, and where.

Owns the one error that whatever such code raises becomes. Called by `catalogue`, by `guarded` and
by the simulator, for no policy of DLion's own: what fails in those is a defect, and looks like one.
"""

from __future__ import annotations

import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dlion_api.errors import DLionError, ProgramError

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_SAID: Final = 1000
"""Characters of what was raised."""


@dataclass(frozen=True)
class Installed:
    """A policy by its entry point."""

    name: str
    value: str
    """`module:attribute`."""

    @contextmanager
    def code(
        self, doing: str, *, at: object = None, passing: tuple[type[Exception], ...] = ()
    ) -> Iterator[None]:
        """Turns whatever the policy's code raises inside into one error that says where.

        `at`: the function of it that is called, for an error that none of its lines raised.
        Raises: ProgramError; DLion's own errors, and those `passing`, pass unchanged.
        """
        unchanged: tuple[type[Exception], ...] = (DLionError, *passing)
        try:
            yield
        except unchanged:
            raise
        # It may raise anything, and `sys.exit` must not end a worker in silence.
        except (Exception, SystemExit) as error:
            place = self._place(error) or _defined(at)
            text = str(error).strip()[:_MOST_SAID]
            said = f"{doing} failed{place}: {type(error).__name__}: {text}"
            raise self.error(said) from error

    def error(self, said: str) -> ProgramError:
        """What to raise for something that is this policy's doing."""
        return ProgramError(
            f"policy {self.name} ({self.value}): {said}. It is no policy of DLion's own: correct "
            "its package (docs/writing-a-policy.md), or choose another exchange.policy"
        )

    def wrong_answer(self, function: object, answer: object, wanted: str) -> ProgramError:
        """What to raise where a function of it yields something that it may not."""
        name = getattr(function, "__name__", "what it names")
        return self.error(
            f"{name}{_defined(function)} yields {type(answer).__name__}; allowed: {wanted}"
        )

    def _place(self, error: BaseException) -> str:
        """` at file:line` of the innermost line of its package; empty: none was under way."""
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
    """` at file:line` where it is defined; empty: it is not written in Python."""
    code = getattr(function, "__code__", None)
    return "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"
