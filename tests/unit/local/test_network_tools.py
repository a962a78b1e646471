"""Test of the calls of `ip` and `tc`.

A tool that hangs is an error like one that fails: the run names it and ends, instead of going on
with the rates of before.

Left out: real networks (tests/local/test_network_namespaces.py).
"""

from __future__ import annotations

import pytest

from dlion_api.errors import UnavailableError
from dlion_local.emulation.network import in_namespace


def test_a_tool_that_hangs_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_namespace, "_TOOL_TIMEOUT_S", 0.1)
    with pytest.raises(UnavailableError, match=r"sleep 600 had not ended after 0\.1 s"):
        in_namespace.run_tool("sleep", "600")
