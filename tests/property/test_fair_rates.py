"""Rates of transfers over shared pipes against the definition of max-min fairness.

No pipe exceeds its capacity. No transfer can get more without taking it from one that has no more:
every transfer has a full pipe in which no other one is faster. This also holds for the pipes of an
environment with sites, listed here by hand. The compiled loop gives the bits of NumPy, also with
transfers that are cut or have no pipes.

Left out: time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_environments.plan import BYTES_PER_MBIT
from dlion_simulator.clock import VirtualClock
from dlion_simulator.fair_rates import max_min_fair_rates
from dlion_simulator.network import WIRE_EFFICIENCY, VirtualNetwork
from site_plans import plan_of_sites


@st.composite
def shared_pipes(draw: st.DrawFn) -> tuple[list[float], list[list[int]]]:
    rooms = draw(st.lists(st.floats(1.0, 1e9), min_size=1, max_size=8))
    pipes = st.lists(st.integers(0, len(rooms) - 1), min_size=1, max_size=4, unique=True)
    return rooms, draw(st.lists(pipes, min_size=1, max_size=12))


def in_rows(pipes_of: list[list[int]]) -> Any:
    pipe_FK = np.full((len(pipes_of), 4), -1, np.int64)
    for f, pipes in enumerate(pipes_of):
        pipe_FK[f, : len(pipes)] = pipes
    return pipe_FK


@given(shared_pipes())
def test_rates_are_max_min_fair(given_: tuple[list[float], list[list[int]]]) -> None:
    rooms, pipes_of = given_
    rates = max_min_fair_rates(np.array(rooms), in_rows(pipes_of), np.zeros(len(pipes_of), bool))
    load = [
        sum(rates[f] for f, pipes in enumerate(pipes_of) if p in pipes) for p in range(len(rooms))
    ]
    assert all(used <= room * (1 + 1e-6) for used, room in zip(load, rooms, strict=True))
    for f, pipes in enumerate(pipes_of):
        assert any(
            load[p] >= rooms[p] * (1 - 1e-6)
            and all(
                rates[g] <= rates[f] * (1 + 1e-6) for g, other in enumerate(pipes_of) if p in other
            )
            for p in pipes
        )


def rates_by_numpy(room_P: Any, pipes_of: list[list[int]], is_cut_F: Any) -> Any:
    """The same filling with arrays of memberships M."""
    member_M = np.repeat(np.arange(len(pipes_of)), [len(pipes) for pipes in pipes_of])
    pipe_M = np.array([p for pipes in pipes_of for p in pipes], np.intp)
    rate_F, left_P = np.where(is_cut_F, 0.0, np.inf), room_P.copy()
    rises_M = ~is_cut_F[member_M]
    member_M, pipe_M = member_M[rises_M], pipe_M[rises_M]
    while len(member_M):
        count_P = np.bincount(pipe_M, minlength=len(left_P))
        share_P = np.full(len(left_P), np.inf)
        np.divide(left_P, count_P, out=share_P, where=count_P > 0)
        share = max(0.0, float(share_P.min()))
        stops_F = np.zeros(len(rate_F), bool)
        stops_F[member_M[share_P[pipe_M] <= share * (1 + 1e-9)]] = True
        rate_F[stops_F] = share
        stops_M = stops_F[member_M]
        left_P -= share * np.bincount(pipe_M[stops_M], minlength=len(left_P))
        member_M, pipe_M = member_M[~stops_M], pipe_M[~stops_M]
    return rate_F


@given(st.data())
def test_the_compiled_loop_gives_what_numpy_gives(data: st.DataObject) -> None:
    same = st.sampled_from([1.0, 2.0, 3.0, 1e6, 1e6 + 1e-4])  # nearly equal shares stop together
    rooms = data.draw(st.lists(same | st.floats(1.0, 1e9), min_size=1, max_size=8))
    pipes = st.lists(st.integers(0, len(rooms) - 1), max_size=4, unique=True)
    pipes_of = data.draw(st.lists(pipes, min_size=1, max_size=30))
    cut = st.lists(st.booleans(), min_size=len(pipes_of), max_size=len(pipes_of))
    is_cut_F = np.array(data.draw(cut), bool)
    rates = max_min_fair_rates(np.array(rooms), in_rows(pipes_of), is_cut_F)
    np.testing.assert_array_equal(rates, rates_by_numpy(np.array(rooms), pipes_of, is_cut_F))


Link = tuple[int, int]


@st.composite
def links_of_sites(draw: st.DrawFn) -> tuple[list[int], dict[str, float | None], list[Link]]:
    """Each worker's site; rates in Mbit/s of each worker, inside sites, between sites; links."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4).filter(lambda s: sum(s) > 1))
    sites = [site for site, size in enumerate(sizes) for _ in range(size)]
    own = st.sampled_from([1.0, 2.0, 3.0, 5.0, 8.0])
    rates = {
        "own": draw(own), "inside": draw(st.none() | own), "between": draw(st.none() | own)
    }  # fmt: skip
    ranks = st.integers(0, len(sites) - 1)
    links = st.tuples(ranks, ranks).filter(lambda link: link[0] != link[1])
    return sites, rates, draw(st.lists(links, min_size=1, max_size=10))


def pipes_by_hand(
    sites: list[int], rates: dict[str, float | None], links: list[Link]
) -> list[tuple[float, list[int]]]:
    """Payload bytes per second of each limit, and the links that it applies to."""
    pipes = []
    for end in (0, 1):
        for rank, home in enumerate(sites):
            mine = [f for f, link in enumerate(links) if link[end] == rank]
            near = [f for f in mine if sites[links[f][1 - end]] == home]
            pipes += [(rates["own"], mine), (rates["inside"], near)]
        for site in {*sites}:
            far = [
                f
                for f, link in enumerate(links)
                if sites[link[end]] == site and sites[link[1 - end]] != site
            ]
            pipes.append((rates["between"], far))
    return [
        (mbit_per_s * BYTES_PER_MBIT * WIRE_EFFICIENCY, within)
        for mbit_per_s, within in pipes
        if mbit_per_s is not None and within
    ]


@given(links_of_sites())
def test_the_workers_of_a_site_share_its_uplink_and_its_downlink_fairly(
    given_: tuple[list[int], dict[str, float | None], list[Link]],
) -> None:
    sites, rates, links = given_
    fields: dict[str, Any] = {
        "workers": [{"count": len(sites), "cores": 1, "mbitPerS": rates["own"]}],
        "insideSites": {"mbitPerS": rates["inside"]},
    }
    letters = "".join("abcd"[site] for site in sites)
    plan = plan_of_sites(letters, rates["between"], **fields)
    clock, size_bytes = VirtualClock(), 10**9
    network = VirtualNetwork(clock, plan.initial)
    transfers = [network.begin(Rank(a), Rank(b), size_bytes, lambda: None) for a, b in links]
    carried: list[float] = []
    clock.after(
        1.0, lambda: carried.extend(size_bytes - network.remaining_bytes(t) for t in transfers)
    )
    while not carried:
        assert clock.advance()
    pipes = pipes_by_hand(sites, rates, links)
    for limit, within in pipes:
        assert sum(carried[f] for f in within) <= limit * (1 + 1e-6)
    for f, mine in enumerate(carried):
        assert any(
            sum(carried[g] for g in within) >= limit * (1 - 1e-6)
            and all(carried[g] <= mine * (1 + 1e-6) for g in within)
            for limit, within in pipes
            if f in within
        )
