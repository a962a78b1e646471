"""Test the warning of a run that is too short for one exchange over its slowest link.

- It has the size, the link, its rate, the seconds, the limit and the remedy.
- A link counts with its highest rate, and a cut one not at all. Packet loss lowers a rate.
- There is none for policies that follow the link, that send parts, or that may spare a link.

Left out: the report in a run (tests/simulated/test_ends.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from dlion_api.document import parse
from dlion_api.spec import Job, load_job
from dlion_environments.model import Environment
from dlion_environments.slow_exchange import slow_exchange, slowest_link

SIZE = 1_000_000
"""Entries: 4 MB as float32."""
RATES = [{"count": 2, "cores": 1, "mbitPerS": 8}, {"cores": 1, "mbitPerS": 0.4}]
LINK = "a/g-0 → b/g-0"


def job(policy: str = "full", seconds: int | None = 60, **exchange: Any) -> Job:
    stop = {"maxSteps": 5} if seconds is None else {"maxSeconds": seconds}
    spec = {
        "sites": [
            {"name": "a", "groups": [{"name": "g", "workers": 2}]},
            {"name": "b", "groups": [{"name": "g", "workers": 1}]},
        ],
        "trainer": {
            "program": {"builtin": "digits"}, "dataset": {"name": "digits"}, "stop": stop,
        },
        "exchange": {"policy": policy, "codec": "float32", **exchange},
    }  # fmt: skip
    about = {"apiVersion": "dlion.dev/v1alpha1", "kind": "DLionJob", "metadata": {"name": "j"}}
    return load_job({**about, "spec": spec})


def warning(of: Job, workers: Any = RATES, **environment: Any) -> str:
    document = {"name": "test", "workers": workers, **environment}
    plan = parse(Environment, document).plan(of.workers(), None, duration_s=60.0)
    return slow_exchange(of.spec, SIZE, slowest_link(of, plan))


def test_the_warning_has_all_figures_and_the_remedy() -> None:
    assert warning(job()) == (
        f"one exchange of policy full has 4 MB. Link {LINK} (0.4 Mbit/s) takes 80 s for it, "
        "longer than the run: 60 s (trainer.stop.maxSeconds). So the workers at its ends wait for "
        "it beyond that limit or, if they are asynchronous, train without each other. Choose a "
        "policy with fewer bytes (exchange.policy: adaptive), or raise trainer.stop.maxSeconds"
    )


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (job("hop"), "80 s"),
        (job("async"), "80 s"),
        (job("localsgd"), "80 s"),
        (job("dlion", prioritization=False), "80 s"),
        (job(seconds=30, codec="float16"), "40 s"),
        (job("hop", seconds=30, codec="int8"), "40 s"),  # weights are never coarser
    ],
    ids=lambda given: given.spec.exchange.policy if isinstance(given, Job) else given,
)
def test_policies_that_send_everything_are_warned_of(given: Job, seconds: str) -> None:
    assert f"takes {seconds}" in warning(given)


@pytest.mark.parametrize(
    "given",
    [
        job(seconds=81),
        job(seconds=None),
        job("adaptive"),
        job("dlion"),
        job("ako"),
        job("topk"),
        job("none"),
        job(codec="float16"),
        job(codec="polyline"),
        job("hop", topology="clustered"),
        job("async", parameters={"server": 0}),
        job("dlion", prioritization=False, propagation="selective"),
    ],
    ids=lambda given: given.spec.exchange.policy,
)
def test_there_is_none_if_an_exchange_ends_or_its_size_or_link_is_not_certain(given: Job) -> None:
    assert warning(given) == ""


def test_links_without_rates_are_not_warned_of() -> None:
    assert warning(job(), [{"count": 3, "cores": 1}]) == ""
    cut = {"at": {"seconds": 0}, "cutWorkers": [2]}
    assert warning(job(), [{"count": 3, "cores": 1}], changes=[cut]) == ""


def test_a_link_counts_with_its_highest_rate() -> None:
    faster = {"at": {"seconds": 30}, "mbitPerS": [8, 8, 4]}
    assert warning(job(), changes=[faster]) == ""
    slower = {"at": {"seconds": 30}, "mbitPerS": [8, 8, 0.1]}
    assert "0.4 Mbit/s" in warning(job(), changes=[slower])


def test_packet_loss_lowers_the_rate() -> None:
    lossy = {"latencyMs": 200, "lossPercent": 40}
    found = warning(job(), [{"count": 3, "cores": 1}], betweenSites=lossy)
    assert "takes 807 s" in found, found
