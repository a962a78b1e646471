"""Workers in one process, each a thread with the real loop, admission, inbox and policies.

Only the slow parts are replaced: TensorFlow by a quadratic whose gradient depends on rank and
batch, and the exchange by queues. A queue keeps its link's order and delays every message randomly.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from dlion_api.errors import UnavailableError
from dlion_api.names import Rank
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.protocol.progress import StepRecord
from dlion_api.spec import Job, load_job
from dlion_core.lifecycle.admission import Admission
from dlion_core.lifecycle.stopping import JobProgress
from dlion_core.links.events import LinkDown, LinkUp, StateRequest, StateSnapshot
from dlion_core.policies import factory
from dlion_core.policies.interface import Layout, Message, MessageArrived
from dlion_core.policies.weights.local_rounds import LastRound
from dlion_worker.trainer.admission import join_run
from dlion_worker.trainer.background.peer_refusals import PeerRefusalReporter
from dlion_worker.trainer.loop import TrainerComponents, TrainingLoop
from dlion_worker.trainer.signal_handler import Interrupted
from dlion_worker.trainer.waiting_inbox import WaitingInbox
from dlion_worker.training.checkpointing import Checkpointer
from dlion_worker.training.programs import TrainingProgram
from dlion_worker.training.programs.callbacks import TrainingCallbacks

SIZE = 6


class Model:
    """Weights, and a step whose gradient depends on them and on the batch."""

    def __init__(self, rank: int, rng: random.Random, nap_s: float, before: Any) -> None:
        self.weights_D = np.ones(SIZE, np.float32)
        self._rank, self._rng, self._nap_s, self._before = rank, rng, nap_s, before

    def step(self, x_B: np.ndarray, y_B: np.ndarray) -> Any:
        self._before()
        time.sleep(self._nap_s * self._rng.random())
        gradient_D = self.weights_D * np.float32(0.1) + np.float32(x_B[0] % 7) * (self._rank + 1)
        return SimpleNamespace(loss=1.0, gradient_D=gradient_D, finite=True, features=None)

    def get_weights(self) -> np.ndarray:
        return self.weights_D.copy()

    def get_counters(self) -> np.ndarray:
        return np.zeros(0, np.int64)

    def get_state(self) -> np.ndarray:
        return np.zeros(0, np.float32)

    def set_weights(self, weights_D: np.ndarray) -> None:
        self.weights_D[:] = weights_D

    def set_state(self, state: np.ndarray) -> None:
        pass

    def set_counters(self, counters: np.ndarray) -> None:
        pass


class Replica:
    """The part of `LocalReplica` that the loop and the checkpointer use."""

    learning_rate = 0.01

    def __init__(self, model: Model) -> None:
        self.model, self.iteration, self.samples = model, 0, 0
        self.taken = 0
        """The number of states taken over from peers."""
        self.blended = 0
        self.last_round: LastRound | None = None
        self._lock = threading.Lock()
        self.optimizer = SimpleNamespace(state=dict, restore=lambda _: None)

    def step(self, x_B: np.ndarray, y_B: np.ndarray) -> Any:
        return self.model.step(x_B, y_B)

    def apply_gradient(
        self,
        gradient_D: np.ndarray,
        *,
        iteration: int,
        samples: int,
        on_updated: Callable[[], None],
        **_: Any,
    ) -> None:
        with self._lock:
            self.model.weights_D -= np.float32(self.learning_rate) * gradient_D
            self.iteration, self.samples = iteration, samples
        on_updated()

    @property
    def weights_D(self) -> np.ndarray:  # noqa: N802 - the shape's suffix
        return self.model.weights_D

    def end_with(self, last: LastRound) -> None:
        self.last_round = last

    @property
    def resting_D(self) -> np.ndarray:  # noqa: N802 - the shape's suffix
        return self.model.weights_D.copy()

    def snapshot_for(self) -> StateSnapshot:
        with self._lock:
            return StateSnapshot(self.iteration, self.samples, self.model.weights_D.tobytes())

    def blend(self, other_D: np.ndarray, fraction: float, since_D: np.ndarray | None) -> None:
        """As `LocalReplica.blend`."""
        with self._lock:
            self.blended += 1
            since_D = self.model.weights_D if since_D is None else since_D
            self.model.weights_D += np.float32(fraction) * (other_D - since_D)

    def replace(self, weights_D: np.ndarray) -> None:
        with self._lock:
            self.model.set_weights(weights_D)

    def restore_from(self, snapshot: StateSnapshot) -> None:
        self.model.set_weights(np.frombuffer(bytes(snapshot.payload), np.float32))
        self.iteration = snapshot.iteration
        self.taken += 1


class Stream:
    """Counts: the next batch is the next number."""

    passes = earlier_passes = None

    def __init__(self) -> None:
        self.place = 0

    def next(self, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        self.place += 1
        return np.full(batch_size, self.place), np.zeros(batch_size)

    def state(self) -> dict[str, int]:
        return {"place": self.place}

    def restore(self, state: dict[str, int]) -> None:
        self.place = int(state["place"])


class Network:
    """Every link of the cluster; a message arrives after those before it, with a delay."""

    def __init__(self, rng: random.Random, delay_s: float, *, state_s: float = 0.0) -> None:
        """`state_s` is the time that the transfer of a whole state takes."""
        self._rng, self._delay_s, self._state_s = rng, delay_s, state_s
        self._lock = threading.RLock()
        self.up: dict[Rank, Node] = {}
        self._cut: set[Rank] = set()
        self._links: dict[tuple[Rank, Rank], queue.SimpleQueue[Any]] = {}
        self._epochs: dict[frozenset[Rank], int] = {}
        """How often the link of these two has come up."""

    def join(self, node: Node) -> None:
        with self._lock:
            self.up[node.rank] = node
            self._bring_up(node)

    def _link(self, sender: Rank, to: Node) -> queue.SimpleQueue[Any]:
        """The link from that rank to that process, over all of the rank's incarnations."""
        link = self._links.get((sender, to.rank))
        if link is None:
            link = self._links[sender, to.rank] = queue.SimpleQueue()
            threading.Thread(target=self._carry, args=(link, to), daemon=True).start()
        return link

    def _bring_up(self, node: Node) -> None:
        for peer in self.up.keys() - {node.rank}:
            pair = frozenset((node.rank, peer))
            self._epochs[pair] = self._epochs.get(pair, 0) + 1
        for a, b, link in self._links_of(node):
            epoch = self._epochs[frozenset((a.rank, b.rank))]
            self._post(link, LinkUp(a.rank, epoch, a.replica.iteration))

    def renew(self, node: Node) -> None:
        """Take its links down and up again, for both ends."""
        self.cut_off(node)
        self.restore(node)

    def cut_off(self, node: Node) -> None:
        """Take its links down, for both ends."""
        with self._lock:
            self._cut.add(node.rank)
            for a, _, link in self._links_of(node):
                self._post(link, LinkDown(a.rank, 0, "cut"))

    def restore(self, node: Node) -> None:
        """Take its links up again."""
        with self._lock:
            self._cut.discard(node.rank)
            self._bring_up(node)

    def _links_of(self, node: Node) -> list[tuple[Node, Node, queue.SimpleQueue[Any]]]:
        """Each of its links as sender, receiver and queue."""
        others = [other for other in self.up.values() if other is not node]
        pairs = [(node, other) for other in others] + [(other, node) for other in others]
        return [(a, b, self._link(a.rank, b)) for a, b in pairs]

    def leave(self, node: Node) -> None:
        with self._lock:
            del self.up[node.rank]
            for key in [key for key in self._links if key[1] == node.rank]:
                self._links.pop(key).put(None)
            for other in self.up.values():
                self._post(self._links[node.rank, other.rank], LinkDown(node.rank, 0, "killed"))

    def send(
        self, sender: Rank, receiver: Rank, message: Message, epoch: int | None = None
    ) -> None:
        with self._lock:
            if epoch not in {None, self._epochs.get(frozenset((sender, receiver)))}:
                return
            link = self._links.get((sender, receiver))
            is_cut = not self._cut.isdisjoint((sender, receiver))
            if link is not None and sender in self.up and receiver in self.up and not is_cut:
                self._post(link, MessageArrived(sender, message))

    def pull(self, donor: Rank, wanted: StateRequest | None) -> StateSnapshot:
        node = self.up.get(donor)
        if node is None:
            raise UnavailableError(f"{donor} has ended")
        time.sleep(self._delay_s * self._rng.random())
        while wanted is not None and node.replica.iteration < wanted.at_least:
            if self.up.get(donor) is not node:
                raise UnavailableError(f"{donor} has ended")
            time.sleep(0.001)
        snapshot = node.replica.snapshot_for()
        time.sleep(self._state_s)
        return snapshot

    def _post(self, link: queue.SimpleQueue[Any], arrival: Any) -> None:
        link.put((time.monotonic() + self._delay_s * self._rng.random(), arrival))

    def _carry(self, link: queue.SimpleQueue[Any], to: Node) -> None:
        while (posted := link.get()) is not None:
            due_s, arrival = posted
            time.sleep(max(0.0, due_s - time.monotonic()))
            to.inbox.put(arrival)


