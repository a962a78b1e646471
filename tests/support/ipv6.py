"""A mark for tests of machines with IPv6: skipped elsewhere."""

from __future__ import annotations

import socket

import pytest


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as it:
            it.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")
