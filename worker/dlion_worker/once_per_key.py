"""Emits each message once per key, with a cap per key.

A peer could repeat invalid messages without limit. The cap is per key, so one kind does not
suppress another. Used by trainer and sidecar; safe in any thread.
"""

import threading
from collections.abc import Hashable

MAX_PER_KEY = 10


class OncePerKey:
    def __init__(self, max_messages: int = MAX_PER_KEY) -> None:
        """`max_messages`: different messages per key."""
        self._max_messages = max_messages
        self._emitted: dict[Hashable, set[str]] = {}
        self._lock = threading.Lock()

    def is_new(self, key: Hashable, message: str) -> bool:
        """Whether to emit this message; if so, it counts as emitted. Callers must use few keys.

        >>> once = OncePerKey(max_messages=1)
        >>> once.is_new("a", "x"), once.is_new("a", "x"), once.is_new("a", "y")
        (True, False, False)
        >>> once.is_new("b", "y")
        True
        """
        with self._lock:
            messages = self._emitted.setdefault(key, set())
            if message in messages or len(messages) >= self._max_messages:
                return False
            messages.add(message)
            return True
