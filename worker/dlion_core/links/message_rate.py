"""How many messages a peer may send. Pure: time is an argument.

Each is kept until the trainer has read it, which may compute for seconds. Bytes are bounded by the
link; small messages cost far more memory than bytes.
"""

MESSAGES_PER_S = 2000.0
"""Maximum long-term rate. A step sends a few messages, and takes a millisecond at least."""

MAX_BURST = 10_000
"""Maximum messages at once. While this process gets no processor, a connection holds the messages
of seconds: a peer with a small model makes hundreds of steps a second."""


class MessageRate:
    """A token bucket for one link."""

    def __init__(self, now_s: float) -> None:
        self._tokens, self._at_s = float(MAX_BURST), now_s

    def allows(self, now_s: float) -> bool:
        """Count a message; return whether it is within the limit."""
        gained = (now_s - self._at_s) * MESSAGES_PER_S
        self._tokens, self._at_s = min(float(MAX_BURST), self._tokens + gained) - 1, now_s
        return self._tokens >= 0
