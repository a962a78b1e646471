"""Prometheus metrics of one sidecar, over HTTP.

docs/metrics.md lists them (a test compares both). Values are read on each request, in the HTTP
server's thread, from objects that are replaced as a whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dlion_api.names import JobKey, Rank, SiteName
from dlion_api.protocol.measurements import Capacity, CpuAllowance, Directive
from dlion_worker.sidecar.node_facts import NodeFacts
from dlion_worker.sidecar.refusal_counter import RefusalKey


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
    refused: int
    refusals: Mapping[RefusalKey, int]
    renewals: int
    node: NodeFacts


class SidecarMetrics(Collector):
    """Converts a reading to metric families. Links are summed per pair of sites."""

    def __init__(
        self,
        *,
        job: JobKey,
        site: SiteName,
        site_of: Callable[[Rank], SiteName],
        read: Callable[[], MetricsReading],
    ) -> None:
        self._labels = {"namespace": job.namespace, "job": job.name, "site": str(site)}
        self._site_of, self._read = site_of, read

    def collect(self) -> Iterator[Metric]:
        reading = self._read()
        yield from self._work(reading)
        yield from self._links(reading.directive)
        yield from self._trainer(reading)
        yield from self._node(reading.node)

    def _work(self, reading: MetricsReading) -> Iterator[Metric]:
        capacity, directive = reading.capacity, reading.directive
        if capacity.samples_per_s > 0:
            yield self._gauge(
                "dlion_capacity_samples_per_second",
                "Samples per second of wall time that this worker computes.",
                capacity.samples_per_s,
            )
            yield self._gauge(
                "dlion_capacity_window_seconds",
                "Time that the capacity was measured over.",
                capacity.window_s,
            )
        if directive is not None:
            yield self._gauge(
                "dlion_local_batch_samples",
                "Samples of this worker in one iteration.",
                directive.local_batch_size,
            )
            yield self._gauge(
                "dlion_global_batch_samples",
                "Samples of all workers in one iteration.",
                directive.global_batch_size,
            )
            yield self._gauge(
                "dlion_directive_version", "Version of the last directive.", directive.version
            )
        yield self._counter("dlion_steps", "Local steps reported by the trainer.", reading.steps)
        yield self._counter("dlion_samples", "Samples of those steps.", reading.samples)
        yield self._gauge(
            "dlion_iteration_own_seconds",
            "Time of one iteration without waiting for peers.",
            reading.iteration_s,
        )
        yield self._counter(
            "dlion_refused_measurements", "Messages of peers' sidecars refused.", reading.refused
        )
        refusals = CounterMetricFamily(
            "dlion_peer_refusals",
            "Peers' calls refused here, and own calls that peers refused.",
            labels=[*self._labels, "port", "side", "reason"],
        )
        for place, count in reading.refusals.items():
            refusals.add_metric([*self._labels.values(), *place], count)
        yield refusals
        yield self._counter(
            "dlion_certificate_renewals",
            "Certificates that have taken the place of the first.",
            reading.renewals,
        )

    def _links(self, directive: Directive | None) -> Iterator[Metric]:
        if directive is None:
            return
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

    def _trainer(self, reading: MetricsReading) -> Iterator[Metric]:
        yield self._gauge(
            "dlion_trainer_connected_count",
            "Trainers connected to this sidecar: 0 or 1.",
            float(reading.trainer_connected),
        )
        allowance = reading.allowance
        if allowance is None:
            return
        if allowance.quota_cores is not None:
            yield self._gauge(
                "dlion_trainer_quota_cores", "CPU quota of the trainer.", allowance.quota_cores
            )
        yield self._counter(
            "dlion_trainer_cpu_seconds", "CPU time of the trainer.", allowance.cpu_s
        )
        yield self._counter(
            "dlion_trainer_throttled_seconds",
            "Time that the quota held the trainer.",
            allowance.throttled_s,
        )

    def _node(self, node: NodeFacts) -> Iterator[Metric]:
        for name, meaning, value in (
            ("quota_cores", "CPU quota of this container.", node.quota_cores),
            ("cpu_weight", "CPU weight of this container (100: default).", node.cpu_weight),
            ("cpu_pressure_ratio", "Time some task waited for a CPU.", node.cpu_pressure_ratio),
            ("memory_pressure_ratio", "Time some task waited for memory.",
             node.memory_pressure_ratio),
            ("frequency_hertz", "Mean CPU frequency.", node.frequency_hertz),
            ("temperature_celsius", "Hottest sensor.", node.temperature_celsius),
            ("memory_total_bytes", "Memory of the machine.", node.memory_total_bytes),
            ("memory_available_bytes", "Memory not in use.", node.memory_available_bytes),
            ("memory_limit_bytes", "Memory limit of this container.", node.memory_limit_bytes),
        ):  # fmt: skip
            if value is not None:
                yield self._gauge(f"dlion_node_{name}", meaning, value)

    def _gauge(self, name: str, meaning: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, meaning, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, meaning: str, value: float) -> Metric:
        family = CounterMetricFamily(name, meaning, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _per_site(self, name: str, meaning: str, values: Mapping[Rank, float]) -> Metric:
        family = GaugeMetricFamily(name, meaning, labels=[*self._labels, "peer_site"])
        totals: dict[str, float] = {}
        for rank, value in values.items():
            site = str(self._site_of(rank))
            totals[site] = totals.get(site, 0.0) + value
        for site, total in sorted(totals.items()):
            family.add_metric([*self._labels.values(), site], total)
        return family


def serve_metrics(
    metrics: SidecarMetrics, *, host: str, port: int
) -> tuple[WSGIServer, threading.Thread]:
    """Start an HTTP server (see its `server_port`); return it and its thread.

    Raises: OSError if the address is unavailable.
    """
    registry = CollectorRegistry()
    registry.register(metrics)
    ProcessCollector(registry=registry)
    return start_http_server(port, addr=host, registry=registry)