class Node:
    """One worker; `kill` makes it vanish, but not while it sends a gradient to all peers."""

    def __init__(
        self, job: Job, rank: Rank, network: Network, incarnation: int, nap_s: float
    ) -> None:
        self.rank, self.incarnation, self._network = rank, incarnation, network
        self.hashes: dict[int, str] = {}
        self.steps: list[StepRecord] = []
        self.error: BaseException | None = None
        self._killed, self._to_stop = threading.Event(), threading.Event()
        self.loop: TrainingLoop | None = None
        self.is_on_the_way_back = False
        self._entered = False
        model = Model(rank, random.Random(rank + incarnation), nap_s, self._vanish_if_killed)
        self.replica, self.stream = Replica(model), Stream()
        self.inbox = WaitingInbox(self._send)
        self.progress = JobProgress()
        self._ranks = [worker.rank for worker in job.workers()]
        self.machine = self._new_machine(job)
        self.checkpointer = Checkpointer(
            Path("unused"), every_s=1e9, replica=self.replica, progress=self.progress,
            stream=self.stream, machine=self.machine,
        )  # fmt: skip
        self._job = job
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _new_machine(self, job: Job) -> Any:
        layout = Layout(("w",), (SIZE,))
        return factory.build(job.spec, self.rank, layout, self._ranks, replica=self.replica)

    def start(self) -> Node:
        self._network.join(self)
        self.thread.start()
        return self

    @property
    def is_training(self) -> bool:
        """Whether it trains."""
        return self._entered and self.thread.is_alive()

    def kill(self) -> None:
        self._killed.set()
        self.thread.join(10)
        assert not self.thread.is_alive()

    def ask_to_stop(self) -> None:
        """Ask it to stop, as the coordinator does."""
        self._to_stop.set()

    def stop(self) -> None:
        """Ask it, and so all, to stop; return when it has."""
        self.ask_to_stop()
        self.thread.join(10)
        assert not self.thread.is_alive()

    @property
    def lacks_quorum(self) -> bool:
        return self.loop is not None and self.loop.lacks_quorum

    def _send(self, peer: Rank, message: Message, epoch: int | None = None) -> None:
        self._network.send(self.rank, peer, message, epoch)

    def _vanish_if_killed(self) -> None:
        if self._killed.is_set():
            self._network.leave(self)
            raise Interrupted("killed")

    def _run(self) -> None:
        try:
            self._enter()
            self._entered = True
            self._train()
        except Interrupted:
            pass
        except BaseException as error:
            self.error = error
            raise

    def _stopped(self) -> str | None:
        if not self._entered or self.lacks_quorum:
            self._vanish_if_killed()
        return "asked to stop" if self._entered and self._to_stop.is_set() else None

    def _enter(self, *, is_rejoin: bool = False) -> StateSnapshot | None:
        exchange = SimpleNamespace(send=self._send, pull_state=self._network.pull)
        admission = Admission(
            self._job, self.rank, self.inbox, membership=self._membership,
            now_s=time.monotonic(), state_bytes=8 * SIZE, is_rejoin=is_rejoin,
        )  # fmt: skip
        snapshot = join_run(admission, exchange, self.inbox, stopped=self._stopped)
        if snapshot is not None:
            self.checkpointer.adopt(snapshot)
        return snapshot

    def _membership(self) -> Membership:
        up = {node.rank: node.incarnation for node in [*self._network.up.values()]}
        workers = [worker for worker in self._job.workers() if worker.rank in up]
        members = [Member(w, up[w.rank], MemberState.READY, "a:1") for w in workers]
        return Membership(1, self._job.key, len(self._ranks), tuple(members))

    def _rejoin(self) -> None:
        """Rejoin as `Worker` does."""
        policies, self.machine = self.checkpointer.policies(), self.machine.restarted()
        self.loop.reset(self.machine)
        self.inbox.reset(self.progress.iteration)
        self._network.renew(self)
        self.is_on_the_way_back = True
        snapshot = None
        with contextlib.suppress(Interrupted):
            snapshot = self._enter(is_rejoin=True)
        self.is_on_the_way_back = False
        if snapshot is None:
            self.machine.restore(policies)

    def _train(self) -> None:
        nothing = lambda *_, **__: None  # noqa: E731
        exchange = SimpleNamespace(
            send=self._send, set_iteration=nothing, cpu_s=float, wire_bytes=int, link_counters=dict,
            framing_s=lambda: (0.0, 0.0),
            take_deliveries=list, sendable_bytes=self.sendable_bytes, one_way_delays_s=dict,
            record_violation=nothing, set_budgets=nothing,
        )  # fmt: skip
        sidecar = SimpleNamespace(latest_directive=nothing, send=nothing, on_refused=nothing)
        reporter = SimpleNamespace(
            step=self._note,
            event=nothing,
            links=nothing,
            now_s=float,
            rank=self.rank,
            incarnation=self.incarnation,
        )
        refusals = PeerRefusalReporter(reporter, sidecar, self.progress)
        callbacks = TrainingCallbacks(
            TrainingProgram("none", nothing),
            contextlib.nullcontext,
            epoch_samples=int,
            own_samples=int,
        )
        self.loop = TrainingLoop(
            TrainerComponents(
                job=self._job, rank=self.rank, replica=self.replica, stream=self.stream,
                machine=self.machine, exchange=exchange, sidecar=sidecar, reporter=reporter,
                inbox=self.inbox, refusals=refusals,
            ),
            progress=self.progress, checkpointer=self.checkpointer,
            external_stop=self._stopped, interrupted=lambda: False, after_step=nothing,
            training_set_samples=lambda _: 1000, callbacks=callbacks,
        )  # fmt: skip
        while self.loop.run() is None:
            self._rejoin()

    def sendable_bytes(self) -> dict[Rank, float]:
        """The bytes that the links can carry, in every iteration."""
        return {}

    def _note(self, step: Any) -> None:
        self.hashes[step.iteration] = step.weights_hash
        self.steps.append(step)


