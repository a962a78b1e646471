"""Prometheus metrics of one sidecar, over HTTP.

docs/metrics.md lists them (a test compares both). Values are read on each request, in the HTTP
server's thread, from objects that are replaced as a whole.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.measurements import Capacity, CpuAllowance, Directive
from dlion_core.demand.demand_predictor import DemandDecision, DemandState
from dlion_core.heat.heat_controller import HeatDecision, HeatState
from dlion_worker.sidecar.link_connections import SiteConnections
from dlion_worker.sidecar.node_facts import NodeFacts
from dlion_worker.sidecar.refusal_counter import RefusalKey

MAX_LABELLED_PEERS = 63
"""A worker that has sent to more has sent bytes by site, so that a sidecar has some 400 series at
most."""


@dataclass(frozen=True)
class MetricsReading:
    """All exported values at one moment."""

    capacity: Capacity
    directive: Directive | None
    allowance: CpuAllowance | None
    steps: int
    samples: int
    iteration_s: float
    trainer_connected: bool
    trainer_silent_s: float | None
    """None without a connected trainer."""
    refused: int
    refusals: Mapping[RefusalKey, int]
    renewals: int
    node: NodeFacts
    heat: HeatDecision | None = None
    """None: the job has no heat budget."""
    demand: DemandDecision | None = None
    """None: what other work takes is not predicted."""
    is_demand_blind: bool = False
    """Whether the machine's CPU time cannot be read."""
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the trainer's main thread, by part."""
    exchange_thread_seconds: Mapping[str, float] = field(default_factory=dict)
    link_bytes: Sequence[tuple[Rank, str, int]] = ()
    """Peer, kind and bytes sent so far."""
    connections: Mapping[SiteName, SiteConnections] = field(default_factory=dict)
    """The TCP connections to each site; empty: unknown."""


