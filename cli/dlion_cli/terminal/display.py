"""The part that live views share: a display that updates in place on a terminal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

from rich.live import Live

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class TerminalDisplay(ABC):
    """Shows `render` twice a second while it is entered, on a terminal only."""

    def __init__(self, console: Console, *, redirect: bool = True) -> None:
        """`redirect`: other output of the process appears above the display."""
        self._console = console
        self._live = Live(
            console=console, refresh_per_second=2, get_renderable=self.render, transient=False,
            redirect_stdout=redirect, redirect_stderr=redirect,
        )  # fmt: skip

    @abstractmethod
    def render(self) -> RenderableType:
        """The live view. Called in the display's thread."""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()
