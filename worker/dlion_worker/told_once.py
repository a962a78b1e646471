"""Words that are told once each, and of each matter so many at most: a stranger may go on for ever.

Every matter has room of its own, so that nonsense of one kind keeps no other from being told.
Called where peers are refused: by the trainer and by the sidecar. Safe in any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

MOST_OF_A_MATTER = 10


class ToldOnce:
    """Remembers what has been told."""

    def __init__(self, most: int = MOST_OF_A_MATTER) -> None:
        """`most`: different words of one matter."""
        self._most = most
        self._told: dict[Hashable, set[str]] = {}
        self._lock = threading.Lock()

    def is_new(self, matter: Hashable, words: str) -> bool:
        """Whether these words are to be told, and have been from now on. The caller sees to it that
        there are few matters.

        >>> told = ToldOnce(most=1)
        >>> told.is_new("a", "x"), told.is_new("a", "x"), told.is_new("a", "y")
        (True, False, False)
        >>> told.is_new("b", "y")
        True
        """
        with self._lock:
            own = self._told.setdefault(matter, set())
            if words in own or len(own) >= self._most:
                return False
            own.add(words)
            return True
