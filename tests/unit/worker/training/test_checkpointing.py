"""Facts: what is saved comes back, so that the next batch and step are the same; what is saved with
a step under way is the state before it, and where a peer has made that step's update, the place
after it is taken up with the peer's weights; of every gradient what was sent and what is held back
make up the whole, whichever it was; what had arrived for weights that a peer's replace is dropped;
another job's checkpoint is refused.

Real checkpointer, policies and stream position; the model stands in (`loop_cluster`).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dlion_api.errors import DataError
from dlion_api.names import Rank
from dlion_core.codecs import ValueCodec, decode_gradient, encode_whole
from dlion_core.lifecycle.stopping import JobProgress
from dlion_core.links.events import StateSnapshot
from dlion_core.policies import factory
from dlion_core.policies.interface import (
    ApplyGradient,
    Instruction,
    Layout,
    LocalStepDone,
    MemberJoined,
    Message,
    MessageArrived,
    MessageKind,
    SendMessage,
)
from dlion_worker.training.checkpointing import Checkpointer
from loop_cluster import SIZE, Model, Replica, Stream, synchronous_job


class Worker:
    """What a checkpoint is of."""

    def __init__(
        self, folder: Path, *, peers: bool = True, mode: str = "synchronous", **exchange: Any
    ) -> None:
        """`exchange` are other fields of the manifest's."""
        spec = synchronous_job(2, 100).spec
        spec = dataclasses.replace(
            spec,
            exchange=dataclasses.replace(spec.exchange, **exchange),
            synchronization=dataclasses.replace(spec.synchronization, mode=mode),
        )
        layout = Layout(("w",), (SIZE,))
        self.machine = factory.build(spec, Rank(0), layout, [Rank(0), Rank(1)])
        self.replica, self.stream = Replica(Model(0, None, 0.0, lambda: None)), Stream()
        self.progress = JobProgress()
        self.checkpointer = Checkpointer(
            folder / "checkpoint.npz", every_s=300, replica=self.replica, progress=self.progress,
            stream=self.stream, machine=self.machine,
        )  # fmt: skip
        if peers:
            self.machine.handle(MemberJoined(Rank(1)))

    def step(self, *, is_held: bool = True, value: float = 1.0) -> list[Instruction]:
        """One local step, which is held for the peer; its gradient has that value everywhere."""
        if is_held:
            self.checkpointer.begin_step()
        iteration = self.machine.next_iteration()
        self.stream.next(8)
        self.progress.advance(iteration, local_batch_size=8, global_batch_size=16)
        gradient_D = np.full(SIZE, value, np.float32)
        return self.machine.handle(LocalStepDone(iteration, gradient_D, 8, 1.0))

    def sent(self, *, value: float) -> np.ndarray:
        """What the peer reads of a local step."""
        (payload,) = (
            one.message.payload for one in self.step(value=value) if type(one) is SendMessage
        )
        part = decode_gradient(payload, SIZE)
        return np.asarray(part.weighted(np.float32(1)))

    def hear(self, iteration: int) -> None:
        """The peer's gradient of that iteration, all ones."""
        payload = encode_whole(np.ones(SIZE, np.float32), ValueCodec.FLOAT32)
        message = Message(MessageKind.GRADIENT, iteration, 8, payload=payload)
        self.machine.handle(MessageArrived(Rank(1), message))


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


def test_a_resumed_worker_is_where_it_was(tmp_path: Path) -> None:
    """Its progress, its data, its policies and its moments: not a step before or after."""
    worker = Worker(tmp_path)
    moment_D = np.arange(SIZE, dtype=np.float32)
    worker.replica.optimizer = SimpleNamespace(state=lambda: {"moment_D": moment_D})
    for iteration in (1, 2):
        worker.step()
        worker.hear(iteration)
        worker.checkpointer.end_step()
    worker.replica.iteration = 2
    worker.checkpointer.save()
    again = Worker(tmp_path, peers=False)
    restored: list[dict[str, Any]] = []
    again.replica.optimizer = SimpleNamespace(state=dict, restore=restored.append)
    assert again.checkpointer.load()
    assert again.progress == worker.progress == JobProgress(2, 16, 32)
    assert (again.stream.place, again.replica.iteration, again.replica.samples) == (2, 2, 16)
    assert again.machine.next_iteration() == worker.machine.next_iteration() == 3
    assert [list(values) for values in restored] == [["moment_D"]]
    np.testing.assert_array_equal(restored[0]["moment_D"], moment_D)


