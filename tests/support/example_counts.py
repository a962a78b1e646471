"""The number of examples that a property test draws.

`DLION_TEST_EXAMPLES` is a factor: `make unit` and `make test` set a quarter, `make slow` one or
`EXAMPLES=10`. Without it every test draws the number that it gives.
"""

from __future__ import annotations

import os

MIN_EXAMPLES = 5
"""The minimum for a property, unless the test itself gives fewer."""


def factor() -> float:
    """Return the factor of this session."""
    return float(os.environ.get("DLION_TEST_EXAMPLES", "1"))


def examples(count: int) -> int:
    """Return `count` times the factor of this session."""
    scaled = round(count * factor())
    return max(min(count, MIN_EXAMPLES), scaled)
