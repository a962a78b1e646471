"""The one error of `make bundle`."""

from __future__ import annotations


class BundleError(Exception):
    """A bundle cannot be built; the message names the cause and what to do."""