def test_a_step_whose_update_a_peer_has_made_is_not_done_again(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.step()
    worker.checkpointer.undo_step()
    worker.checkpointer.save()
    again = Worker(tmp_path, peers=False)
    again.checkpointer.load()
    weights_D = np.full(SIZE, 3, np.float32)
    again.checkpointer.adopt(StateSnapshot(1, 8, weights_D.tobytes()))
    assert (again.progress.iteration, again.progress.own_samples) == (1, 8)
    assert again.stream.place == 1
    assert again.machine.next_iteration() == 2
    assert np.array_equal(again.replica.model.weights_D, weights_D)


def test_of_an_older_checkpoint_what_the_policies_held_is_void_with_a_peers_update(
    tmp_path: Path,
) -> None:
    """Until then it had no state of policies after the step under way."""
    worker = Worker(tmp_path, residual="perLink")
    worker.step(value=ODD)
    worker.checkpointer.undo_step()
    worker.checkpointer.save()
    path = tmp_path / "checkpoint.npz"
    kept = np.load(path)
    np.savez(path, **{n: kept[n] for n in kept.files if not n.startswith("after.policies.")})
    again = Worker(tmp_path, peers=False, residual="perLink")
    assert again.checkpointer.load()
    again.checkpointer.adopt(StateSnapshot(1, 8, bytes(4 * SIZE)))
    assert (again.progress.iteration, again.stream.place) == (1, 1)
    assert again.machine.next_iteration() == 2
    state = again.machine.state()
    assert not [name for name, value in state.items() if np.size(value) == SIZE and np.any(value)]


def test_a_state_of_another_iteration_makes_void_what_the_step_under_way_withheld(
    tmp_path: Path,
) -> None:
    worker = Worker(tmp_path, residual="perLink")
    worker.step(value=ODD)
    worker.checkpointer.undo_step()
    worker.checkpointer.save()
    again = Worker(tmp_path, peers=False, residual="perLink")
    assert again.checkpointer.load()
    again.checkpointer.adopt(StateSnapshot(9, 8, bytes(4 * SIZE)))
    assert (again.progress.iteration, again.stream.place) == (9, 0)
    assert again.machine.next_iteration() == 10
    state = again.machine.state()
    assert not [name for name, value in state.items() if np.size(value) == SIZE and np.any(value)]


def test_a_state_of_another_iteration_leaves_this_workers_place_in_its_data(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.stream.place = 5
    worker.checkpointer.adopt(StateSnapshot(9, 8, np.ones(SIZE, np.float32).tobytes()))
    assert (worker.progress.iteration, worker.stream.place) == (9, 5)
    assert worker.machine.next_iteration() == 10


RESIDUALS: list[dict[str, Any]] = [
    {"policy": "dlion", "residual": "perLink"},
    {"policy": "dlion", "residual": "shared"},
    {"policy": "topk", "parameters": {"share": 0.5, "residual": "perLink"}},
    {"policy": "dgc", "parameters": {"momentum": 0.0}},
]
RESIDUAL_IDS = ["dlion-perLink", "dlion-shared", "topk-perLink", "dgc"]
ODD = 1 / 3  # a value that the codec rounds


@pytest.mark.parametrize("exchange", RESIDUALS, ids=RESIDUAL_IDS)
def test_a_step_under_way_is_not_in_what_is_held_back(
    tmp_path: Path, exchange: dict[str, Any]
) -> None:
    """It is made again with what was held back before it: the same is sent."""
    worker = Worker(tmp_path, codec="float16", **exchange)
    worker.sent(value=ODD)
    worker.hear(1)
    worker.checkpointer.end_step()
    sent_D = worker.sent(value=ODD)
    worker.checkpointer.undo_step()
    worker.checkpointer.save()
    again = Worker(tmp_path, peers=False, codec="float16", **exchange)
    assert again.checkpointer.load()
    again.machine.handle(MemberJoined(Rank(1)))
    assert again.progress.iteration == 1
    assert np.array_equal(again.sent(value=ODD), sent_D)


@pytest.mark.parametrize("exchange", RESIDUALS, ids=RESIDUAL_IDS)
def test_what_a_step_whose_update_a_peer_has_made_held_back_is_sent_later(
    tmp_path: Path, exchange: dict[str, Any]
) -> None:
    worker = Worker(tmp_path, codec="float16", **exchange)
    worker.step(value=ODD)
    worker.checkpointer.undo_step()
    worker.checkpointer.save()
    again = Worker(tmp_path, peers=False, codec="float16", **exchange)
    again.checkpointer.load()
    again.checkpointer.adopt(StateSnapshot(1, 8, bytes(4 * SIZE)))
    again.machine.handle(MemberJoined(Rank(1), 1))
    worker.hear(1)
    worker.checkpointer.end_step()
    assert np.array_equal(again.sent(value=ODD), worker.sent(value=ODD))


def test_gradients_that_arrived_for_weights_which_a_peers_replace_are_dropped(
    tmp_path: Path,
) -> None:
    """The peer's hold them already."""
    worker = Worker(tmp_path, mode="bounded")
    worker.step(is_held=False)
    worker.hear(1)
    worker.checkpointer.save()
    for is_overtaken in (False, True):
        again = Worker(tmp_path, peers=False, mode="bounded")
        again.checkpointer.load()
        if is_overtaken:
            again.checkpointer.adopt(StateSnapshot(9, 8, bytes(4 * SIZE)))
        (apply_gradient,) = (
            one for one in again.step(is_held=False) if isinstance(one, ApplyGradient)
        )
        assert np.array_equal(
            apply_gradient.gradient_D, np.full(SIZE, 1.0 if is_overtaken else 2.0)
        )


@pytest.mark.parametrize("exchange", RESIDUALS, ids=RESIDUAL_IDS)
def test_what_was_held_back_is_void_where_a_peers_weights_are_taken(
    tmp_path: Path, exchange: dict[str, Any]
) -> None:
    """It may have left since the checkpoint was made."""
    worker = Worker(tmp_path, codec="float16", mode="bounded", **exchange)
    worker.step(is_held=False, value=ODD)
    worker.checkpointer.save()
    again = Worker(tmp_path, peers=False, codec="float16", mode="bounded", **exchange)
    again.checkpointer.load()
    again.checkpointer.adopt(StateSnapshot(9, 8, bytes(4 * SIZE)))
    assert again.machine.next_iteration() == 10
    state = again.machine.state()
    assert not [name for name, value in state.items() if np.size(value) == SIZE and np.any(value)]
    assert state.get("dgc_steps", 1) == 1  # the warm-up goes on


def test_nothing_saved_is_nothing_to_load(tmp_path: Path) -> None:
    assert not Worker(tmp_path).checkpointer.load()


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "checkpoint.npz", weights=np.ones(3))
    with pytest.raises(DataError, match="does not fit"):
        Worker(tmp_path).checkpointer.load()
