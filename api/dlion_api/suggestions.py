"""Suggests the known name that a misspelt one most likely means."""

import difflib
from collections.abc import Iterable

_MAX_COMPARED = 64
"""Characters: the comparison takes time that grows with the square of the length."""


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """Return a question with the name most like `given`, whatever its case; empty: none is.

    >>> did_you_mean("Dilon", ["dlion", "gaia"])
    'Did you mean dlion?'
    >>> did_you_mean("nonsense", ["dlion", "gaia"])
    ''
    """
    near = nearest(given, names)
    return f"Did you mean {near}?" if near else ""


def nearest(given: str, names: Iterable[str], *, likeness: float = 0.6) -> str:
    """Return the name most like `given`, whatever its case; empty: none is so much like it.

    >>> nearest("maxsecond", ["maxSteps", "maxSeconds"], likeness=0.9)
    'maxSeconds'
    """
    folded = {name.lower(): name for name in names}
    near = difflib.get_close_matches(
        given.lower()[:_MAX_COMPARED], list(folded), n=1, cutoff=likeness
    )
    return folded[near[0]] if near else ""
