"""The load of each worker and of the links to each site, from sidecars' metrics."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from dlion_cli.cluster.worker_metrics import WorkerMetrics
from dlion_cli.views.job_status import text
from dlion_results.summary.link_use import KINDS

_EXCHANGE_PARTS = frozenset({"select", "encode", "send", "decode", "apply"})
SILENT_AFTER_S: Final = 10.0
"""A trainer reports every two seconds that it runs; a small quota delays that."""


@dataclass(frozen=True)
class WorkerLoad:
    """One worker. None: unknown. Its fields are those of `-o json`, in snake case."""

    pod: str
    worker: str
    rank: int | None
    samples_per_second: float | None = None
    """Capacity: what it computes."""
    batch_samples: float | None = None
    share_fraction: float | None = None
    """Share of the global batch."""
    steps_per_second: float | None = None
    iteration_seconds: float | None = None
    """Seconds of an iteration without waiting for peers."""
    wait_fraction: float | None = None
    """Share of the steps' time held by synchronisation."""
    exchange_fraction: float | None = None
    """Share of selecting, encoding, sending, decoding and applying."""
    quota_cores: float | None = None
    cpu_cores: float | None = None
    throttled_fraction: float | None = None
    """Share of the CPU time that the trainer wanted and its quota withheld; since its start, if it
    has reported nothing between the readings."""
    cpu_pressure_fraction: float | None = None
    memory_pressure_fraction: float | None = None
    io_pressure_fraction: float | None = None
    retransmitted_fraction: float | None = None
    """Share of the TCP segments it sent that repeat lost ones."""
    sent_segments: float | None = None
    """TCP segments between the readings, with those that were sent again."""
    silent_seconds: float | None = None
    """Time since its trainer last sent something to the sidecar."""
    temperature_celsius: float | None = None
    other_work_cores: float | None = None
    """Cores of the node that other work uses."""
    expected_other_work_cores: float | None = None
    """Cores that other work is expected to use in the next steps."""
    follows_forecast: bool | None = None
    """Whether the capacity follows that forecast."""
    heat_compute_share_fraction: float | None = None
    """Share of the time that its heat budget leaves to compute."""
    heat_target_celsius: float | None = None
    heat_is_blind: bool | None = None
    """Whether the heat budget has no usable temperature."""
    link_group: int | None = None
    """Its group by links, from 1 (topology `clustered`)."""
    link_groups: int | None = None
    """How many groups there are."""
    link_grouping_version: int | None = None
    """How often groups were made by rates of links; 0: they are the sites."""
    is_gateway: bool | None = None
    problem: str = ""
    """Why figures are missing."""


@dataclass(frozen=True)
class SiteLoad:
    """The links from this site's workers to one site, summed."""

    site: str
    budget_bytes_per_iteration: float | None
    bandwidth_bytes_per_second: float | None
    sent_bytes_per_second: float | None = None
    """Sent bytes per second since the last reading."""
    used_fraction: float | None = None
    """Sent bytes over the bandwidth, of the workers that have both. Above 1 if bytes of a long step
    are counted at its end."""
    sent_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes sent since the sidecars started, by kind; empty: not counted."""
    round_trip_seconds: float | None = None
    """The longest one of its connections, with the time in queues."""
    min_round_trip_seconds: float | None = None
    """The shortest one of the last five minutes."""
    retransmitted_fraction: float | None = None
    """Share of the TCP segments sent between the readings that repeat lost ones."""
    sent_segments: float | None = None
    """TCP segments with data sent between the readings, repeated ones included."""


@dataclass(frozen=True)
class JobLoad:
    """All workers of one site, and the sites that they exchange with."""

    workers: list[WorkerLoad]
    sites: list[SiteLoad]

    def as_json(self) -> dict[str, Any]:
        """Return the document for `-o json`, with the manifest's style of names."""
        return {
            "workers": [_camel(asdict(each)) for each in self.workers],
            "sites": [_camel(asdict(each)) for each in self.sites],
        }


