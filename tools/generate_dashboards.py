"""Generate the chart's Grafana dashboards from the tables below; `--check` only compares.

Each panel has a title, a query and a unit. Tests compare every query with docs/metrics.md.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generated_files import options, write_or_compare

TARGET = Path(__file__).parent.parent / "helm" / "dlion" / "dashboards"
SOURCE = {"type": "prometheus", "uid": "${source}"}
OURS = 'namespace=~"$namespace", job=~"$job"'
COLUMNS, WIDTH, HEIGHT = 3, 8, 8


@dataclass(frozen=True)
class Panel:
    """One chart over time."""

    title: str
    query: str
    legend: str
    unit: str = "short"
    stacked: bool = False


TRAINING = (
    Panel("State", f"dlion_job_state{{{OURS}}} == 1", "{{namespace}}/{{job}} {{state}}"),
    Panel("Progress", f"dlion_job_progress_ratio{{{OURS}}}", "{{namespace}}/{{job}}",
          "percentunit"),
    Panel("Missing workers",
          f"dlion_job_expected_workers{{{OURS}}} - dlion_job_ready_workers{{{OURS}}}",
          "{{namespace}}/{{job}}"),
    Panel("Steps per second",
          f"sum by (namespace, job, site) (rate(dlion_steps_total{{{OURS}}}[$__rate_interval]))",
          "{{job}} {{site}}"),
    Panel("Samples per second",
          f"sum by (namespace, job, site) (rate(dlion_samples_total{{{OURS}}}[$__rate_interval]))",
          "{{job}} {{site}}", stacked=True),
    Panel("Iteration time without waiting", f"dlion_iteration_own_seconds{{{OURS}}}",
          "{{site}} {{pod}}", "s"),
    Panel("Batch shares", f"dlion_local_batch_samples{{{OURS}}}", "{{site}} {{pod}}",
          stacked=True),
    Panel("Capacity (samples per second)", f"dlion_capacity_samples_per_second{{{OURS}}}",
          "{{site}} {{pod}}", stacked=True),
    Panel("Global batch", f"max by (namespace, job) (dlion_global_batch_samples{{{OURS}}})",
          "{{namespace}}/{{job}}"),
    Panel("Bandwidth between sites",
          f"sum by (site, peer_site) (dlion_link_bandwidth_bytes_per_second{{{OURS}}})",
          "{{site}} to {{peer_site}}", "Bps"),
    Panel("Link budget per iteration",
          f"sum by (site, peer_site) (dlion_link_budget_bytes{{{OURS}}})",
          "{{site}} to {{peer_site}}", "bytes"),
    Panel("Round trip between sites",
          f"max by (site, peer_site) (dlion_link_round_trip_seconds{{{OURS}}})",
          "{{site}} to {{peer_site}}", "s"),
    Panel("Fraction of TCP segments sent again",
          "sum by (site, peer_site)"
          f" (rate(dlion_link_retransmitted_segments_total{{{OURS}}}[$__rate_interval]))"
          " / sum by (site, peer_site)"
          f" (rate(dlion_link_sent_segments_total{{{OURS}}}[$__rate_interval]))",
          "{{site}} to {{peer_site}}", "percentunit"),
    Panel("Fraction of time that trainers are throttled",
          f"rate(dlion_trainer_throttled_seconds_total{{{OURS}}}[$__rate_interval])",
          "{{site}} {{pod}}", "percentunit"),
    Panel("CPU cores used by trainers",
          f"rate(dlion_trainer_cpu_seconds_total{{{OURS}}}[$__rate_interval])",
          "{{site}} {{pod}}"),
    Panel("CPU pressure of nodes", f"dlion_node_cpu_pressure_ratio{{{OURS}}}",
          "{{site}} {{pod}}", "percentunit"),
    Panel("Temperature of nodes", f"dlion_node_temperature_celsius{{{OURS}}}", "{{site}} {{pod}}",
          "celsius"),
    Panel("Available memory of nodes", f"dlion_node_memory_available_bytes{{{OURS}}}",
          "{{site}} {{pod}}", "bytes"),
    Panel("Disconnected trainers", f"sum by (site) (1 - dlion_trainer_connected_count{{{OURS}}})",
          "{{site}}"),
    Panel("Rejected measurements",
          f"sum by (site) (rate(dlion_refused_measurements_total{{{OURS}}}[$__rate_interval]))",
          "{{site}}"),
)  # fmt: skip
OPERATOR = (
    Panel("Jobs by state", "sum by (state) (dlion_job_state)", "{{state}}", stacked=True),
    Panel("Reconciles per second",
          "sum by (result) (rate(dlion_operator_reconciles_total[$__rate_interval]))",
          "{{result}}"),
    Panel("Reconcile time (95th percentile)",
          "histogram_quantile(0.95,"
          " sum by (le) (rate(dlion_operator_reconcile_seconds_bucket[$__rate_interval])))",
          "95 %", "s"),
    Panel("API server errors per second",
          "sum by (code) (rate(dlion_operator_api_errors_total[$__rate_interval]))", "{{code}}"),
    Panel("Age of watches", "dlion_operator_watch_age_seconds", "{{pod}}", "s"),
    Panel("Event loop lag", "dlion_operator_loop_lag_seconds", "{{pod}}", "s"),
    Panel("Coordinator rejections per second",
          "sum by (reason) (rate(dlion_coordinator_refusals_total[$__rate_interval]))",
          "{{reason}}"),
)  # fmt: skip
DASHBOARDS = {
    "training": ("DLion: training", TRAINING, ("namespace", "job")),
    "operator": ("DLion: operator", OPERATOR, ()),
}


def dashboard(name: str) -> dict[str, Any]:
    """Return Grafana's model of one dashboard."""
    title, panels, choices = DASHBOARDS[name]
    return {
        "uid": f"dlion-{name}",
        "title": title,
        "tags": ["dlion"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source(), *(choice(each) for each in choices)]},
        "panels": [drawn(panel, place) for place, panel in enumerate(panels)],
    }


def source() -> dict[str, Any]:
    """Return the variable for the Prometheus data source."""
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def choice(label: str) -> dict[str, Any]:
    """Return the variable for values of one label; all by default."""
    return {
        "name": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": f"label_values(dlion_job_state, {label})", "refId": label},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def drawn(panel: Panel, place: int) -> dict[str, Any]:
    """Return Grafana's model of the panel; positions are counted row by row."""
    row, column = divmod(place, COLUMNS)
    custom: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never"}
    if panel.stacked:
        custom |= {"fillOpacity": 40, "stacking": {"mode": "normal"}}
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list"}},
        "targets": [
            {
                "refId": "A",
                "datasource": SOURCE,
                "expr": panel.query,
                "legendFormat": panel.legend,
            }
        ],
    }


def text(name: str) -> str:
    return json.dumps(dashboard(name), indent=1) + "\n"


def main() -> int:
    """Write or compare; return 1 if a file is out of date."""
    files = {TARGET / f"{name}.json": text(name) for name in DASHBOARDS}
    return write_or_compare(files, check=options(__doc__).parse_args().check)


if __name__ == "__main__":
    sys.exit(main())
