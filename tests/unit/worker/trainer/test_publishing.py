"""Tests of the publication of models during a run.

Only the lead of a site publishes; when it is gone, the next rank does. The published model is the
better one of its own replica and the average by samples of all reachable replicas. The file is read
again to judge it. Nothing is claimed of replicas that were not judged. A peer without a state, or
with an invalid one, is left out and named. A full disk is reported, and the last model stays.
Closing stops a publication in the middle, whether it waits for a peer or evaluates.

Models, exchanges with mutual TLS, files and threads are real. Averages are computed again in NumPy.

Left out: publication in a whole run (tests/local/test_growing_data); the model at the end of a run.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dlion_api.errors import UnavailableError
from dlion_api.names import Rank, SiteName
from dlion_api.spec import Job, load_job
from dlion_core.links.events import LinkDown, LinkUp, StateRequest, StateSnapshot
from dlion_operator.pki.authority import CertificateAuthority
from dlion_worker.trainer.background.publishing import CLOSE_WITHIN_S, Publisher
from dlion_worker.training.model import FlatModel
from dlion_worker.training.optimizer import FlatOptimizer
from dlion_worker.training.programs import TrainingProgram, builtin
from dlion_worker.training.replica import LocalReplica
from linked_workers import PLANT_A, PLANT_B, Worker, credentials, identity, introduce

WEIGHTS = StateRequest(weights_only=True)
SITE_OF = {0: PLANT_A, 1: PLANT_A, 2: PLANT_B}
SAMPLES = {0: 100, 1: 300, 2: 600}
X = np.random.default_rng(3).integers(0, 256, (24, 8, 8, 1), dtype=np.uint8)


def job() -> Job:
    """Two workers at one site, one at another; models are published every second."""
    sites = [
        {"name": name, "groups": [{"name": "small", "workers": count}]}
        for name, count in ((PLANT_A, 2), (PLANT_B, 1))
    ]
    return load_job(
        {
            "apiVersion": "dlion.dev/v1alpha1",
            "kind": "DLionJob",
            "metadata": {"name": "test"},
            "spec": {
                "sites": sites,
                "trainer": {
                    "program": {"builtin": "digits"},
                    "dataset": {"name": "digits"},
                    "stop": {"maxSteps": 1},
                },
                "checkpoint": {"everySeconds": 1},
            },
        }
    )


@functools.cache
def compiled_model(seed: int) -> FlatModel:
    """The model itself never changes, so its compiled functions serve all tests."""
    return FlatModel(builtin("digits"), input_shape=(8, 8, 1), class_count=10, seed=seed)


def replica(rank: int, program: TrainingProgram | None = None) -> LocalReplica:
    """A replica with its own weights."""
    if program is None:
        model = compiled_model(rank).sibling(seed=rank, rank=rank)
    else:
        model = FlatModel(program, input_shape=(8, 8, 1), class_count=10, seed=rank)
    optimizer = FlatOptimizer(job().spec.trainer.optimizer, model.layout.size)
    mine = LocalReplica(job(), Rank(rank), model, optimizer)
    mine.samples, mine.iteration = SAMPLES[rank], 10
    return mine


def averaged(replicas: list[LocalReplica]) -> np.ndarray:
    """Average weights by samples in double precision."""
    weighted = [r.samples * r.model.weights_D.astype(np.float64) for r in replicas]
    return sum(weighted) / sum(r.samples for r in replicas)


def answers(model: FlatModel, weights_D: np.ndarray) -> np.ndarray:
    """The label that these weights give each sample, found by trying all labels."""
    snapshot = model.snapshot_of(weights_D.astype(np.float32), model.get_state())
    right = np.zeros((len(X), 10))
    for label in range(10):
        for row in range(len(X)):
            y = np.array([label], np.int32)
            right[row, label] = model.evaluate(X[row : row + 1], y, snapshot=snapshot).accuracy
    return right.argmax(axis=1).astype(np.int32)


class Peer(Worker):
    """An exchange that sends the state of its replica, unless the test replaces it."""

    def __init__(self, rank: int, authorities: dict[SiteName, CertificateAuthority]) -> None:
        who = identity(rank, SITE_OF[rank])
        self.replica = replica(rank)
        self.give: Callable[[], StateSnapshot] = lambda: self.replica.snapshot_for(WEIGHTS)
        super().__init__(who, credentials(who, authorities))

    @property
    def state(self) -> StateSnapshot:
        """The answer of a peer to a request for its state."""
        return self.give()

    @state.setter
    def state(self, _: StateSnapshot) -> None:
        """The state of a worker without a replica, which these tests do not need."""


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    """Three linked workers."""
    authorities = {site: CertificateAuthority(site) for site in (PLANT_A, PLANT_B)}
    them = [Peer(rank, authorities) for rank in SITE_OF]
    introduce(*them)
    for peer in them:
        for _ in range(2):
            peer.wait_for(LinkUp)
    yield them
    for peer in them:
        peer.exchange.close()


class Published:
    """The publisher of one worker, its folder and its reports."""

    def __init__(
        self,
        peer: Peer,
        folder: Path,
        *,
        y: np.ndarray | None = None,
        own: LocalReplica | None = None,
        copies: int = 1,
    ) -> None:
        self.events: list[tuple[str, str, bool]] = []
        y = np.zeros(copies * len(X), np.int32) if y is None else y
        self.folder = folder / "models" / SITE_OF[int(peer.who.rank)]
        self.publisher = Publisher(
            job(),
            peer.who.rank,
            replica=own or peer.replica,
            exchange=peer.exchange,
            reachable=lambda: {
                rank for rank, link in peer.exchange.link_counters().items() if link.connected
            },
            held_out=(np.repeat(X, copies, axis=0), y),
            results_dir=folder,
            report=self._report,
        )

    def _report(self, reason: str, message: str, *, warning: bool = False) -> None:
        self.events.append((reason, message, warning))

    def about(self) -> dict[str, Any]:
        """Return the content of `model.json`."""
        content: dict[str, Any] = json.loads((self.folder / "model.json").read_text())
        return content

    def weights(self) -> np.ndarray:
        """Return the weights of the published model, read by another model."""
        reader = replica(0).model
        reader.load_keras(self.folder / "model.keras")
        return reader.get_weights()

    def publishers(self) -> list[threading.Thread]:
        """Return the publisher's thread while it runs."""
        return [t for t in threading.enumerate() if t.name == "publisher"]


