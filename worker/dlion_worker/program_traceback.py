"""The traceback of a user's program, without what DLion did before it called the program.

Used where a ProgramError is shown: in the trainer's log, `dlion validate` and the command line.
"""

import traceback
from typing import Final

_CALLERS: Final = frozenset(
    {"dlion_api", "dlion_core", "dlion_simulator", "dlion_worker", "importlib"}
)
"""Packages that call or import user code. Not `dlion`, which contains a program itself."""

_HEAD: Final = "Traceback (most recent call last):\n"


def program_traceback(error: BaseException) -> str:
    """Return the traceback from the user's first line on, as Python prints it.

    Complete if no line is the user's: the fault may be DLion's. A SyntaxError has its own line.
    """
    formatted = traceback.TracebackException.from_exception(error)
    frames = traceback.walk_tb(error.__traceback__)
    packages = [str(each.f_globals.get("__package__")).partition(".")[0] for each, _ in frames]
    users = [place for place, package in enumerate(packages) if package not in _CALLERS]
    if users:
        del formatted.stack[: users[0]]
    elif isinstance(error, SyntaxError):
        formatted.stack.clear()
    text = "".join(formatted.format()).rstrip()
    return text if text.startswith(_HEAD) else f"{_HEAD}{text}"