class SidecarMetrics(Collector):
    """Converts a reading to metric families. Links are summed per pair of sites."""

    def __init__(
        self,
        *,
        job: JobKey,
        site: SiteName,
        peer: Callable[[Rank], WorkerIdentity],
        read: Callable[[], MetricsReading],
    ) -> None:
        """`peer` raises LookupError for a rank that the job cannot have, which is left out."""
        self._labels = {"namespace": job.namespace, "job": job.name, "site": str(site)}
        self._peer, self._read = peer, read

    def collect(self) -> Iterator[Metric]:
        reading = self._read()
        for family, rows in (
            (GaugeMetricFamily, _gauges(reading)),
            (GaugeMetricFamily, _group_gauges(reading)),
            (CounterMetricFamily, _counters(reading)),
        ):
            for name, meaning, value in rows:
                if value is not None:
                    made = family(f"dlion_{name}", meaning, labels=list(self._labels))
                    made.add_metric(list(self._labels.values()), value)
                    yield made
        yield self._per_part(
            "dlion_step_seconds",
            "Time of the trainer's steps, by what its main thread did.",
            reading.step_seconds,
        )
        yield self._per_part(
            "dlion_exchange_thread_seconds",
            "Time in which the exchange's thread handled frames, beside the steps.",
            reading.exchange_thread_seconds,
        )
        refusals = CounterMetricFamily(
            "dlion_peer_refusals",
            "Peers' calls refused here, and own calls that peers refused.",
            labels=[*self._labels, "port", "side", "reason"],
        )
        for place, count in reading.refusals.items():
            refusals.add_metric([*self._labels.values(), *place], count)
        yield refusals
        yield self._sent_bytes(reading.link_bytes)
        yield from self._of_connections(reading.connections)
        if (directive := reading.directive) is not None:
            yield self._per_site(
                "dlion_link_budget_bytes",
                "Bytes per iteration that the links to a site may carry, summed.",
                directive.budget_bytes,
            )
            yield self._per_site(
                "dlion_link_bandwidth_bytes_per_second",
                "Rate of the links to a site as their receivers measured it, summed.",
                directive.bandwidth_bytes_per_s,
            )

    def _per_part(self, name: str, meaning: str, seconds: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, meaning, labels=[*self._labels, "part"])
        for part, value in seconds.items():
            family.add_metric([*self._labels.values(), part], value)
        return family

    def _sent_bytes(self, rows: Sequence[tuple[Rank, str, int]]) -> Metric:
        family = CounterMetricFamily(
            "dlion_link_sent_bytes",
            "Bytes sent to a peer, by kind, without TLS and TCP headers.",
            labels=[*self._labels, "peer_site", "peer", "kind"],
        )
        has_peer_label = len({rank for rank, _, _ in rows}) <= MAX_LABELLED_PEERS
        totals: dict[tuple[str, str, str], int] = {}
        for rank, kind, count in rows:
            if (peer := self._known_peer(rank)) is not None:
                place = str(peer.site), peer.name if has_peer_label else "", kind
                totals[place] = totals.get(place, 0) + count
        for place, total in totals.items():
            family.add_metric([*self._labels.values(), *place], total)
        return family

    def _of_connections(self, by_site: Mapping[SiteName, SiteConnections]) -> Iterator[Metric]:
        for name, family, meaning, value_of in _CONNECTION_METRICS:
            made = family(f"dlion_link_{name}", meaning, labels=[*self._labels, "peer_site"])
            for site, connections in sorted(by_site.items()):
                if (value := value_of(connections)) is not None:
                    made.add_metric([*self._labels.values(), str(site)], value)
            yield made

    def _per_site(self, name: str, meaning: str, values: Mapping[Rank, float]) -> Metric:
        family = GaugeMetricFamily(name, meaning, labels=[*self._labels, "peer_site"])
        totals: dict[str, float] = {}
        for rank, value in values.items():
            if (peer := self._known_peer(rank)) is not None:
                totals[str(peer.site)] = totals.get(str(peer.site), 0.0) + value
        for site, total in sorted(totals.items()):
            family.add_metric([*self._labels.values(), site], total)
        return family

    def _known_peer(self, rank: Rank) -> WorkerIdentity | None:
        try:
            return self._peer(rank)
        except LookupError:  # a wrong record must not end all metrics
            return None


_CONNECTION_METRICS: Final = (
    ("round_trip_seconds", GaugeMetricFamily,
     "Longest round trip of the TCP connections to a site, smoothed.", attrgetter("round_trip_s")),
    ("min_round_trip_seconds", GaugeMetricFamily,
     "Shortest round trip to a site in the last five minutes.", attrgetter("min_round_trip_s")),
    ("sent_segments", CounterMetricFamily,
     "TCP segments with data sent to a site, repeated ones included.", attrgetter("sent_segments")),
    ("retransmitted_segments", CounterMetricFamily,
     "Those of them that were sent again.", attrgetter("retransmitted_segments")),
)  # fmt: skip

_Row = tuple[str, str, float | None]
"""Name without its prefix, meaning, and value; None: left out."""


