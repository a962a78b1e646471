"""Wait for the look-up of host names."""

from __future__ import annotations

import threading


def look_ups_end() -> None:
    """Wait until the threads that look names up have ended."""
    for thread in threading.enumerate():
        if thread.name == "names":
            thread.join(10)
