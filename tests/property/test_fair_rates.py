"""Rates of transfers that share pipes against what max-min fairness means.

No pipe carries more than it can, and nobody can have more without taking it from somebody who has
no more: every transfer has a full pipe in which no other one is faster. Left out: time.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dlion_simulator.network import _max_min_fair_rates


@st.composite
def shared_pipes(draw: st.DrawFn) -> tuple[list[float], list[list[int]]]:
    rooms = draw(st.lists(st.floats(1.0, 1e9), min_size=1, max_size=8))
    pipes = st.lists(st.integers(0, len(rooms) - 1), min_size=1, max_size=4, unique=True)
    return rooms, draw(st.lists(pipes, min_size=1, max_size=12))


@given(shared_pipes())
def test_rates_are_max_min_fair(given_: tuple[list[float], list[list[int]]]) -> None:
    rooms, pipes_of = given_
    member = np.repeat(np.arange(len(pipes_of)), [len(pipes) for pipes in pipes_of])
    pipe = np.array([p for pipes in pipes_of for p in pipes])
    rates = _max_min_fair_rates(
        np.array(rooms), member, pipe, np.full(len(pipes_of), np.inf), np.ones(len(pipes_of), bool)
    )
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
