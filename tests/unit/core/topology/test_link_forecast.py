"""Tests of the link forecast.

The network computes the same as NumPy from the same file, for any names of workers. The
shipped file is small and readable. The error for a missing or damaged file names it and states the
remedy. Forecasts exist for no link, one link, parts without a known link between them, and rates
that are not finite. Rates of one class stay as measured. A link that slows down is predicted slower
than one that speeds up. The direction measured last counts.

Left out: the resulting groups (tests/property/test_learned_groups.py).
"""

from __future__ import annotations

import json
import math
import pkgutil
import random
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.topology import forecast_model
from dlion_core.topology.forecast_model import FEATURES, parse_model, shipped_model
from dlion_core.topology.link_forecast import FRESH_S, LinkForecast, LinkHistory

MODEL = shipped_model()


def document() -> dict[str, Any]:
    """A model of three hidden units with random weights."""
    rng = random.Random(1)

    def layer(outputs: int, inputs: int) -> dict[str, Any]:
        return {
            "weights": [[rng.uniform(-1, 1) for _ in range(inputs)] for _ in range(outputs)],
            "bias": [rng.uniform(-1, 1) for _ in range(outputs)],
        }

    sizes = {"first": (3, 7), "second": (3, 13), "third": (3, 6), "output": (1, 3)}
    return {
        "format": 1, "features": list(FEATURES), "horizonSeconds": 30,
        "layers": {name: layer(*size) for name, size in sizes.items()},
    }  # fmt: skip


def random_features(count: int, seed: int) -> dict[tuple[Rank, Rank], list[float]]:
    rng = random.Random(seed)
    pairs = [pair for pair in combinations(range(count), 2) if rng.random() < 0.6]
    return {(Rank(a), Rank(b)): [rng.uniform(-1, 1) for _ in FEATURES] for a, b in pairs}


def by_numpy(found: dict[str, Any], features: dict[tuple[Rank, Rank], list[float]]) -> Any:
    """Compute the network over all pairs at once, as a message-passing network over matrices."""
    edges, feature_EF = list(features), np.array(list(features.values()))
    count = 1 + max(max(edge) for edge in edges)
    is_end_EN = np.array([[node in edge for node in range(count)] for edge in edges], float)

    def dense(name: str, input_EX: Any) -> Any:
        layer = found["layers"][name]
        return input_EX @ np.array(layer["weights"]).T + np.array(layer["bias"])

    def ends(message_EH: Any) -> Any:
        mean_NH = (is_end_EN.T @ message_EH) / np.maximum(1, is_end_EN.sum(axis=0))[:, None]
        return mean_NH[[a for a, _ in edges]], mean_NH[[b for _, b in edges]]

    one_EH, other_EH = ends(np.maximum(0, dense("first", feature_EF)))
    inputs = np.hstack([feature_EF, one_EH + other_EH, abs(one_EH - other_EH)])
    message_EH = np.maximum(0, dense("second", inputs))
    one_EH, other_EH = ends(message_EH)
    hidden = np.maximum(0, dense("third", np.hstack([message_EH, one_EH + other_EH])))
    return dict(zip(edges, dense("output", hidden)[:, 0], strict=True))


@pytest.mark.parametrize("count", [2, 5, 12])
def test_the_network_computes_the_same_as_numpy(count: int) -> None:
    found, features = document(), random_features(count, 1)
    predicted = parse_model(json.dumps(found).encode()).predict(features)
    assert predicted == pytest.approx(by_numpy(found, features), abs=1e-9)


def test_names_of_workers_and_the_order_of_links_do_not_matter() -> None:
    features, renamed = random_features(9, 3), [4, 8, 1, 0, 6, 3, 7, 2, 5]
    of_new = {
        (Rank(min(renamed[a], renamed[b])), Rank(max(renamed[a], renamed[b]))): each
        for (a, b), each in reversed(features.items())
    }
    plain, other = MODEL.predict(features), MODEL.predict(of_new)
    for (a, b), change in plain.items():
        pair = Rank(min(renamed[a], renamed[b])), Rank(max(renamed[a], renamed[b]))
        assert other[pair] == pytest.approx(change, abs=1e-9)


# ---- the file ----------------------------------------------------------------------------------


def test_the_shipped_file_is_small_and_readable() -> None:
    data = pkgutil.get_data("dlion_core.topology", forecast_model.FILE)
    assert data is not None
    assert len(data) < 10_000
    assert MODEL.horizon_s > 0


