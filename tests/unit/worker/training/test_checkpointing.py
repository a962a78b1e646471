"""Tests of checkpoints.

A saved state is restored, so that the next batch and step are the same. A checkpoint during a step
has the state before it. If a peer has made that step's update, the worker continues after it with
the peer's weights. For each gradient, the sent and the withheld part make up the whole. Messages
for weights that a peer's weights replace are dropped. A checkpoint of another job is refused.

Checkpointer, policies and stream position are real; `loop_cluster` replaces the model.
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
    """The parts that a checkpoint saves."""

    def __init__(
        self, folder: Path, *, peers: bool = True, mode: str = "synchronous", **exchange: Any
    ) -> None:
        """`exchange`: other fields of `spec.exchange` in the manifest."""
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
        """Run one local step, which waits for the peer; its gradient has that value everywhere."""
        if is_held:
            self.checkpointer.begin_step()
        iteration = self.machine.next_iteration()
        self.stream.next(8)
        self.progress.advance(iteration, local_batch_size=8, global_batch_size=16)
        gradient_D = np.full(SIZE, value, np.float32)
        return self.machine.handle(LocalStepDone(iteration, gradient_D, 8, 1.0))

    def sent(self, *, value: float) -> np.ndarray:
        """Return the values that the peer reads of a local step."""
        (payload,) = (
            one.message.payload for one in self.step(value=value) if type(one) is SendMessage
        )
        part = decode_gradient(payload, SIZE)
        return np.asarray(part.weighted(np.float32(1)))

    def hear(self, iteration: int) -> None:
        """Receive the peer's gradient of that iteration, all ones."""
        payload = encode_whole(np.ones(SIZE, np.float32), ValueCodec.FLOAT32)
        message = Message(MessageKind.GRADIENT, iteration, 8, payload=payload)
        self.machine.handle(MessageArrived(Rank(1), message))


def test_an_unfinished_step_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.step()
    worker.checkpointer.undo_step()
    assert worker.progress == JobProgress()
    worker.checkpointer.save()
    again = Worker(tmp_path, peers=False)
    assert again.checkpointer.load()
    assert (again.progress.iteration, again.stream.place) == (0, 0)
    assert again.machine.next_iteration() == 1


def test_a_resumed_worker_continues_at_its_position(tmp_path: Path) -> None:
    """Its progress, data, policies and moments are neither a step behind nor ahead."""
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
    assert again.progress == worker.progress == JobProgress(2, 16, 32, global_batch_size=16)
    assert (again.stream.place, again.replica.iteration, again.replica.samples) == (2, 2, 16)
    assert again.machine.next_iteration() == worker.machine.next_iteration() == 3
    assert [list(values) for values in restored] == [["moment_D"]]
    np.testing.assert_array_equal(restored[0]["moment_D"], moment_D)


@pytest.mark.parametrize(("saved", "loaded"), [(None, 0), (16, 16), (-1, None)])
def test_only_a_negative_global_batch_is_refused(
    tmp_path: Path, saved: int | None, loaded: int | None
) -> None:
    """Older checkpoints have none."""
    worker = Worker(tmp_path)
    worker.checkpointer.save()
    path = tmp_path / "checkpoint.npz"
    values = dict(np.load(path))
    del values["global_batch_size"]
    np.savez(path, **values, **({} if saved is None else {"global_batch_size": np.int64(saved)}))
    again = Worker(tmp_path, peers=False)
    if loaded is None:
        with pytest.raises(DataError, match="counts of at least 0"):
            again.checkpointer.load()
    else:
        assert again.checkpointer.load()
        assert again.progress.global_batch_size == loaded