def worker_load(
    pod: str, worker: str, rank: int | None, before: WorkerMetrics | None, now: WorkerMetrics
) -> WorkerLoad:
    """The load of one worker; rates are since `before`, unless its counters were reset since."""
    values = now.values
    batch, all_batches = values.get("local_batch_samples"), values.get("global_batch_samples")
    quota = values.get("trainer_quota_cores", values.get("node_quota_cores"))
    new = _growth("tcp_sent_segments_total", before, now)
    again = _growth("tcp_retransmitted_segments_total", before, now)
    sent = None if new is None or again is None else new + again  # the kernel counts them apart
    return WorkerLoad(
        pod,
        worker,
        rank,
        samples_per_second=values.get("capacity_samples_per_second"),
        batch_samples=batch,
        share_fraction=batch / all_batches if batch is not None and all_batches else None,
        steps_per_second=_rate("steps_total", before, now),
        iteration_seconds=values.get("iteration_own_seconds") or None,  # 0 before the first
        wait_fraction=_share({"wait"}, before, now),
        exchange_fraction=_share(_EXCHANGE_PARTS, before, now),
        quota_cores=quota,
        cpu_cores=_rate("trainer_cpu_seconds_total", before, now),
        throttled_fraction=_throttled(before, now),
        cpu_pressure_fraction=values.get("node_cpu_pressure_ratio"),
        memory_pressure_fraction=values.get("node_memory_pressure_ratio"),
        io_pressure_fraction=values.get("node_io_pressure_ratio"),
        retransmitted_fraction=again / sent if sent and again is not None else None,
        sent_segments=sent,
        silent_seconds=values.get("trainer_silent_seconds"),
        temperature_celsius=values.get("node_temperature_celsius"),
        other_work_cores=values.get("demand_taken_cores"),
        expected_other_work_cores=values.get("demand_expected_cores"),
        follows_forecast=_flag(values.get("demand_predicted_count")),
        heat_compute_share_fraction=values.get("heat_compute_share_ratio"),
        heat_target_celsius=values.get("heat_target_celsius"),
        heat_is_blind=_flag(values.get("heat_blind_count")),
        link_group=_count(values.get("link_group_number")),
        link_groups=_count(values.get("link_groups_count")),
        link_grouping_version=_count(values.get("link_grouping_version")),
        is_gateway=_flag(values.get("link_gateway_count")),
        problem=_problem(values),
    )


def _flag(value: float | None) -> bool | None:
    return None if value is None else value > 0


def _count(value: float | None) -> int | None:
    return None if value is None else round(value)


def _problem(values: Mapping[str, float]) -> str:
    if not values.get("trainer_connected_count", 1):
        return "its trainer is away"
    silent_s = values.get("trainer_silent_seconds", 0.0)
    return f"its trainer is silent for {silent_s:.0f} s" if silent_s > SILENT_AFTER_S else ""


def _throttled(before: WorkerMetrics | None, now: WorkerMetrics) -> float | None:
    """Held and used time are both sums over the processors, so their ratio is at most 1."""
    names = "trainer_throttled_seconds_total", "trainer_cpu_seconds_total"
    held_s, ran_s = (_growth(name, before, now) or 0.0 for name in names)
    if not ran_s:
        held_s, ran_s = (now.values.get(name, 0.0) for name in names)
    return held_s / (held_s + ran_s) if held_s + ran_s > 0 else None


def _growth(name: str, before: WorkerMetrics | None, now: WorkerMetrics) -> float | None:
    """The growth of a counter; None if it was reset or is unknown."""
    if before is None or name not in before.values or name not in now.values:
        return None
    grown = now.values[name] - before.values[name]
    return grown if grown >= 0 else None


def _rate(name: str, before: WorkerMetrics | None, now: WorkerMetrics) -> float | None:
    grown = _growth(name, before, now)
    if before is None or grown is None or now.time_s <= before.time_s:
        return None
    return grown / (now.time_s - before.time_s)


