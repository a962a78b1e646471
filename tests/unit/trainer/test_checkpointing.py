"""Facts: what is saved comes back, so that the next batch and step are the same; what is saved with
a step under way is the state before it, and where a peer has made that step's update, the place
after it is taken up with the peer's weights; another job's checkpoint is refused.

Real checkpointer, policies and stream position; the model stands in (`loop_cluster`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dlion_api.errors import DataError
from dlion_api.names import Rank
from dlion_worker import policies
from dlion_worker.exchange import StateSnapshot
from dlion_worker.policies.interface import Layout, LocalStepDone, MemberJoined
from dlion_worker.trainer.checkpointing import Checkpointer
from dlion_worker.trainer.stopping import JobProgress
from loop_cluster import SIZE, Model, Replica, Stream, synchronous_job


class Worker:
    """What a checkpoint is of."""

    def __init__(self, folder: Path, *, peers: bool = True) -> None:
        job = synchronous_job(2, 100)
        layout = Layout(("w",), (SIZE,))
        self.machine = policies.build(job.spec, Rank(0), layout, [Rank(0), Rank(1)])
        self.replica, self.stream = Replica(Model(0, None, 0.0, lambda: None)), Stream()
        self.progress = JobProgress()
        self.checkpointer = Checkpointer(
            folder / "checkpoint.npz", every_s=300, replica=self.replica, progress=self.progress,
            stream=self.stream, machine=self.machine,
        )  # fmt: skip
        if peers:
            self.machine.handle(MemberJoined(Rank(1)))

    def step(self) -> None:
        """One local step, which is held for the peer."""
        self.checkpointer.begin_step()
        iteration = self.machine.next_iteration()
        self.stream.next(8)
        self.progress.advance(iteration, local_batch_size=8, global_batch_size=16)
        gradient_D = np.ones(SIZE, np.float32)
        self.machine.handle(LocalStepDone(iteration, gradient_D, 8, 1.0))


def test_a_step_under_way_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.step()
    worker.checkpointer.undo_step()
    assert worker.progress == JobProgress()
    worker.checkpointer.save()
    again = Worker(tmp_path, peers=False)
    assert again.checkpointer.load()
    assert (again.progress.iteration, again.stream.place) == (0, 0)
    assert again.machine.next_iteration() == 1


def test_a_step_whose_update_a_peer_has_made_is_not_done_again(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.step()
    worker.checkpointer.undo_step()
    worker.checkpointer.save()
    again = Worker(tmp_path, peers=False)
    again.checkpointer.load()
    weights_D = np.full(SIZE, 3, np.float32)
    again.checkpointer.overtake(StateSnapshot(1, 8, weights_D.tobytes()))
    assert (again.progress.iteration, again.progress.own_samples) == (1, 8)
    assert again.stream.place == 1
    assert again.machine.next_iteration() == 2
    assert np.array_equal(again.replica.model.weights_D, weights_D)


def test_a_state_of_another_iteration_leaves_this_workers_place_in_its_data(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.stream.place = 5
    worker.checkpointer.overtake(StateSnapshot(9, 8, np.ones(SIZE, np.float32).tobytes()))
    assert (worker.progress.iteration, worker.stream.place) == (9, 5)
    assert worker.machine.next_iteration() == 10


def test_nothing_saved_is_nothing_to_load(tmp_path: Path) -> None:
    assert not Worker(tmp_path).checkpointer.load()


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "checkpoint.npz", weights=np.ones(3))
    with pytest.raises(DataError, match="does not fit"):
        Worker(tmp_path).checkpointer.load()