UNKNOWN = dict.fromkeys(["best_replica", "best_replica_accuracy", "mean_replica_accuracy"])
"""What `model.json` has of replicas that were not judged."""


def test_only_the_lead_of_a_site_publishes_and_then_the_next_rank(
    peers: list[Peer], tmp_path: Path
) -> None:
    published = [Published(peer, tmp_path / str(peer.who.rank)) for peer in peers]
    for one in published:
        one.publisher.publish()
    assert [one.folder.exists() for one in published] == [True, False, True]
    assert [len(one.events) for one in published] == [1, 0, 1]
    peers[0].exchange.close()
    peers[1].wait_for(LinkDown, lambda event: event.peer == 0)
    published[1].publisher.publish()
    assert published[1].about()["ranks"] == [1, 2]


def test_the_average_by_samples_is_published_if_it_is_better(
    peers: list[Peer], tmp_path: Path
) -> None:
    expected_D = averaged([peer.replica for peer in peers])
    y = answers(peers[0].replica.model, expected_D)
    published = Published(peers[0], tmp_path, y=y)
    published.publisher.publish()
    about = published.about()
    assert (about["model"], about["accuracy"]) == ("averaged", 1.0)
    assert UNKNOWN.items() <= about.items(), "two replicas were not judged"
    assert (about["ranks"], about["samples"]) == ([0, 1, 2], 1000)
    assert (about["sites"], about["stop_reason"]) == (["plant-a", "plant-b"], "still training")
    np.testing.assert_allclose(published.weights(), expected_D, rtol=1e-6, atol=1e-7)
    ((reason, message, warning),) = published.events
    assert (reason, warning) == ("ModelPublished", False)
    assert message.startswith("averaged of workers 0, 1, 2: accuracy 1.0000 on 24 ")


def test_the_own_replica_is_published_if_it_is_better(peers: list[Peer], tmp_path: Path) -> None:
    own = peers[0].replica.model
    published = Published(peers[0], tmp_path, y=answers(own, own.weights_D))
    published.publisher.publish()
    about = published.about()
    assert (about["model"], about["accuracy"]) == ("replica 0", 1.0)
    assert about["averaged_accuracy"] < 1.0
    assert UNKNOWN.items() <= about.items(), "the other replicas may be better"
    assert np.array_equal(published.weights(), own.weights_D)


def no_state() -> StateSnapshot:
    raise UnavailableError("this worker is not ready yet")


def another_model() -> StateSnapshot:
    return StateSnapshot(5, 600, np.ones(7, np.float32).tobytes())


@pytest.mark.parametrize(
    ("give", "words"),
    [(no_state, "not ready yet"), (another_model, "run different programs")],
)
def test_a_peer_without_a_usable_state_is_left_out_and_named(
    peers: list[Peer],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    give: Callable[[], StateSnapshot],
    words: str,
) -> None:
    peers[1].give = give
    expected_D = averaged([peers[0].replica, peers[2].replica])
    y = answers(peers[0].replica.model, expected_D)
    published = Published(peers[0], tmp_path, y=y)
    with caplog.at_level(logging.WARNING):
        published.publisher.publish()
    assert published.about()["ranks"] == [0, 2]
    np.testing.assert_allclose(published.weights(), expected_D, rtol=1e-6, atol=1e-7)
    assert [event[1].split(":")[0] for event in published.events] == ["averaged of workers 0, 2"]
    named = [r.getMessage() for r in caplog.records if r.name.endswith(".publishing")]
    assert len(named) == 1
    assert "without worker 1" in named[0]
    assert words in named[0]


