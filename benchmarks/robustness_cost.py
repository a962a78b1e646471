"""Measure the cost per step of the detector of bad contributions and of each robust method.

    python benchmarks/robustness_cost.py [--repeat 36]

One worker of four computes the gradient of `cipher` (1.1 M parameters) with a batch of 48 on one
thread. Then it exchanges a step by `full` (whole gradients of 16 bits), or a round by `adaptive`
with two local steps and 5 % of the entries. Its peers are equal machines, whose messages it
receives. Steps with the methods of `exchange.robustness` alternate in one process. The script
prints CPU times: the mean of the exchange, and the addition by a method as a share of the whole
step, gradient included. The first 16 rounds, all of which are measured, do not count. No method
adds a byte; those of `adaptive` differ slightly, since methods lead to other weights.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from local_runs import commit

from dlion_api.names import Rank
from dlion_api.spec import load_job
from dlion_core.policies.claims.deviations import WINDOW
from dlion_core.policies.factory import build
from dlion_core.policies.interface import (
    ApplyGradient,
    Layout,
    LocalStepDone,
    MemberJoined,
    MessageArrived,
    ReplaceWeights,
    SendMessage,
    UpdateApplied,
)

WORKERS, BATCH = 4, 48
METHODS = ("off", "detect", "clip", "trimmed", "krum")
POLICIES: dict[str, dict[str, Any]] = {
    "full": {},
    "adaptive": {"localSteps": 2, "density": 0.05},
}


class Replica:
    """Weights of one worker."""

    def __init__(self, size: int) -> None:
        self.weights_D = np.random.default_rng(0).standard_normal(size).astype(np.float32)

    @property
    def resting_D(self) -> Any:  # noqa: N802 - the shape's suffix
        return self.weights_D.copy()


class Workers:
    """Four machines, of which the first is timed."""

    def __init__(self, policy: str, method: str, size: int) -> None:
        document = {
            "apiVersion": "dlion.dev/v1alpha1",
            "kind": "DLionJob",
            "metadata": {"name": "cost"},
            "spec": {
                "sites": [{"name": "a", "groups": [{"name": "g", "workers": WORKERS}]}],
                "trainer": {
                    "program": {"builtin": "digits"},
                    "dataset": {"name": "digits"},
                    "stop": {"maxSteps": 1},
                },
                "exchange": {
                    "policy": policy, "parameters": POLICIES[policy], "robustness": method,
                },
                "knowledgeTransfer": {"policy": "none"},
            },
        }  # fmt: skip
        ranks = [Rank(at) for at in range(WORKERS)]
        spec = load_job(document).spec
        self.replicas = [Replica(size) for _ in ranks]
        self.machines: list[Any] = [
            build(spec, rank, Layout(("w",), (size,)), ranks, replica=self.replicas[rank])
            for rank in ranks
        ]
        self.spent_s, self.sent_bytes, self._iteration = 0.0, 0, 0
        for rank in ranks:
            for peer in ranks:
                if peer != rank:
                    self._handle(rank, MemberJoined(peer))

    def step(self, gradient_PD: Any) -> float:
        """Return the CPU seconds of the first worker's exchange in one step."""
        self.spent_s, self._iteration = 0.0, self._iteration + 1
        messages: list[tuple[int, int, Any]] = []
        for rank, gradient_D in enumerate(gradient_PD):
            done = LocalStepDone(self._iteration, gradient_D, BATCH, 1.0, BATCH * WORKERS)
            messages += self._handle(rank, done)
        while messages:
            source, target, message = messages.pop(0)
            messages += self._handle(target, MessageArrived(Rank(source), message))
        return self.spent_s

    def _handle(self, rank: int, event: Any) -> list[tuple[int, int, Any]]:
        began_s = time.thread_time()
        instructions = self.machines[rank].handle(event)
        if rank == 0:
            self.spent_s += time.thread_time() - began_s
        sent = []
        for one in instructions:
            match one:
                case SendMessage(peer=peer, message=message):
                    self.sent_bytes += message.size_bytes
                    sent.append((rank, peer, message))
                case ApplyGradient(gradient_D=gradient_D):
                    self.replicas[rank].weights_D -= np.float32(0.01) * gradient_D
                    sent += self._handle(rank, UpdateApplied())
                case ReplaceWeights(weights_D=weights_D):
                    self.replicas[rank].weights_D[:] = weights_D
        return sent


def gradient_s(repeat: int) -> tuple[float, int]:
    """Return the median CPU seconds of a gradient of `cipher`, and its number of parameters."""
    from dlion_worker.training import threads

    threads.configure(1.0)
    import tensorflow as tf

    from dlion_worker.training.programs.builtin import cipher

    model = cipher((32, 32, 3), 10)
    rng = np.random.default_rng(1)
    x_B = tf.constant(rng.random((BATCH, 32, 32, 3), np.float32))
    y_B = tf.constant(rng.integers(0, 10, BATCH), tf.int32)

    @tf.function
    def gradient() -> Any:
        with tf.GradientTape() as tape:
            logits = model(x_B, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y_B, logits))
        return tape.gradient(loss, model.trainable_variables)

    times = []
    for _ in range(repeat + 2):
        began_s = time.process_time()
        gradient()[0].numpy()
        times.append(time.process_time() - began_s)
    return statistics.median(times[2:]), int(sum(v.shape.num_elements() for v in model.weights))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=36, help="rounds of all methods")
    arguments = parser.parse_args()
    compute_s, size = gradient_s(arguments.repeat)
    print(
        f"commit {commit()}: {arguments.repeat} rounds, {size:,} parameters; a gradient of", end=""
    )
    print(f" {BATCH} samples takes {compute_s * 1e3:.0f} ms\n")
    print("| policy | method | exchange of a step | added | of a step | bytes beside `off` |")
    print("|---|---|---|---|---|---|")
    rng = np.random.default_rng(2)
    for policy, parameters in POLICIES.items():
        steps = parameters.get("localSteps", 1)
        workers = {method: Workers(policy, method, size) for method in METHODS}
        times_s: dict[str, list[float]] = {method: [] for method in METHODS}
        for _ in range(arguments.repeat):
            gradients = [
                [rng.standard_normal(size).astype(np.float32) for _ in range(WORKERS)]
                for _ in range(steps)
            ]
            for method in METHODS:
                spent_s = sum(workers[method].step(one) for one in gradients)
                times_s[method].append(spent_s / steps)
        mean_s = {method: statistics.fmean(times_s[method][WINDOW:]) for method in METHODS}
        for method in METHODS:
            added_s, whole_s = mean_s[method] - mean_s["off"], compute_s + mean_s["off"]
            more = workers[method].sent_bytes - workers["off"].sent_bytes
            print(
                f"| `{policy}` | `{method}` | {mean_s[method] * 1e3:.1f} ms"
                f" | {added_s * 1e3:.2f} ms | {added_s / whole_s:.1%} | {more} |"
            )


if __name__ == "__main__":
    main()
