"""Slow parts of several tests, run in parallel; each test gets the outcome of its own."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType


class SideBySide:
    """Functions by the names of their tests, called in threads when the context begins."""

    def __init__(self, functions: Mapping[str, Callable[[], None]]) -> None:
        self._functions = functions
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(functions)))
        self._begun: dict[str, Future[None]] = {}

    def outcome(self, name: str) -> None:
        """Wait for that function; return its result or raise its error.

        The next request for it, as of a repeated test, calls it again.
        """
        begun = self._begun.pop(name, None)
        if begun is None:
            self._functions[name]()
        else:
            begun.result()

    def __enter__(self) -> Self:
        for name, function in self._functions.items():
            self._begun[name] = self._pool.submit(function)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
