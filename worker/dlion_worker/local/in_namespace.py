"""Doing something inside a network namespace, and calling `ip` and `tc`.

Used by `local.namespaces`, `local.shaping` and `local.measuring`. A socket opened inside a
namespace stays there, whichever thread uses it later, so nothing has to be forked.
"""

from __future__ import annotations

import subprocess
import threading
from typing import TYPE_CHECKING, TypeVar

from dlion_api.errors import UnavailableError
from dlion_worker.local.enter import enter_network

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
_TOOL_TIMEOUT_S = 30


def in_namespace(name: str | None, action: Callable[[], T]) -> T:
    """What `action` returns when it runs in the named network namespace; None: where we are.

    It runs in a thread of its own, which ends with it: a namespace belongs to a thread. Raises
    whatever `action` raises, and OSError where there is no such namespace.
    """
    if name is None:
        return action()
    results: list[T] = []
    errors: list[BaseException] = []

    def enter_and_act() -> None:
        try:
            enter_network(name)
            results.append(action())
        except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
            errors.append(error)

    thread = threading.Thread(target=enter_and_act, name=f"in-{name}")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def run_batch(
    tool: str, namespace: str | None, lines: Sequence[str], *, check: bool = True
) -> None:
    """Give the lines to `ip` or `tc`, inside a namespace, in one process.

    Without `check` every line is tried and what fails is passed over.
    """
    if not lines:
        return
    where = [] if namespace is None else ["-n", namespace]
    force = [] if check else ["-force"]
    run_tool(tool, *where, *force, "-batch", "-", text="\n".join(lines) + "\n", check=check)


def run_tool(tool: str, *arguments: str, text: str = "", check: bool = True) -> str:
    """What the tool prints. Raises: UnavailableError with what it was given and what it said."""
    done = subprocess.run(
        [tool, *arguments],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=_TOOL_TIMEOUT_S,
    )
    if check and done.returncode != 0:
        raise UnavailableError(
            f"{tool} {' '.join(arguments)} failed with {done.returncode}: {done.stderr.strip()}"
            + (f"\nit was given:\n{text}" if text else "")
        )
    return done.stdout
