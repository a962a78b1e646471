"""Tests of the chart's alerts and dashboards against docs/metrics.md.

Every metric, label and label value in a query is on the page. The page has the operator's metrics
as its code makes them; tests/unit/worker/sidecar checks those of sidecars. Queries use the increase
of counters, and of counters only. Every alert is documented and names what to check.

Left out: whether a query answers its question; PromQL's grammar except balanced brackets.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from dlion_api.status_names import State
from dlion_operator.controller.work_queue import DEFECT, ERROR, OK

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "dlion"
DOCUMENT = (ROOT / "docs" / "metrics.md").read_text()
ALERTS = [
    rule
    for group in yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
OPERATOR_METRICS = ROOT / "operator" / "dlion_operator" / "controller" / "metrics.py"
SIDECARS = {"namespace", "job", "site"}
SCRAPED = {"pod", "le"}
"""Labels added by the scraper to metrics of sidecars, and the label of buckets of a histogram."""


def section(title: str) -> str:
    """The text below that heading."""
    return DOCUMENT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def metrics() -> dict[str, tuple[str, set[str]]]:
    """Type and labels of every metric, by its name in Prometheus."""
    found = {}
    rows = re.findall(r"^- `(\w+)` \((\w+)\): ", section("Sidecars"), re.MULTILINE)
    for name, kind in rows:
        found[name] = (kind, SIDECARS | ({"peer_site"} if "_link_" in name else set()))
    rows = re.findall(r"^- `(\w+)` \((\w+)(.*?)\): ", section("The operator"), re.MULTILINE)
    for name, kind, labels in rows:
        series = f"{name}_bucket" if kind == "histogram" else name
        found[series] = (kind, set(re.findall(r"`(\w+)`", labels)))
    return found


KNOWN = metrics()


def queries() -> Iterator[Any]:
    """Every query of the chart, under the name of its alert or panel."""
    for rule in ALERTS:
        yield pytest.param(rule["expr"], id=rule["alert"])
    for path in sorted((CHART / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield pytest.param(target["expr"], id=f"{path.stem}: {panel['title']}")


def test_both_lists_are_read() -> None:
    assert {"dlion_steps_total", "dlion_node_temperature_celsius", "dlion_job_state"} < set(KNOWN)
    assert KNOWN["dlion_operator_reconcile_seconds_bucket"] == ("histogram", set())
    assert KNOWN["dlion_job_state"] == ("gauge", {"namespace", "job", "state"})


def made_by_the_operator() -> dict[str, str]:
    """Type of every metric that the operator's code makes, by its name in Prometheus."""
    found = {}
    for call in ast.walk(ast.parse(OPERATOR_METRICS.read_text())):
        made = re.fullmatch(
            r"_?(Counter|Gauge|Histogram|counter|gauge)",
            getattr(getattr(call, "func", None), "id", ""),
        )
        if isinstance(call, ast.Call) and made is not None:
            name = ast.literal_eval(call.args[0])
            kind = made[1].lower()
            found[f"{name}_total" if kind == "counter" else name] = kind
    return found


def test_exactly_the_operators_metrics_are_documented() -> None:
    rows = re.findall(r"^- `(\w+)` \((\w+)[;)]", section("The operator"), re.MULTILINE)
    assert len(rows) > 15
    assert dict(rows) == made_by_the_operator()


@pytest.mark.parametrize("query", list(queries()))
def test_a_query_uses_existing_metrics(query: str) -> None:
    named = re.findall(r"\bdlion_\w+", query)
    assert named
    assert set(named) <= set(KNOWN)
    labels = set.union(*(KNOWN[name][1] for name in named)) | SCRAPED
    grouped = ",".join(re.findall(r"\b(?:by|on) \(([^)]*)\)", query))
    assert set(re.findall(r"\w+", grouped)) <= labels
    for name, matchers in re.findall(r"(dlion_\w+)\{([^}]*)\}", query):
        assert set(re.findall(r"(\w+)=", matchers)) <= KNOWN[name][1] | SCRAPED
    for states in re.findall(r'state=~?"([^"]*)"', query):
        assert set(states.split("|")) <= {str(state) for state in State}
    for opening, closing in ("()", "{}", "[]"):
        assert query.count(opening) == query.count(closing)


@pytest.mark.parametrize("query", list(queries()))
def test_queries_use_the_increase_of_counters_and_of_counters_only(query: str) -> None:
    ranged = r"(?:rate|increase)\((dlion_\w+)(?:\{[^}]*\})?\["
    increasing = set(re.findall(ranged, query))
    for name in re.findall(r"\bdlion_\w+", query):
        assert (name in increasing) == (KNOWN[name][0] in {"counter", "histogram"}), name


def test_every_result_of_a_resync_is_documented_and_each_failure_has_an_alert() -> None:
    (row,) = re.findall(r"^- `dlion_operator_reconciles_total`.*$", DOCUMENT, re.MULTILINE)
    assert {f"`{result}`" for result in (OK, ERROR, DEFECT)} <= set(re.findall(r"`\w+`", row))
    alerted = [re.findall(r'result=~?"([^"]*)"', rule["expr"]) for rule in ALERTS]
    assert [found for found in alerted if found] == [[f"{ERROR}|{DEFECT}"]]


def test_every_alert_is_documented_and_names_what_to_check() -> None:
    documented = re.findall(r"^- `(DLion\w+)`: ", section("Alerts"), re.MULTILINE)
    assert documented == [rule["alert"] for rule in ALERTS]
    for rule in ALERTS:
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert len(rule["annotations"]["description"]) > 40
        assert rule["annotations"]["summary"]


def test_the_text_of_an_alert_uses_labels_that_its_query_keeps() -> None:
    for rule in ALERTS:
        named = set.union(*(KNOWN[name][1] for name in re.findall(r"\bdlion_\w+", rule["expr"])))
        aggregated = re.match(r"(?:sum|max) by \(([^)]*)\)", rule["expr"])
        left = set(re.findall(r"\w+", aggregated[1])) if aggregated else named | {"pod"}
        used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        assert used <= left, rule["alert"]
