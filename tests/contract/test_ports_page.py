"""Tests of docs/security.md: it has every port of pods with its limits, as in the code.

The table has exactly the ports at which a pod or the operator listens. Its figures are the code's
constants, and servers use these constants. Each test that the page names exists.

Left out: the effect of the limits (the tests that the page names).
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from dlion_api import cluster_names as names
from dlion_api.protocol.refusals import MAX_REPORT_BYTES
from dlion_core.links.framing import MAX_FRAME_BYTES
from dlion_operator.coordinator import server as coordinator
from dlion_operator.coordinator import service as coordination
from dlion_operator.federation import service as federation
from dlion_operator.federation.messages import MAX_STATEMENT_BYTES
from dlion_operator.federation.state import SILENT_AFTER_S
from dlion_operator.model.settings import Settings
from dlion_worker.artifact_client.chunks import MAX_MESSAGE_BYTES as MAX_CHUNK_MESSAGE_BYTES
from dlion_worker.artifact_server import process as keeper
from dlion_worker.artifact_server import service as keeping
from dlion_worker.sidecar import measuring_service as measuring
from dlion_worker.transport import peer_exchange, state_server
from dlion_worker.transport import service as exchange

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/security.md").read_text(encoding="utf-8")
NONE = "none"


@dataclass(frozen=True)
class Row:
    """One row of the table; figures as the page writes them."""

    port: int
    where: str
    callers: str
    calls: int | str
    of_one_caller: str
    deadline: str
    message_bytes: int | str

    def __str__(self) -> str:
        size = self.message_bytes
        shown = f"{size // 1024} KiB" if isinstance(size, int) else size
        calls = f"{self.calls:,}" if isinstance(self.calls, int) else self.calls
        cells = (self.port, self.where, self.callers, calls, self.of_one_caller, self.deadline)
        return "| " + " | ".join(map(str, (*cells, shown))) + " |"


ROWS = [
    Row(
        names.EXCHANGE_PORT, "worker: exchange", "workers of the run, by certificate",
        peer_exchange.MAX_CALLS,
        f"{exchange.MAX_STREAMS_PER_CERTIFICATE} streams, {state_server.MAX_PULLS_PER_PEER} pulls,"
        f" {peer_exchange.MAX_CALLS_PER_CONNECTION} calls of a connection",
        f"{exchange.HELLO_TIMEOUT_S:g} s for the hello", MAX_FRAME_BYTES,
    ),
    Row(
        names.MEASURING_PORT, "worker: measuring", "sidecars of the run, by certificate",
        measuring.MAX_CALLS, f"{measuring.MAX_PROBES_PER_CALLER} probes",
        f"{measuring.PROBE_WITHIN_S:g} s for a probe", measuring.MAX_MESSAGE_BYTES,
    ),
    Row(
        names.KEEPER_PORT, "keeper", "workers of the site, by certificate", keeper.MAX_CALLS, NONE,
        f"{keeping.SILENCE_TIMEOUT_S:g} s of silence within a file", MAX_CHUNK_MESSAGE_BYTES,
    ),
    Row(
        names.COORDINATOR_PORT, "operator: coordinator", "pods of the site's runs, by token",
        coordinator.MAX_CALLS, f"{coordination.MAX_UNREAD_CALLS} calls without a request",
        f"{coordination.REQUEST_WITHIN_S:g} s for the request", MAX_REPORT_BYTES,
    ),
    Row(
        names.FEDERATION_PORT, "operator: federation", "operators of listed sites, by certificate",
        federation.MAX_STREAMS, f"{federation.MAX_STREAMS_OF_SITE} streams",
        f"{SILENT_AFTER_S:g} s of silence", MAX_STATEMENT_BYTES,
    ),
    Row(
        names.METRICS_PORT, "worker, operator: metrics", "callers that `metricsFrom` allows", NONE,
        NONE, NONE, "reads no body",
    ),
    Row(
        names.HEALTH_PORT, "operator: health", "the kubelet, `helm test`", NONE, NONE, NONE,
        "reads no body",
    ),
]  # fmt: skip


def test_the_page_has_exactly_these_ports_and_limits() -> None:
    lines = PAGE.partition("\n## Ports\n")[2].splitlines()
    assert [line for line in lines if re.match(r"\| \d", line)] == [str(row) for row in ROWS]


def test_no_port_is_missing() -> None:
    known = {value for name, value in vars(names).items() if name.endswith("_PORT")}
    assert known == {row.port for row in ROWS}
    defaults = {Settings.metrics_port, Settings.health_port}
    assert defaults <= known


def test_servers_use_these_constants() -> None:
    """A figure on the page is wrong if a server uses another one."""
    made = [
        ast.unparse(node.value)
        for package in ("operator", "worker")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.keyword) and node.arg == "maximum_concurrent_rpcs"
    ]
    assert sorted(made) == ["MAX_CALLS"] * 4 + ["MAX_STREAMS"]


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
