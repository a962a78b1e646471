"""A view that is redrawn in place while it is open, if the console is a terminal."""

from abc import ABC, abstractmethod
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live


class TerminalView(ABC):
    """Redraws the result of `render` twice a second; `options` are those of rich's `Live`."""

    def __init__(self, console: Console, **options: Any) -> None:
        """Calls `render`: a view sets its own attributes before."""
        self._console = console
        self._live = Live(
            console=console, refresh_per_second=2, get_renderable=self.render, **options
        )

    @abstractmethod
    def render(self) -> RenderableType:
        """The view now."""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()
