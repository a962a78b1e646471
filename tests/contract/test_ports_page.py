"""Tests of docs/security.md: it has every port of pods with its limits, as in the code.

The table has exactly the ports at which a pod or the operator listens. Its figures are the code's
constants, and servers use these constants. Each test that the page names exists.

Left out: the effect of the limits (tests/local/test_floods.py).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from dlion_api import cluster_names as names
from dlion_api.protocol.port_limits import HANDSHAKE_WITHIN_S, IDLE_WITHIN_S
from dlion_operator.model.settings import Settings
from port_table import ROWS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/security.md").read_text(encoding="utf-8")


def test_the_page_has_exactly_these_ports_and_limits() -> None:
    lines = PAGE.partition("\n## Ports\n")[2].splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert table[2:] == [str(row) for row in ROWS]


def test_the_page_has_the_limits_of_all_grpc_ports() -> None:
    text = " ".join(PAGE.split())
    assert f"{HANDSHAKE_WITHIN_S} s for its handshake" in text
    assert f"after {IDLE_WITHIN_S} s without a call" in text


def test_no_port_is_missing() -> None:
    known = {value for name, value in vars(names).items() if name.endswith("_PORT")}
    assert known == {row.port for row in ROWS if row.port != "a file"}
    defaults = {Settings.metrics_port, Settings.health_port}
    assert defaults <= known


def test_servers_use_these_constants() -> None:
    """A figure on the page is wrong if a server uses another one."""
    nodes = [
        node
        for package in ("operator", "worker")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]
    calls = [
        ast.unparse(node.value)
        for node in nodes
        if isinstance(node, ast.keyword) and node.arg == "maximum_concurrent_rpcs"
    ]
    assert sorted(calls) == ["MAX_CALLS"] * 4 + ["MAX_STREAMS"]
    connections = [
        ast.unparse(node.args[0])
        for node in nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "connection_options"
    ]
    assert sorted(connections) == ["MAX_CALLS"] + ["MAX_CONNECTIONS"] * 4


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`([a-z]+/[a-z_/]+\.py)`", PAGE)
    assert len(named) > 20
    for path in named:
        assert (ROOT / "tests" / path).is_file(), path


def test_every_attack_has_a_test_or_no_defence() -> None:
    section = PAGE.partition("\n## Outsider\n")[2].partition("\n## What jobs")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    attacks = [row for row in rows if row[0].strip() not in ("attack", "---")]
    assert len(attacks) > 30
    for attack, defence, test in attacks:
        open_ = "**" in defence or "Kubernetes' own" in defence or "fingerprints" in defence
        assert open_ or ".py" in test, attack