def _gauges(reading: MetricsReading) -> Sequence[_Row]:
    node, directive, allowance = reading.node, reading.directive, reading.allowance
    heat, demand = reading.heat, reading.demand
    capacity = reading.capacity if reading.capacity.samples_per_s > 0 else None
    return (
        ("capacity_samples_per_second",
         "Samples per second of wall time that this worker computes.",
         capacity.samples_per_s if capacity else None),
        ("capacity_window_seconds", "Time that the capacity was measured over.",
         capacity.window_s if capacity else None),
        ("local_batch_samples", "Samples of this worker in one iteration.",
         directive.local_batch_size if directive else None),
        ("global_batch_samples", "Samples of all workers in one iteration.",
         directive.global_batch_size if directive else None),
        ("directive_version", "Version of the last directive.",
         directive.version if directive else None),
        ("heat_compute_share_ratio", "Share of the time that the heat budget leaves to compute.",
         heat.share if heat else None),
        ("heat_target_celsius", "Temperature that the heat budget aims at.",
         heat.target_celsius if heat else None),
        ("heat_blind_count", "1 while the heat budget has no usable temperature, else 0.",
         float(heat.state in {HeatState.UNKNOWN, HeatState.BLIND}) if heat else None),
        ("demand_taken_cores", "Cores that other work takes from the machine.",
         demand.taken_cores if demand else None),
        ("demand_expected_cores", "Cores that other work is expected to take in the next steps.",
         demand.expected_cores if demand else None),
        ("demand_predicted_count", "1 while the capacity follows that forecast, else 0.",
         float(demand.state is DemandState.PREDICTED) if demand else None),
        ("demand_blind_count", "1 while the machine's CPU time cannot be read, else 0.",
         float(reading.is_demand_blind) if demand else None),
        ("iteration_own_seconds", "Time of one iteration without waiting for peers.",
         reading.iteration_s),
        ("trainer_connected_count", "Trainers connected to this sidecar: 0 or 1.",
         float(reading.trainer_connected)),
        ("trainer_silent_seconds", "Time since the trainer last sent something.",
         reading.trainer_silent_s),
        ("trainer_quota_cores", "CPU quota of the trainer.",
         allowance.quota_cores if allowance else None),
        ("node_quota_cores", "CPU quota of this container.", node.quota_cores),
        ("node_cpu_weight", "CPU weight of this container (100: default).", node.cpu_weight),
        ("node_cpu_pressure_ratio", "Time some task waited for a CPU.", node.cpu_pressure_ratio),
        ("node_memory_pressure_ratio", "Time some task waited for memory.",
         node.memory_pressure_ratio),
        ("node_io_pressure_ratio", "Time some task waited for a disk.", node.io_pressure_ratio),
        ("node_frequency_hertz", "Mean CPU frequency.", node.frequency_hertz),
        ("node_clock_limit_ratio", "Allowed clock over the greatest one.", node.clock_limit_ratio),
        ("node_temperature_celsius", "Hottest sensor.", node.temperature_celsius),
        ("node_memory_total_bytes", "Memory of the machine.", node.memory_total_bytes),
        ("node_memory_available_bytes", "Memory not in use.", node.memory_available_bytes),
        ("node_memory_limit_bytes", "Memory limit of this container.", node.memory_limit_bytes),
    )  # fmt: skip


def _group_gauges(reading: MetricsReading) -> Sequence[_Row]:
    grouping = reading.directive.grouping if reading.directive else None
    if grouping is None:
        return ()
    rank = reading.capacity.rank
    number = next((place for place, own in enumerate(grouping.groups, 1) if rank in own), None)
    return (
        ("link_group_number", "This worker's group by links, from 1.", number),
        ("link_groups_count", "Groups by links.", len(grouping.groups)),
        ("link_grouping_version", "How often groups were made; 0: they are the sites.",
         grouping.version),
        ("link_gateway_count", "1 while this worker is its group's gateway, else 0.",
         float(rank in grouping.gateways)),
    )  # fmt: skip


def _counters(reading: MetricsReading) -> Sequence[_Row]:
    allowance, node = reading.allowance, reading.node
    return (
        ("steps", "Local steps reported by the trainer.", reading.steps),
        ("samples", "Samples of those steps.", reading.samples),
        ("refused_measurements", "Messages of peers' sidecars refused.", reading.refused),
        ("certificate_renewals", "Certificates that have taken the place of the first.",
         reading.renewals),
        ("trainer_cpu_seconds", "CPU time of the trainer.", allowance.cpu_s if allowance else None),
        ("trainer_throttled_seconds", "Time that the quota held the trainer.",
         allowance.throttled_s if allowance else None),
        ("tcp_sent_segments", "TCP segments sent from this network namespace.",
         node.tcp_sent_segments),
        ("tcp_retransmitted_segments", "Those of them that were sent again.",
         node.tcp_retransmitted_segments),
    )  # fmt: skip
