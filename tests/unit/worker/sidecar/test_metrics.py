"""Tests of metric families against docs/metrics.md.

A full reading exports the families that the document lists for sidecars, with its names and labels.
Missing facts omit their family.

Left out: HTTP (tests/local).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.measurements import (
    Capacity,
    CapacitySource,
    CpuAllowance,
    Directive,
    Grouping,
    LinkDelivery,
    PhaseSeconds,
    SentBytes,
    StepTiming,
)
from dlion_core.demand.demand_predictor import DemandDecision, DemandState
from dlion_core.heat.heat_controller import HeatDecision, HeatState
from dlion_worker.sidecar.link_connections import SiteConnections
from dlion_worker.sidecar.metrics import MAX_LABELLED_PEERS, MetricsReading, SidecarMetrics
from dlion_worker.sidecar.node_facts import NodeFacts
from dlion_worker.sidecar.trainer_totals import LinkBytes, StepSeconds

DOCUMENT = Path(__file__).parents[4] / "docs" / "metrics.md"
MANY = tuple((rank, "c", rank) for rank in range(4, 4 + MAX_LABELLED_PEERS))
"""Together with one of the other three, too many peers for a label each."""
PEERS = {
    Rank(rank): WorkerIdentity(Rank(rank), SiteName(site), "gpu", index)
    for rank, site, index in ((1, "a", 1), (2, "b", 0), (3, "b", 1), *MANY)
}


GROUPS = Grouping(5, Rank(0), ((Rank(0), Rank(2)), (Rank(1),), (Rank(3),)), (2, 1, 3))


def exported(reading: MetricsReading) -> str:
    registry = CollectorRegistry()
    key = JobKey("default", "cifar10", "1")
    metrics = SidecarMetrics(
        job=key, site=SiteName("a"), peer=PEERS.__getitem__, read=lambda: reading
    )
    registry.register(metrics)
    return generate_latest(registry).decode()


def reading(*, full: bool) -> MetricsReading:
    return MetricsReading(
        capacity=Capacity(Rank(0), 120.0, 2.0, CapacitySource.RATE, 3)
        if full
        else Capacity(Rank(0), 0.0, 0.0, CapacitySource.UNKNOWN, 0),
        directive=Directive(
            3, 48, 192, {Rank(2): 10, Rank(3): 20}, {}, {Rank(1): 5.0}, grouping=GROUPS
        )
        if full
        else None,
        allowance=CpuAllowance(0.5, 1.0, 2.0) if full else None,
        steps=3,
        samples=144,
        iteration_s=0.4,
        trainer_connected=True,
        trainer_silent_s=1.5 if full else None,
        refused=0,
        refusals={("exchange", "served", "BadCertificate"): 2} if full else {},
        renewals=0,
        heat=HeatDecision(0.6, HeatState.LIMITED, 0.6, 70.0, 74.0) if full else None,
        demand=DemandDecision(90.0, DemandState.PREDICTED, 0.1, 2.0, 4.0, "level")
        if full
        else None,
        step_seconds={"compute": 3.0, "wait": 1.0} if full else {},
        exchange_thread_seconds={"send": 0.5} if full else {},
        link_bytes=((Rank(1), "gradient", 9),) if full else (),
        connections={SiteName("b"): SiteConnections(200, 5, 0.25, 0.04)} if full else {},
        node=NodeFacts(0.5, 100.0, 0.1, 0.1, 1e9, 50.0, 1e9, 1e9, 1e9, 0.1, 100.0, 1.0, 0.5)
        if full
        else NodeFacts(),
    )


def test_the_document_lists_what_is_exported_and_nothing_else() -> None:
    names = set(re.findall(r"^(dlion_\w+)\{", exported(reading(full=True)), re.MULTILINE))
    ours = DOCUMENT.read_text().partition("## Sidecars")[2].partition("\n## ")[0]
    assert names == set(re.findall(r"^- `(dlion_\w+)`", ours, re.MULTILINE))


def test_the_parts_of_steps_add_up_to_their_time_and_never_decrease() -> None:
    seconds = StepSeconds()
    phases = PhaseSeconds(0.1, 0.05, 0.0, 0.1, 0.05, link_send_s=0.2, link_receive_s=0.3)
    step = StepTiming(1, 48, 1.0, 2.0, 2.0, waited_s=0.5, phases=phases)
    seconds.add(step)
    first = seconds.main
    assert sum(first.values()) == pytest.approx(2.0)
    assert first["other"] == pytest.approx(0.2)
    seconds.add(replace(step, wall_s=0.1))  # clocks may differ by their resolution
    assert all(seconds.main[part] >= value for part, value in first.items())
    assert seconds.thread == {"send": 0.4, "receive": 0.6}
    text = exported(replace(reading(full=True), step_seconds=seconds.main))
    assert re.search(r'^dlion_step_seconds_total{.*part="wait".*} 1.0$', text, re.MULTILINE)


def test_links_are_summed_per_site() -> None:
    labels = 'job="cifar10",namespace="default",peer_site="b",site="a"'
    assert f"dlion_link_budget_bytes{{{labels}}} 30.0" in exported(reading(full=True))


@pytest.mark.parametrize(
    ("rank", "expected"),
    [(0, [1, 3, 5, 0]), (2, [1, 3, 5, 1]), (3, [3, 3, 5, 1]), (9, [3, 5, 0])],
    ids=["member", "gateway", "alone", "not in it"],
)
def test_a_worker_has_its_group_and_its_part_in_it(rank: int, expected: list[int]) -> None:
    capacity = replace(reading(full=True).capacity, rank=Rank(rank))
    text = exported(replace(reading(full=True), capacity=capacity))
    names = "link_group_number|link_groups_count|link_grouping_version|link_gateway_count"
    found = re.findall(rf"^dlion_(?:{names}){{.*}} (.*)$", text, re.MULTILINE)
    assert [float(value) for value in found] == expected


@pytest.mark.parametrize(
    ("others", "found"),
    [
        (
            MANY[2:],
            {("b/gpu-0", "gradient"): 30, ("b/gpu-0", "state"): 7, ("b/gpu-1", "gradient"): 5},
        ),
        (MANY[1:], {("", "gradient"): 35, ("", "state"): 7}),
    ],
    ids=["63 peers", "64 peers"],
)
def test_sent_bytes_add_up_by_peer_or_by_site(
    others: Sequence[tuple[int, str, int]], found: dict[tuple[str, str], float]
) -> None:
    sent = LinkBytes()
    for rank, by_kind in ((2, SentBytes(10)), (2, SentBytes(20, state_bytes=7)), (3, SentBytes(5))):
        sent.add(LinkDelivery(Rank(rank), 0, 0, 0.0, 0, by_kind))
    for rank, _, _ in others:
        sent.add(LinkDelivery(Rank(rank), 0, 0, 0.0, 0, SentBytes(header_bytes=1)))
    full = replace(reading(full=True), link_bytes=tuple(sent.rows()))
    text = exported(full)
    rows = re.findall(r"^dlion_link_sent_bytes_total{(.*)} (.*)$", text, re.MULTILINE)
    labels = [(dict(re.findall(r'(\w+)="([^"]*)"', each)), float(value)) for each, value in rows]
    at_b = [(each, value) for each, value in labels if each["peer_site"] == "b"]
    assert {(each["peer"], each["kind"]): value for each, value in at_b} == found
    assert sum(value for _, value in labels) == 42 + len(others)


def test_an_impossible_rank_does_not_end_the_metrics() -> None:
    none = Rank(10**12)
    directive = Directive(3, 48, 192, {none: 10, Rank(2): 5}, {}, {none: 5.0})
    rows = ((none, "gradient", 9), (Rank(2), "gradient", 4))
    text = exported(replace(reading(full=True), directive=directive, link_bytes=rows))
    assert re.findall(r"^dlion_link_sent_bytes_total{.*} (.*)$", text, re.MULTILINE) == ["4.0"]
    assert re.findall(r"^dlion_link_budget_bytes{.*} (.*)$", text, re.MULTILINE) == ["5.0"]


def test_a_site_without_a_connection_keeps_its_counts_and_has_no_round_trip() -> None:
    connections = {SiteName("b"): SiteConnections(200, 5)}
    text = exported(replace(reading(full=True), connections=connections))
    labels = 'job="cifar10",namespace="default",peer_site="b",site="a"'
    assert f"dlion_link_sent_segments_total{{{labels}}} 200.0" in text
    assert f"dlion_link_retransmitted_segments_total{{{labels}}} 5.0" in text
    assert "round_trip_seconds{" not in text


def test_unreadable_facts_are_left_out() -> None:
    text = exported(reading(full=False))
    assert "dlion_node" not in text
    assert "dlion_capacity" not in text
    assert "dlion_link_b" not in text
    assert "dlion_link_sent_bytes_total{" not in text
    assert "_segments_total{" not in text
    assert "dlion_steps_total" in text
