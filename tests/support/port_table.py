"""Every port of pods and of the operator, with its limits, from the code's constants.

`docs/security.md` has this table (tests/contract/test_ports_page.py). Each row is flooded
(tests/local/test_floods.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from dlion_api import cluster_names as names
from dlion_api.protocol.port_limits import REQUEST_WITHIN_S
from dlion_api.protocol.refusals import MAX_REPORT_BYTES
from dlion_api.protocol.sidecar_protocol import MAX_LINE_BYTES
from dlion_core.links.framing import MAX_FRAME_BYTES
from dlion_operator.controller import health
from dlion_operator.coordinator import server as coordinator
from dlion_operator.coordinator import service as coordination
from dlion_operator.federation import service as federation
from dlion_operator.federation.messages import MAX_STATEMENT_BYTES
from dlion_operator.federation.state import SILENT_AFTER_S
from dlion_worker import metrics_server
from dlion_worker.artifact_client.chunks import MAX_MESSAGE_BYTES as MAX_CHUNK_MESSAGE_BYTES
from dlion_worker.artifact_server import process as keeper
from dlion_worker.artifact_server import service as keeping
from dlion_worker.sidecar import measuring_service as measuring
from dlion_worker.sidecar import trainer_socket
from dlion_worker.transport import peer_exchange, state_server
from dlion_worker.transport import service as exchange

NONE = "none"


@dataclass(frozen=True)
class Row:
    """One row of the table; figures as the page writes them."""

    port: int | str
    where: str
    callers: str
    connections: int
    calls: int | str
    of_one_caller: str
    deadline: str
    message_bytes: int | str

    def __str__(self) -> str:
        size = self.message_bytes
        shown = f"{size // 1024} KiB" if isinstance(size, int) else size
        calls = f"{self.calls:,}" if isinstance(self.calls, int) else self.calls
        cells = (
            self.port, self.where, self.callers, f"{self.connections:,}", calls,
            self.of_one_caller, self.deadline, shown,
        )  # fmt: skip
        return "| " + " | ".join(map(str, cells)) + " |"


EXCHANGE, MEASURING, KEEPER = "worker: exchange", "worker: measuring", "keeper"
COORDINATOR, FEDERATION = "operator: coordinator", "operator: federation"
WORKER_METRICS, SOCKET = "worker: metrics", "worker: the trainer's socket"
OPERATOR_METRICS, HEALTH = "operator: metrics", "operator: health"
GRPC = {
    EXCHANGE: "/dlion.v1alpha1.Exchange/PullState",
    MEASURING: "/dlion.v1alpha1.Measuring/Share",
    KEEPER: "/dlion.v1alpha1.Keeping/Get",
    COORDINATOR: "/dlion.v1alpha1.Coordination/Sign",
    FEDERATION: "/dlion.v1alpha1.Federation/Report",
}
"""A method of each gRPC port, of which a caller may send less than a request."""
_SCRAPERS = "callers that `metricsFrom` allows"
_ONE_CALL = "one per connection"

ROWS = [
    Row(
        names.EXCHANGE_PORT, EXCHANGE, "workers of the run, by certificate",
        peer_exchange.MAX_CALLS, peer_exchange.MAX_CALLS,
        f"{exchange.MAX_STREAMS_PER_CERTIFICATE} streams, {state_server.MAX_PULLS_PER_PEER} pulls,"
        f" {peer_exchange.MAX_CALLS_PER_CONNECTION} calls per connection",
        f"{exchange.HELLO_TIMEOUT_S:g} s for the first message", MAX_FRAME_BYTES,
    ),
    Row(
        names.MEASURING_PORT, MEASURING, "sidecars of the run, by certificate",
        measuring.MAX_CONNECTIONS, measuring.MAX_CALLS,
        f"{measuring.MAX_PROBES_PER_CALLER} probes, {measuring.MAX_SHARES_PER_CALLER} shares",
        f"{REQUEST_WITHIN_S:g} s for a share, {measuring.PROBE_WITHIN_S:g} s for a probe",
        measuring.MAX_MESSAGE_BYTES,
    ),
    Row(
        names.KEEPER_PORT, KEEPER, "workers of the site, by certificate", keeper.MAX_CONNECTIONS,
        keeper.MAX_CALLS, f"{keeping.MAX_CALLS_OF_CALLER} calls",
        f"{keeping.SILENCE_TIMEOUT_S:g} s without data within a file", MAX_CHUNK_MESSAGE_BYTES,
    ),
    Row(
        names.COORDINATOR_PORT, COORDINATOR, "pods of the site's runs, by token",
        coordinator.MAX_CONNECTIONS, coordinator.MAX_CALLS,
        f"{coordination.MAX_UNREAD_CALLS} calls that have not sent their request,"
        f" {coordinator.MAX_CALLS_PER_CONNECTION} calls per connection",
        f"{REQUEST_WITHIN_S:g} s for the request", MAX_REPORT_BYTES,
    ),
    Row(
        names.FEDERATION_PORT, FEDERATION, "operators of listed sites, by certificate",
        federation.MAX_CONNECTIONS, federation.MAX_STREAMS,
        f"{federation.MAX_STREAMS_OF_SITE} streams,"
        f" {federation.MAX_CALLS_PER_CONNECTION} calls per connection",
        f"{SILENT_AFTER_S:g} s without a message", MAX_STATEMENT_BYTES,
    ),
    Row(
        names.METRICS_PORT, WORKER_METRICS, _SCRAPERS, metrics_server.MAX_CONNECTIONS, _ONE_CALL,
        NONE, f"{metrics_server.CONNECTION_WITHIN_S:g} s for the whole connection",
        f"{metrics_server.MAX_HEAD_BYTES // 1024} KiB of request line and headers",
    ),
    Row(
        names.METRICS_PORT, OPERATOR_METRICS, _SCRAPERS, health.MAX_CONNECTIONS, _ONE_CALL, NONE,
        f"{health.SILENCE_S:g} s without data",
        f"{health.MAX_HEADER_BYTES // 1024} KiB for each header",
    ),
    Row(
        names.HEALTH_PORT, HEALTH, "the kubelet, `helm test`", health.MAX_CONNECTIONS, _ONE_CALL,
        NONE, f"{health.SILENCE_S:g} s without data",
        f"{health.MAX_HEADER_BYTES // 1024} KiB for each header",
    ),
    Row(
        "a file", SOCKET, "the trainer, by the file's permissions", trainer_socket.MAX_CONNECTIONS,
        "no calls", NONE, NONE, MAX_LINE_BYTES,
    ),
]  # fmt: skip
