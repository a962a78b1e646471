"""What each exchange policy takes in `spec.exchange.parameters`, declared as manifests are.

Owns names, bounds and defaults, so that `dlion validate` needs no NumPy. A policy without
parameters has none here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NoParameters:
    """For policies that take none."""
