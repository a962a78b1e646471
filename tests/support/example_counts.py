"""The number of examples that a property test draws.

`DLION_TEST_EXAMPLES` is a factor: `make unit` sets a quarter. Without it every test draws the
number that it gives.
"""

from __future__ import annotations

import os

MIN_EXAMPLES = 5
"""A property is never tested with fewer, unless it gives fewer itself."""


def examples(count: int) -> int:
    """`count` times the factor of this session."""
    scaled = round(count * float(os.environ.get("DLION_TEST_EXAMPLES", "1")))
    return max(min(count, MIN_EXAMPLES), scaled)
