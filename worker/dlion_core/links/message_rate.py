"""How many messages a peer may send. Pure: time is an argument.

Each is kept until the trainer has read it, which may compute for seconds. Bytes are bounded by the
link; small messages cost far more memory than bytes.
"""

from dlion_core.links.send_queue import MAX_QUEUED_MESSAGES

MESSAGES_PER_S = 2000.0
"""For long. A step sends a few, and takes a millisecond at least."""

MAX_BURST = 4 * MAX_QUEUED_MESSAGES
"""At once, as after a silence: whatever a sender's queue may hold."""


class MessageRate:
    """A token bucket for one link."""

    def __init__(self, now_s: float) -> None:
        self._tokens, self._at_s = float(MAX_BURST), now_s

    def allows(self, now_s: float) -> bool:
        """Count a message; return whether it is within the limit."""
        gained = (now_s - self._at_s) * MESSAGES_PER_S
        self._tokens, self._at_s = min(float(MAX_BURST), self._tokens + gained) - 1, now_s
        return self._tokens >= 0
