"""Tests of a shared uplink.

Three workers of a site that share its uplink plan together for its rate, and no more. With an
uplink for each link they plan for three times that.

Left out: rates of pipes (tests/unit/simulator/test_network); the shaping of real links
(tests/local/test_network_sites).
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.simulations import Case, Simulated, four_workers, simulate_all

UPLINK_BYTES_PER_S = 2e6 / 8
SHAPES = {"sharedUplink": 1, "perPeer": 3}
"""The rate that its three workers have together, as a multiple of the site's rate."""


def case(shape: str) -> Case:
    environment = four_workers(linkShape=shape, betweenSites={"mbitPerS": 2, "latencyMs": 20})
    settings = {
        "exchange.policy": "dlion",
        "network.linkShape": shape,
        "trainer.dataset": {"name": "digits", "partition": "iid"},
        "trainer.stop": {"maxSteps": 60},
        "sites": [
            {"name": "a", "groups": [{"name": "g", "workers": 3}]},
            {"name": "b", "groups": [{"name": "g", "workers": 1}]},
        ],
    }
    return Case(environment, settings)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Simulated]:
    return simulate_all(tmp_path_factory.mktemp("uplink"), {s: case(s) for s in SHAPES})


def planned(run: Simulated, figure: str) -> float:
    """The planned rate of the three links from site a to site b together, as last reported."""
    last: dict[int, Any] = {
        r["rank"]: r[figure] for r in run.records if r["kind"] == "link" and r["peer"] == 3
    }
    assert sorted(last) == [0, 1, 2]
    return float(sum(last.values()))


@pytest.mark.parametrize(("shape", "times"), SHAPES.items())
def test_workers_plan_for_the_rate_of_their_uplinks(
    runs: dict[str, Simulated], shape: str, times: int
) -> None:
    measured = planned(runs[shape], "bandwidth_bytes_per_s")
    assert measured == pytest.approx(times * UPLINK_BYTES_PER_S, rel=0.1)
