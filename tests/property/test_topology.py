"""Graphs of `exchange.topology`, and the mixing weights over them.

For any number of workers, degree and seed a graph is symmetric, connected, as regular as stated,
and the same in every process. Graphs accepted by the manifest's rules can be built; refused ones
cannot, and the message names the possible degrees. The rows of mixing weights make symmetric,
doubly stochastic matrices, with the smallest eigenvalue that D2 needs. Oracles: a search through
the graph and NumPy's eigenvalues.

Left out: policies on these graphs (test_topology_machines.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.errors import SpecError
from dlion_api.names import Rank
from dlion_api.spec import Spec, load_job
from dlion_core.topology.topology import (
    graph_of,
    lazy_mixing_row,
    min_neighbours,
    relative_mixing_weights,
)
from example_counts import examples
from manifest_table import changed, smallest
from policy_cluster import spec

GIVEN = spec()


def with_graph(topology: str, degree: int | None, seed: int = 0) -> Spec:
    """A spec of that topology, without validation."""
    exchange = replace(GIVEN.exchange, topology=topology, degree=degree)
    return replace(GIVEN, exchange=exchange, trainer=replace(GIVEN.trainer, seed=seed))


def built(topology: str, degree: int | None, count: int, seed: int = 0) -> Any:
    return graph_of(with_graph(topology, degree, seed), [Rank(rank) for rank in range(count)])


def reached(graph: Any) -> set[int]:
    found, front = {0}, [0]
    while front:
        new = graph[front.pop()] - found
        found |= new
        front += new
    return found


def check(graph: Any, count: int) -> None:
    assert set(graph) == set(range(count))
    assert all(rank in graph[peer] for rank in graph for peer in graph[rank])
    assert all(rank not in graph[rank] for rank in graph)
    assert reached(graph) == set(range(count))


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(3, 40), st.integers(2, 39), st.integers(0, 2**31 - 1))
def test_a_random_graph_is_regular_and_connected(count: int, degree: int, seed: int) -> None:
    degree = min(degree, count - 1)
    if degree * count % 2:
        degree -= 1
    if degree < 2:
        return
    graph = built("randomRegular", degree, count, seed)
    check(graph, count)
    assert {len(peers) for peers in graph.values()} == {degree}


@pytest.mark.parametrize(
    ("topology", "degree"),
    [("allToAll", None), ("clustered", None), ("ring", None), ("bipartite", None),
     ("bipartite", 2), ("randomRegular", 2), ("randomRegular", 3)],
)  # fmt: skip
def test_the_fewest_neighbours_are_those_of_the_graph(topology: str, degree: int | None) -> None:
    for count in (2, 3, 4, 5, 6, 8):
        if degree is not None and (count < 4 or count % 2):
            continue
        exchange = with_graph(topology, degree).exchange
        fewest = min(len(peers) for peers in built(topology, degree, count).values())
        assert min_neighbours(exchange, count) == fewest


@pytest.mark.parametrize(
    ("topology", "degree", "workers", "value", "allowed"),
    [
        ("randomRegular", 6, 4, "6, with 4 workers", "2 to 3"),
        ("randomRegular", 4, 3, "4, with 3 workers", "2"),
        ("randomRegular", 3, 5, "3, with 5 workers", "an even number from 2 to 4"),
        ("bipartite", 4, 6, "4, with 6 workers", "2 to 3"),
    ],
)
def test_an_impossible_degree_is_refused_with_the_possible_ones(
    topology: str, degree: int, workers: int, value: str, allowed: str
) -> None:
    groups = [{"name": "all", "workers": workers}]
    document = changed(smallest(), {"spec.sites": [{"name": "a", "groups": groups}]})
    document["spec"]["exchange"] = {"policy": "dlion", "topology": topology, "degree": degree}
    with pytest.raises(SpecError) as caught:
        load_job(document)
    (problem,) = caught.value.problems
    assert (problem.path, problem.value, problem.allowed) == (
        "spec.exchange.degree", value, allowed,
    )  # fmt: skip


@settings(deadline=None, max_examples=examples(40))
@given(st.integers(2, 30), st.integers(0, 10), st.integers(0, 1000))
def test_two_sides_never_have_a_link_inside(count: int, degree: int, seed: int) -> None:
    wanted = degree if count % 2 == 0 and 2 <= degree <= count // 2 else None
    graph = built("bipartite", wanted, count, seed)
    check(graph, count)
    assert all((rank - peer) % 2 for rank in graph for peer in graph[rank])
    if wanted is not None:
        assert {len(peers) for peers in graph.values()} == {wanted}


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_a_ring_links_adjacent_workers(count: int) -> None:
    graph = built("ring", None, count)
    for rank in range(count):
        assert graph[rank] == {(rank + 1) % count, (rank - 1) % count}


def test_seeds_give_different_graphs() -> None:
    drawn = [tuple(built("randomRegular", 3, 20, seed).items()) for seed in range(5)]
    assert len(set(drawn)) == 5


BUILDS = """
print([
    [sorted(graph[rank]) for rank in sorted(graph)]
    for kind, degree in (("randomRegular", 4), ("randomRegular", 2), ("bipartite", 3))
    for graph in [built(kind, degree, 24, 7)]
])
"""


def test_every_process_builds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """A process with other string hashes."""
    here = Path(__file__).parent
    support = here.parent / "support"
    paths = os.pathsep.join([str(here), str(support), os.environ.get("PYTHONPATH", "")])
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": other, "PYTHONPATH": paths}
    command = [sys.executable, "-c", f"from test_topology import built\n{BUILDS}"]
    there = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    exec(BUILDS, {"built": built})
    assert capsys.readouterr().out == there.stdout != ""


def accepted(topology: str, degree: int | None, count: int) -> bool:
    groups = [{"name": "g", "workers": count}]
    document = changed(smallest(), {"spec.sites": [{"name": "a", "groups": groups}]})
    document["spec"]["exchange"] = {"policy": "dlion", "topology": topology}
    if degree is not None:
        document["spec"]["exchange"]["degree"] = degree
    try:
        load_job(document)
    except SpecError:
        return False
    return True


@pytest.mark.parametrize("topology", ["ring", "randomRegular", "bipartite"])
@pytest.mark.parametrize("degree", [None, 1, 2, 3, 4, 5, 6])
def test_the_manifest_accepts_exactly_the_possible_graphs(
    topology: str, degree: int | None
) -> None:
    if topology == "ring" and degree is not None:
        assert not accepted(topology, degree, 8)
        return
    for count in range(1, 9):
        if accepted(topology, degree, count):
            check(built(topology, degree, count), count)
        else:
            with pytest.raises(ValueError, match="allowed"):
                built(topology, degree, count)


GRAPHS = [("ring", None, 9), ("randomRegular", 4, 11), ("bipartite", None, 7), ("bipartite", 3, 8)]


@pytest.mark.parametrize(("topology", "degree", "count"), GRAPHS)
def test_mixing_weights_are_doubly_stochastic(
    topology: str, degree: int | None, count: int
) -> None:
    graph = built(topology, degree, count)
    for self_weight in (0.0, 0.34, 0.5):
        w = np.zeros((count, count))
        for rank in graph:
            for peer, weight in lazy_mixing_row(graph, rank, self_weight).items():
                w[rank, peer] = weight
        np.testing.assert_allclose(w, w.T, atol=1e-12)
        np.testing.assert_allclose(w.sum(axis=1), 1, atol=1e-12)
        assert w.min() >= -1e-12
        assert np.linalg.eigvalsh(w).min() >= 2 * self_weight - 1 - 1e-12
    w = np.zeros((count, count))
    for rank in graph:
        for peer, weight in relative_mixing_weights(graph, rank).items():
            w[rank, peer] = weight / (1 + len(graph[rank]))
    np.testing.assert_allclose(w, w.T, atol=1e-12)
    np.testing.assert_allclose(w.sum(axis=1), 1, atol=1e-12)
    if len({len(peers) for peers in graph.values()}) == 1:
        assert {
            weight for rank in graph for weight in relative_mixing_weights(graph, rank).values()
        } == {1.0}
