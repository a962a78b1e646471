"""Test the message about a slow child process.

A slow child is named on a terminal, a quick one never.

Left out: the whole command, which `tests/local` runs.
"""

import io
import sys
import tempfile

import pytest
from rich.console import Console

from dlion_cli.terminal.awaited_child import run_child

WAITS_FOR = "running program.py"


def shown_for(code: str, *, quiet_s: float, is_terminal: bool = True) -> tuple[int, str, str]:
    """Return the exit code, the text on the console, and the output of the child."""
    screen = io.StringIO()
    with tempfile.TemporaryFile() as output:
        ended = run_child(
            [sys.executable, "-I", "-S", "-c", code],
            given=b"question",
            output=output,
            waits_for=WAITS_FOR,
            console=Console(file=screen, force_terminal=is_terminal),
            quiet_s=quiet_s,
        )
        output.seek(0)
        return ended, screen.getvalue(), output.read().decode()


SLOW = "import sys, time; print(sys.stdin.read()); time.sleep({}); sys.exit(3)"


def test_a_slow_child_is_named_on_a_terminal_and_gets_its_input() -> None:
    ended, screen, printed = shown_for(SLOW.format(1), quiet_s=0.01)
    assert (ended, printed) == (3, "question\n")
    assert WAITS_FOR in screen


@pytest.mark.parametrize(("quiet_s", "is_terminal"), [(30.0, True), (0.01, False)])
def test_nothing_is_shown_for_a_quick_child_or_in_a_pipe(quiet_s: float, is_terminal: bool) -> None:
    ended, screen, _ = shown_for(SLOW.format(0.15), quiet_s=quiet_s, is_terminal=is_terminal)
    assert (ended, screen) == (3, "")