def test_a_step_with_an_update_by_a_peer_is_not_repeated(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.progress.trained_s = 45.0
    worker.step()
    worker.checkpointer.undo_step()
    worker.checkpointer.save()
    again = Worker(tmp_path, peers=False)
    again.checkpointer.load()
    weights_D = np.full(SIZE, 3, np.float32)
    again.checkpointer.adopt(StateSnapshot(1, 8, weights_D.tobytes()))
    assert (again.progress.iteration, again.progress.own_samples) == (1, 8)
    assert again.progress.trained_s == 45.0, "its own count of training"
    assert again.progress.global_batch_size == 16
    assert again.stream.place == 1
    assert again.machine.next_iteration() == 2
    assert np.array_equal(again.replica.model.weights_D, weights_D)


def test_policy_state_of_an_older_checkpoint_is_void_with_an_update_by_a_peer(
    tmp_path: Path,
) -> None:
    """An older checkpoint has no state of policies after the unfinished step."""
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


def test_a_state_of_another_iteration_voids_the_residual_of_an_unfinished_step(
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


def test_a_state_of_another_iteration_keeps_the_position_in_the_data(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.stream.place, worker.progress.global_batch_size = 5, 16
    worker.checkpointer.adopt(StateSnapshot(9, 8, np.ones(SIZE, np.float32).tobytes()))
    assert worker.progress.global_batch_size == 0, "it is that of another iteration"
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
def test_an_unfinished_step_is_not_in_the_residual(
    tmp_path: Path, exchange: dict[str, Any]
) -> None:
    """The step is repeated with the earlier residual, so the same values are sent."""
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
def test_a_worker_that_rejoins_with_its_own_weights_repeats_the_undone_step(
    tmp_path: Path, exchange: dict[str, Any]
) -> None:
    """Its policies are as before that step; so is the checkpoint that it saves at the end."""
    worker = Worker(tmp_path, codec="float16", **exchange)
    worker.sent(value=ODD)
    worker.hear(1)
    worker.checkpointer.end_step()
    sent_D = worker.sent(value=ODD)
    worker.checkpointer.undo_step()
    machine = worker.machine.restarted()
    policies = worker.checkpointer.policies()
    worker.checkpointer.reset(machine)
    machine.restore(policies)
    worker.checkpointer.save()
    again = Worker(tmp_path, peers=False, codec="float16", **exchange)
    assert again.checkpointer.load()
    assert again.machine.next_iteration() == again.progress.iteration + 1 == 2
    again.machine.handle(MemberJoined(Rank(1)))
    assert np.array_equal(again.sent(value=ODD), sent_D)


@pytest.mark.parametrize("exchange", RESIDUALS, ids=RESIDUAL_IDS)
def test_the_residual_of_a_step_with_an_update_by_a_peer_is_sent_later(
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


def test_gradients_for_weights_that_a_peers_weights_replace_are_dropped(
    tmp_path: Path,
) -> None:
    """The peer's weights already include them."""
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
def test_the_residual_is_void_when_a_peers_weights_are_adopted(
    tmp_path: Path, exchange: dict[str, Any]
) -> None:
    """It may have been sent since the checkpoint was made."""
    worker = Worker(tmp_path, codec="float16", mode="bounded", **exchange)
    worker.step(is_held=False, value=ODD)
    worker.checkpointer.save()
    again = Worker(tmp_path, peers=False, codec="float16", mode="bounded", **exchange)
    again.checkpointer.load()
    again.checkpointer.adopt(StateSnapshot(9, 8, bytes(4 * SIZE)))
    assert again.machine.next_iteration() == 10
    state = again.machine.state()
    assert not [name for name, value in state.items() if np.size(value) == SIZE and np.any(value)]
    assert state.get("dgc_steps", 1) == 1  # the warm-up continues


def test_without_a_checkpoint_nothing_is_loaded(tmp_path: Path) -> None:
    assert not Worker(tmp_path).checkpointer.load()


def test_a_checkpoint_of_another_job_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "checkpoint.npz", weights=np.ones(3))
    with pytest.raises(DataError, match="does not fit"):
        Worker(tmp_path).checkpointer.load()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("iteration", np.array([1, 2])),
        ("own_samples", np.float64("inf")),
        ("trained_s", np.float64("nan")),  # it would never exceed `stop.maxSeconds`
        ("applied_iteration", np.empty(0)),
        ("policies.recent_losses", np.float64(1)),
    ],
)
def test_a_checkpoint_with_a_value_of_another_kind_is_refused(
    tmp_path: Path, name: str, value: np.ndarray
) -> None:
    worker = Worker(tmp_path)
    worker.checkpointer.save()
    path = tmp_path / "checkpoint.npz"
    values = dict(np.load(path))
    assert name in values
    np.savez(path, **{**values, name: value})
    with pytest.raises(DataError, match="does not fit"):
        worker.checkpointer.load()
