"""Runs code inside a network namespace, and calls `ip` and `tc`.

A socket that was opened inside a namespace stays there, whichever thread uses it later. So no fork
is needed.
"""

import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dlion_api.errors import UnavailableError
from dlion_local.emulation.network.enter import enter_network

T = TypeVar("T")
_TOOL_TIMEOUT_S = 30.0


def in_namespace(name: str | None, action: Callable[[], T]) -> T:
    """Return what `action` returns inside the named network namespace; None: the current one.

    Runs in a new thread, because a namespace belongs to a thread. Raises whatever `action` raises,
    and OSError if there is no such namespace.
    """
    if name is None:
        return action()

    def enter_and_act() -> T:
        enter_network(name)
        return action()

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"in-{name}") as thread:
        return thread.submit(enter_and_act).result()


def run_batch(
    tool: str, namespace: str | None, lines: Sequence[str], *, check: bool = True
) -> None:
    """Pass the lines to one `ip` or `tc` process, inside a namespace.

    Without `check`, errors are ignored and all lines are executed.
    """
    if not lines:
        return
    where = [] if namespace is None else ["-n", namespace]
    force = [] if check else ["-force"]
    run_tool(tool, *where, *force, "-batch", "-", text="\n".join(lines) + "\n", check=check)


def run_tool(tool: str, *arguments: str, text: str = "", check: bool = True) -> str:
    """Return the tool's output. Raises UnavailableError with its input and its error output, and
    for a tool that does not end."""
    command = f"{tool} {' '.join(arguments)}"
    given = f"\nit was given:\n{text}" if text else ""
    try:
        done = subprocess.run(
            [tool, *arguments],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TOOL_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(
            f"{command} had not ended after {_TOOL_TIMEOUT_S:g} s{given}"
        ) from error
    if check and done.returncode != 0:
        raise UnavailableError(
            f"{command} failed with {done.returncode}: {done.stderr.strip()}{given}"
        )
    return done.stdout
