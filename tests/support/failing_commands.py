"""Commands that fail in their own processes, which import them by this module's name."""

from __future__ import annotations

import os
import sys


def fails(arguments: list[str]) -> int:
    """Print the second argument as an error; exit with the first."""
    sys.stderr.write(arguments[1])
    return int(arguments[0])


def is_killed(arguments: list[str]) -> int:
    """End by that signal."""
    os.kill(os.getpid(), int(arguments[0]))
    return 0
