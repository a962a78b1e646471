"""Tests of the end of a run.

The averaged model weighs replicas by their samples. The lowest living rank of each site leads. If
it is gone, the next one leads, until a worker has saved for the site. A model of one replica is
named after that replica and not called an average.

Left out: the whole end of a run (tests/local/test_end_of_run.py).
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from dlion_api.errors import UnavailableError
from dlion_api.names import Rank
from dlion_api.spec import load_job
from dlion_worker.training.site_model import (
    CollectedReplica,
    average,
    choose_model,
    ranks_in_saved_model,
    site_leads,
)
from dlion_worker.training.snapshot import TrainingState
from local_run import job_document

JOB = load_job(job_document({"a": 2, "b": 2}))


def replica(rank: int, value: float, samples: int) -> CollectedReplica:
    vector = np.full(3, value, np.float32)
    return CollectedReplica(Rank(rank), TrainingState(vector, vector[:1], vector[:2]), samples, 5)


def test_replicas_count_by_their_samples() -> None:
    averaged = average([replica(0, 1.0, 300), replica(1, 5.0, 100)])
    assert averaged.weights_D == pytest.approx(np.full(3, 2.0))
    assert averaged.model_state_S == pytest.approx([2.0])


def test_the_mean_of_equal_replicas_has_their_bits() -> None:
    vector = np.array([-0.0, 0.0, 1e-40, 0.1, -3e38, np.float32(np.pi)], np.float32)
    state = TrainingState(vector, vector[:1], vector[:2])
    equal = [
        CollectedReplica(Rank(rank), state, samples, 5) for rank, samples in enumerate((3, 7, 9))
    ]
    averaged = average(equal)
    assert averaged.weights_D.tobytes() == vector.tobytes()
    assert averaged.model_state_S.tobytes() == vector[:1].tobytes()


def test_without_samples_all_replicas_count_equally() -> None:
    assert average([replica(0, 1.0, 0), replica(1, 5.0, 0)]).weights_D[0] == pytest.approx(3.0)


def test_a_model_of_one_replica_is_named_after_it() -> None:
    alone, _ = choose_model(JOB, [replica(2, 1, 9)], accuracy_of=lambda _: 0.5, stop_reason="")
    assert (alone.model, str(alone).partition(":")[0]) == ("replica 2", "replica 2 of worker 2")
    both = [replica(0, 1, 9), replica(2, 1, 9)]
    assert choose_model(JOB, both, accuracy_of=lambda _: 0.5, stop_reason="")[0].model == "averaged"


def test_a_sensor_publishes_the_decoder() -> None:
    staged = load_job(
        job_document(
            {"a": 2, "b": 2},
            trainer={"encoder": "encoder.keras"},
            exchange={"topology": "staged", "policy": "staged"},
        )
    )
    own, decoder = replica(2, 1, 9), replica(0, 5, 9)
    about, state = choose_model(
        staged, [own, decoder], accuracy_of=lambda _: 0.5, stop_reason="", candidates=[own]
    )
    assert (about.model, state.weights_D[0]) == ("replica 0", 5.0)
    with pytest.raises(UnavailableError, match="of workers 2, 3 none trains"):
        choose_model(staged, [own, replica(3, 1, 9)], accuracy_of=lambda _: 0.5, stop_reason="")


def test_of_earlier_saved_models_only_a_final_one_of_this_run_counts(
    tmp_path: Path,
) -> None:
    def ranks(since_s: float = 0.0) -> set[int]:
        return ranks_in_saved_model(tmp_path, "a", since_s=since_s)

    assert ranks() == set()
    about = tmp_path / "models" / "a" / "model.json"
    about.parent.mkdir(parents=True)
    about.write_text(json.dumps({"ranks": [0, 1], "stop_reason": "maxSteps 9 reached"}))
    assert ranks() == {0, 1}
    assert ranks(since_s=time.time() + 9) == set(), "a model of an earlier run"
    about.write_text(json.dumps({"ranks": [0, 1], "stop_reason": "still training"}))
    assert ranks() == set()
    about.write_text("{")
    assert ranks() == set()


@pytest.mark.parametrize(
    ("alive", "saved_by", "leads"),
    [
        ({0, 1, 2, 3}, set(), {0, 2}),
        ({1, 3}, set(), {1, 3}),
        ({0, 1}, set(), {0}),
        ({1, 2, 3}, {0}, {2}),
        ({0, 1, 2, 3}, {0, 2}, set()),
    ],
)
def test_the_lowest_living_rank_leads_its_site(
    alive: set[int], saved_by: set[int], leads: set[int]
) -> None:
    ranks = {Rank(rank) for rank in alive}
    assert site_leads(JOB, ranks, saved_by=[Rank(r) for r in saved_by]) == leads
