"""Test the description of a change of an environment.

Each worker that a change concerns gets its previous and new values: CPU, rates, cuts and their end.
A worker without a change gets no message.

Left out: the time of changes and their application (tests/local/test_network_imposed).
"""

from __future__ import annotations

import itertools
from typing import Any

from dlion_api.document import parse
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_environments.change_description import describe_change
from dlion_environments.model import Environment

WORKERS = tuple(
    WorkerIdentity(Rank(rank), SiteName(site), "g", rank) for rank, site in enumerate("aab")
)


def described(*changes: dict[str, Any], **environment: Any) -> list[dict[int, str]]:
    document = {
        "name": "test",
        "workers": [{"count": 3, "cores": 1, "mbitPerS": 40}],
        "coreScale": 0.2,
        "sites": [{"name": "a", "workers": 2}, {"name": "b", "workers": 1}],
        "changes": [{"at": {"seconds": n + 1}, **change} for n, change in enumerate(changes)],
        **environment,
    }
    plan = parse(Environment, document).plan(WORKERS, 2)
    states = [plan.initial, *(change.conditions for change in plan.changes)]
    return [
        {int(rank): words for rank, words in describe_change(before, after).items()}
        for before, after in itertools.pairwise(states)
    ]


def test_only_the_workers_concerned_get_a_description() -> None:
    assert described({"cores": [1, 2, 1]}) == [{1: "CPU 0.2 to 0.4 cores"}]


def test_rates_name_their_link() -> None:
    changed = described(
        {"mbitPerS": [40, 40, 5]},
        {"betweenSitesMbitPerS": 2.5},
        betweenSites={"mbitPerS": 10},
    )
    assert changed == [
        {2: "uplink 40 to 5 Mbit/s; downlink 40 to 5 Mbit/s"},
        {
            0: "the site's uplink 10 to 2.5 Mbit/s; the site's downlink 10 to 2.5 Mbit/s",
            1: "the site's uplink 10 to 2.5 Mbit/s; the site's downlink 10 to 2.5 Mbit/s",
            2: "uplink 10 to 2.5 Mbit/s; downlink 10 to 2.5 Mbit/s",
        },
    ]


def test_with_a_rate_for_each_link_each_is_named() -> None:
    (changed,) = described(
        {"betweenSitesMbitPerS": 2.5}, betweenSites={"mbitPerS": 10}, linkShape="perPeer"
    )
    assert changed[0] == (
        "uplink for worker 2 10 to 2.5 Mbit/s; downlink for worker 2 10 to 2.5 Mbit/s"
    )


def test_a_cut_and_its_end_are_described() -> None:
    cut, restored = described({"cutSites": ["b"]}, {"cutSites": []})
    assert cut == {
        0: "cut off from worker 2",
        1: "cut off from worker 2",
        2: "cut off from workers 0, 1",
    }
    assert restored == {rank: f"no longer {words}" for rank, words in cut.items()}


def test_a_change_without_an_effect_is_not_described() -> None:
    assert described({"cores": [1, 1, 1]}) == [{}]