def test_a_peer_counts_by_no_more_samples_than_the_run_has(
    peers: list[Peer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It would take the whole weight of the mean."""
    most = 10 * job().spec.batching.global_batch_size.initial
    honest = peers[1].replica.snapshot_for(WEIGHTS)
    peers[1].give = lambda: replace(honest, samples=2**62)
    peers[1].replica.samples = most
    expected_D = averaged([peer.replica for peer in peers])
    y = answers(peers[0].replica.model, expected_D)
    published = Published(peers[0], tmp_path, y=y)
    with caplog.at_level(logging.WARNING):
        published.publisher.publish()
    np.testing.assert_allclose(published.weights(), expected_D, rtol=1e-6, atol=1e-7)
    assert f"counted as {most}" in caplog.text


def test_a_peer_that_is_gone_is_left_out(peers: list[Peer], tmp_path: Path) -> None:
    peers[2].exchange.close()
    peers[0].wait_for(LinkDown, lambda event: event.peer == 2)
    published = Published(peers[0], tmp_path)
    published.publisher.publish()
    assert published.about()["ranks"] == [0, 1]
    assert published.about()["sites"] == ["plant-a"]


def test_the_best_replica_of_one_is_known(peers: list[Peer], tmp_path: Path) -> None:
    for peer in peers[1:]:
        peer.exchange.close()
        peers[0].wait_for(LinkDown)
    own = peers[0].replica.model
    published = Published(peers[0], tmp_path, y=answers(own, own.weights_D))
    published.publisher.publish()
    assert {key: published.about()[key] for key in UNKNOWN} == {
        "best_replica": 0,
        "best_replica_accuracy": 1.0,
        "mean_replica_accuracy": 1.0,
    }


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_a_full_disk_is_reported_and_the_last_model_stays(
    peers: list[Peer], tmp_path: Path
) -> None:
    published = Published(peers[0], tmp_path)
    published.publisher.publish()
    before = {path.name: path.read_bytes() for path in published.folder.iterdir()}
    peers[0].replica.model.weights_D[:] *= 2
    (published.folder / ".model.partial-0.keras").symlink_to("/dev/full")
    published.publisher.publish()
    reason, message, warning = published.events[-1]
    assert (reason, warning) == ("PublishFailed", True)
    assert "No space left" in message
    assert "Free some space" in message
    assert message.endswith("the previous model is kept")
    assert {path.name: path.read_bytes() for path in published.folder.iterdir()} == before
    published.publisher.publish()
    assert published.events[-1][0] == "ModelPublished", "with free space there is a new model"
    assert (published.folder / "model.keras").read_bytes() != before["model.keras"]


class Gate:
    """A point where a publication waits until the test releases it."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def wait(self) -> None:
        """Report that the publication is here, and wait."""
        self.reached.set()
        assert self.opened.wait(30)


def close_in_the_middle(published: Published, gate: Gate) -> None:
    """Check that nothing is written or reported, at once or after the gate opens."""
    published.publisher.start()
    assert gate.reached.wait(30)
    began_s = time.monotonic()
    published.publisher.close()
    took_s = time.monotonic() - began_s
    gate.opened.set()
    for thread in published.publishers():
        thread.join(30)
    assert published.publishers() == []
    assert took_s < CLOSE_WITHIN_S + 5  # the gate stays closed for longer
    assert published.events == []
    assert not published.folder.exists()


def test_closing_stops_a_publication_that_waits_for_a_peer(
    peers: list[Peer], tmp_path: Path
) -> None:
    gate = Gate()

    def late() -> StateSnapshot:
        gate.wait()
        return peers[1].replica.snapshot_for(WEIGHTS)

    peers[1].give = late
    close_in_the_middle(Published(peers[0], tmp_path), gate)


def test_closing_stops_a_publication_that_evaluates(peers: list[Peer], tmp_path: Path) -> None:
    gate, batches = Gate(), []
    gate.opened.set()  # while the model is built

    def note(x_B: np.ndarray) -> np.ndarray:
        batches.append(len(x_B))
        gate.wait()
        return x_B

    @keras.saving.register_keras_serializable("tests")
    class Gated(keras.layers.Layer):
        def call(self, x: Any, training: bool = False) -> Any:
            return (
                x if training else tf.ensure_shape(tf.numpy_function(note, [x], x.dtype), x.shape)
            )

    def build(shape: tuple[int, ...], classes: int) -> Any:
        inputs = keras.layers.Input(shape)
        layers = [Gated(), keras.layers.Flatten(), keras.layers.Dense(classes)]
        return keras.Sequential([inputs, *layers])

    for peer in peers[1:]:
        peer.exchange.close()
        peers[0].wait_for(LinkDown)
    own = replica(0, TrainingProgram("gated", build))
    batches.clear()
    gate.reached.clear()
    gate.opened.clear()
    close_in_the_middle(Published(peers[0], tmp_path, own=own, copies=24), gate)
    assert batches == [256], "three batches for each of two models"
