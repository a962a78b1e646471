"""Test radio links of moving workers.

- A track is followed on straight lines. The rate of a link within reach falls with the distance.
  All links beyond share one pipe each way. Rates follow the motion at each interval, equal for the
  same seed.
- Changes of other kinds stay in effect. Contradictions are refused with their path, and real
  processes refuse a radio. The published file is valid.

Left out: the resulting groups of workers (tests/simulated/test_moving_workers.py).
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from dlion_api.document import parse
from dlion_api.errors import SpecError
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_environments.loading import load_environment
from dlion_environments.model import Environment
from dlion_environments.radio import Radio, Track, reached_bytes_per_s

RADIO: dict[str, Any] = {
    "rangeMetres": 300, "mbitPerS": 40, "beyondMbitPerS": 1, "fadingDecibels": 0,
}  # fmt: skip
WORKERS = tuple(WorkerIdentity(Rank(rank), SiteName("a"), "g", rank) for rank in range(3))


def at(seconds: float, x: float) -> dict[str, float]:
    return {"seconds": seconds, "x": x, "y": 0}


def environment(*tracks: list[dict[str, float]], radio: Any = RADIO, **more: Any) -> Environment:
    workers = [{"cores": 1, "track": track} for track in tracks]
    document = {"name": "e", "workers": workers, **({"radio": radio} if radio else {}), **more}
    return parse(Environment, document, source="e.yaml")


NEAR = [[at(0, 0)], [at(0, 50)], [at(0, 50), at(100, 2050)]]
"""The third worker leaves at 20 m/s."""


def test_a_track_is_followed_on_straight_lines_to_its_last_point() -> None:
    track = Track((10.0, 20.0, 40.0), ((0.0, 0.0), (10.0, 0.0), (10.0, 40.0)))
    places = [track.at(time_s) for time_s in (0.0, 10.0, 15.0, 20.0, 30.0, 40.0, 99.0)]
    assert places == [(0, 0), (0, 0), (5, 0), (10, 0), (10, 20), (10, 40), (10, 40)]


def test_rates_fall_with_the_distance_and_end_at_the_reach() -> None:
    radio = Radio(300.0, 5e6, 1e5, 0.0, 5.0, 1)
    rates = [reached_bytes_per_s(radio, metres, 0.0) for metres in range(1, 400, 10)]
    assert rates == sorted(rates, reverse=True)
    assert (rates[0], rates[-1]) == (5e6, 0.0)
    assert reached_bytes_per_s(radio, 310.0, 3.0) > 0 == reached_bytes_per_s(radio, 290.0, -3.0)


def test_links_follow_motion_and_all_beyond_share_one_pipe() -> None:
    plan = environment(*NEAR).plan(WORKERS, None, duration_s=60)
    assert plan.initial.link_bytes_per_s(Rank(0), Rank(2)) > 1e6
    times = [change.time_s for change in plan.changes]
    assert times == [5.0 * step for step in range(1, 13)]
    late = plan.at(59)
    for peer in (0, 1):
        for pair in ((Rank(peer), Rank(2)), (Rank(2), Rank(peer))):
            assert late.link_bytes_per_s(*pair) == 125_000
    assert late.link_bytes_per_s(Rank(0), Rank(1)) > 1e6
    up = {key for peer in (0, 1) for key, _ in late.pipes(Rank(2), Rank(peer)) if key[0]}
    assert len(up) == 1


def test_fading_is_the_same_for_the_same_seed() -> None:
    def rates(seed: int) -> list[float]:
        radio = {**RADIO, "fadingDecibels": 3, "seed": seed}
        plan = environment(*NEAR, radio=radio).plan(WORKERS, None, duration_s=60)
        return [c.conditions.link_bytes_per_s(Rank(0), Rank(1)) for c in plan.changes]

    assert rates(1) == rates(1) != rates(2)
    assert len(set(rates(1))) > 1


def test_other_changes_stay_in_effect() -> None:
    changes = [{"at": {"seconds": 7}, "cores": [3, 3, 3]}]
    plan = environment(*NEAR, changes=changes).plan(WORKERS, None, duration_s=60)
    assert [plan.at(time_s).worker(Rank(0)).quota_cores for time_s in (5, 7, 59)] == [1, 3, 3]
    assert plan.at(7).link_bytes_per_s(Rank(0), Rank(1)) > 1e6


def refused(*tracks: list[dict[str, float]], **more: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        environment(*tracks, **more)
    return {problem.path: str(problem) for problem in caught.value.problems}


def test_contradictions_are_refused() -> None:
    assert set(refused([at(0, 0)], [])) == {"workers[1].track"}
    assert set(refused([at(0, 0)], radio=None)) == {"workers[0].track"}
    assert set(refused([at(5, 0), at(5, 1)])) == {"workers[0].track.seconds"}
    assert set(refused([at(0, 0), {"seconds": "x", "x": 0, "y": 0}])) == {
        "workers[0].track[1].seconds"
    }
    workers = [{"cores": 1, "count": 2, "track": [at(0, 0)]}]
    assert set(refused(workers=workers)) == {"workers[0].count"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rangeMetres", 0), ("mbitPerS", -1), ("beyondMbitPerS", 0), ("fadingDecibels", 31),
        ("everySeconds", 0.5), ("seed", -1), ("seed", 1.5), ("unknown", 1),
        ("rangeMetres", float("nan")),
    ],
)  # fmt: skip
def test_values_outside_their_bounds_are_refused(field: str, value: object) -> None:
    assert set(refused(*NEAR, radio={**RADIO, field: value})) == {f"radio.{field}"}


def test_rates_that_do_not_fit_into_memory_are_refused_immediately() -> None:
    """Tracks may end long after a run: the length of the run then counts."""
    endless = environment([at(0, 0)], [at(0, 50)], [at(0, 50), at(1e9, 2050)])
    assert len(endless.plan(WORKERS, None, duration_s=60).changes) == 12
    for duration_s in (None, 1e8):
        with pytest.raises(SpecError, match="more than 5,000,000 rates") as caught:
            endless.plan(WORKERS, None, duration_s=duration_s)
        (problem,) = caught.value.problems
        assert problem.path == "radio.everySeconds"


def test_two_days_of_motion_are_planned_in_seconds() -> None:
    tracks = [[at(0, 0)], [at(0, 50)], [at(0, 50), at(150_000, 2050)]]
    began_s = time.process_time()
    plan = environment(*tracks).plan(WORKERS, None, duration_s=150_000)
    assert len(plan.changes) == 30_000
    assert time.process_time() - began_s < 5


def test_real_processes_refuse_a_radio() -> None:
    with pytest.raises(SpecError) as caught:
        environment(*NEAR).plan(WORKERS, 8.0)
    (problem,) = caught.value.problems
    assert problem.path == "radio"


def test_the_published_file_is_for_runs_of_any_length() -> None:
    convoys = load_environment("convoys")
    assert not convoys.run_lengths
    assert not convoys.unreached(10.0)