def damaged(**changes: Any) -> bytes:
    found = document()
    for path, value in changes.items():
        *above, last = path.split("__")
        node = found
        for name in above:
            node = node[name]
        node[last] = value
    return json.dumps(found).encode()


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no object"),
        (damaged(format=2), "format 2"),
        (damaged(features=["rate"]), "features"),
        (damaged(horizonSeconds=0), "horizonSeconds 0"),
        (damaged(horizonSeconds=True), "horizonSeconds True"),
        (damaged(layers=None), "no layers"),
        (damaged(layers__second=None), "layer second"),
        (damaged(layers__first__weights=[]), "layer first"),
        (damaged(layers__first__weights=[[0.0] * 7] * 65), "layer first"),
        (damaged(layers__third__bias=[0.0]), "layer third"),
        (damaged(layers__output__weights=[[1.0, 2.0]]), "not of 3 weights"),
        (damaged(layers__output__weights=[[1.0, 2.0, "3"]]), "not numbers"),
        (damaged(layers__output__weights=[[1.0, 2.0, math.nan]]), "not numbers"),
        (damaged(layers__output__bias=[1e9]), "not numbers"),
    ],
)
def test_the_error_for_a_damaged_file_names_it_and_the_remedy(data: bytes, names: str) -> None:
    with pytest.raises(ContractError, match=names) as caught:
        parse_model(data)
    for words in (forecast_model.FILE, "grouping: links", "--train"):
        assert words in str(caught.value)


def test_the_error_for_a_missing_file_names_it_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forecast_model, "FILE", "absent.json")
    with pytest.raises(ContractError, match=r"absent\.json.*cannot be read.*Install DLion again"):
        shipped_model.__wrapped__()


# ---- predictions -------------------------------------------------------------------------------


def reports(groups: list[list[int]], fast: float = 4e6, slow: float = 1e5) -> dict[Any, float]:
    home = {rank: at for at, group in enumerate(groups) for rank in group}
    return {
        (Rank(a), Rank(b)): fast if home[a] == home[b] else slow
        for a in home
        for b in home
        if a != b
    }


TWO = [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("reported", [{}, {(Rank(0), Rank(1)): 1e6}])
def test_no_link_or_one_link_stays_as_measured(reported: dict[Any, float]) -> None:
    forecast = LinkForecast(MODEL)
    assert forecast.rates(range(2), reported, 0.0) == reported
    assert forecast.rates([], reported, 5.0) == {}


def test_rates_of_one_class_stay_as_measured() -> None:
    rng = random.Random(1)
    reported = {link: 1e6 * rng.uniform(0.9, 1.1) for link in reports(TWO)}
    found = LinkForecast(MODEL).rates(range(8), reported, 0.0)
    assert found == {
        (Rank(a), Rank(b)): min(reported[Rank(a), Rank(b)], reported[Rank(b), Rank(a)])
        for a, b in combinations(range(8), 2)
    }


def test_rates_that_are_not_finite_are_ignored() -> None:
    reported = reports(TWO)
    for link, rate in zip(list(reported)[:4], (math.nan, math.inf, 0.0, -1.0), strict=True):
        reported[link] = rate
    found = LinkForecast(MODEL).rates(range(8), reported, 0.0)
    assert len(found) == 28  # the other direction of each is known
    assert all(math.isfinite(rate) and rate > 0 for rate in found.values())
    reported[Rank(1), Rank(0)] = math.nan
    assert (0, 1) not in LinkForecast(MODEL).rates(range(8), reported, 0.0)


def test_each_part_without_a_known_link_to_others_is_predicted() -> None:
    reported = {link: rate for link, rate in reports(TWO).items() if rate > 1e6}
    reported[Rank(0), Rank(1)] = reported[Rank(1), Rank(0)] = 1e5
    found = LinkForecast(MODEL).rates(range(8), reported, 0.0)
    assert set(found) == {pair for pair in combinations(range(8), 2) if pair[1] < 4 or pair[0] > 3}


def test_a_link_that_slows_down_is_predicted_slower_than_one_that_speeds_up() -> None:
    forecast = LinkForecast(MODEL)
    for step in range(7):
        reported = reports(TWO)
        down, up = 4e6 * 0.6**step, 4e6 * 0.6 ** (6 - step)
        for peer in (1, 2, 3):
            reported[Rank(0), Rank(peer)] = reported[Rank(peer), Rank(0)] = down
        for peer in (5, 6, 7):
            reported[Rank(4), Rank(peer)] = reported[Rank(peer), Rank(4)] = up
        found = forecast.rates(range(8), reported, step * 5.0)
        if step == 3:
            assert down == up
            assert found[Rank(0), Rank(1)] < 0.8 * found[Rank(4), Rank(5)]


def test_the_direction_measured_last_counts() -> None:
    history, there, back = LinkHistory(), (Rank(0), Rank(1)), (Rank(1), Rank(0))
    assert history.observe([0, 1], {there: 5.0, back: 3.0}, 0.0) == {(0, 1): 3.0}
    assert history.observe([0, 1], {there: 6.0, back: 3.0}, FRESH_S) == {(0, 1): 3.0}
    assert history.observe([0, 1], {there: 7.0, back: 3.0}, FRESH_S + 1) == {(0, 1): 7.0}
    assert history.observe([0, 1], {there: 7.0, back: 4.0}, FRESH_S + 2) == {(0, 1): 4.0}