def _share(
    wanted: Collection[str], before: WorkerMetrics | None, now: WorkerMetrics
) -> float | None:
    """Share of these parts of the steps that ended since `before`; None: no step did."""
    if before is None:
        return None
    earlier, later = (each.parts.get("step_seconds_total", {}) for each in (before, now))
    grown = {part: value - earlier.get(part, 0.0) for part, value in later.items()}
    total_s = sum(grown.values())
    if total_s <= 0 or min(grown.values()) < 0:  # the sidecar was restarted in between
        return None
    return sum(value for part, value in grown.items() if part in wanted) / total_s


def site_loads(
    before: Mapping[str, WorkerMetrics], now: Mapping[str, WorkerMetrics]
) -> list[SiteLoad]:
    """The links to each site, summed over the workers of these readings, by pod."""
    metrics = list(now.values())
    names = sorted({site for each in metrics for site in (*each.by_site, *each.sent)})
    loads = []
    for site in names:
        bandwidth = _sum(metrics, site, "link_bandwidth_bytes_per_second")
        pairs = ((before[pod], reading) for pod, reading in now.items() if pod in before)
        rates = [
            (rate, _bandwidth(site, pair[1]))
            for pair in pairs
            if (rate := _sent_rate(site, *pair)) is not None
        ]
        sent = sum(rate for rate, _ in rates) if rates else None
        both = [(rate, most) for rate, most in rates if most is not None]
        most = sum(most for _, most in both)
        used = sum(rate for rate, _ in both) / most if most else None
        budget = _sum(metrics, site, "link_budget_bytes")
        counted = [each.sent[site] for each in metrics if site in each.sent]
        by_kind = {kind: sum(each.get(kind, 0.0) for each in counted)
                   for kind in KINDS if counted}  # fmt: skip
        segments = _grown(site, "link_sent_segments_total", before, now)
        again = _grown(site, "link_retransmitted_segments_total", before, now)
        loads.append(
            SiteLoad(
                text(site),
                budget,
                bandwidth,
                sent,
                used,
                by_kind,
                max(_of_links(metrics, site, "link_round_trip_seconds"), default=None),
                min(_of_links(metrics, site, "link_min_round_trip_seconds"), default=None),
                again / segments if segments and again is not None else None,
                segments,
            )
        )
    return loads


def _sent_rate(site: str, before: WorkerMetrics, now: WorkerMetrics) -> float | None:
    """Bytes per second to that site; None if the sidecar was restarted or does not count them."""
    if site not in now.sent or now.time_s <= before.time_s:
        return None
    grown = sum(now.sent[site].values()) - sum(before.sent.get(site, {}).values())
    return grown / (now.time_s - before.time_s) if grown >= 0 else None


def _bandwidth(site: str, now: WorkerMetrics) -> float | None:
    return now.by_site.get(site, {}).get("link_bandwidth_bytes_per_second")


def _of_links(metrics: Sequence[WorkerMetrics], site: str, name: str) -> list[float]:
    return [each.by_site[site][name] for each in metrics if name in each.by_site.get(site, {})]


def _sum(metrics: Sequence[WorkerMetrics], site: str, name: str) -> float | None:
    found = _of_links(metrics, site, name)
    return sum(found) if found else None


def _grown(
    site: str, name: str, before: Mapping[str, WorkerMetrics], now: Mapping[str, WorkerMetrics]
) -> float | None:
    """Growth of a counter of the links to a site, of the workers that were read twice."""
    pairs = ((before[pod].by_site, now[pod].by_site) for pod in now if pod in before)
    grown = [
        later[site][name] - earlier.get(site, {}).get(name, 0.0)
        for earlier, later in pairs
        if name in later.get(site, {})
    ]
    return sum(grown) if grown and min(grown) >= 0 else None


def _camel(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Names as in a manifest: `batchSamples`."""
    named = {}
    for name, value in fields.items():
        first, *others = name.split("_")
        named[first + "".join(part.title() for part in others)] = value
    return named