def synchronous_job(
    workers: int | dict[str, int],
    max_steps: int,
    *,
    min_sites: int = 1,
    deadline_s: int = 0,
    policy: str = "full",
    mode: str = "synchronous",
    **parameters: Any,
) -> Job:
    """Gradients in lock step, by default whole ones; at one site, or at the given sites.

    `deadline_s` is 0 for none. `parameters` are those of the policy.
    """
    sites = {"a": workers} if isinstance(workers, int) else workers
    return load_job(
        {
            "apiVersion": "dlion.dev/v1alpha1",
            "kind": "DLionJob",
            "metadata": {"name": "cluster"},
            "spec": {
                "sites": [
                    {"name": name, "groups": [{"name": "g", "workers": count}]}
                    for name, count in sites.items()
                ],
                "minSites": min_sites,
                **({"startDeadlineSeconds": deadline_s} if deadline_s else {}),
                "trainer": {
                    "program": {"builtin": "digits"},
                    "dataset": {"name": "digits"},
                    "hashWeights": True,
                    "stop": {"maxSteps": max_steps},
                },
                "exchange": {"policy": policy, "codec": "float32", "parameters": parameters},
                "synchronization": {"mode": mode},
                "knowledgeTransfer": {"policy": "none"},
            },
        }
    )
