"""Compare one TensorFlow call for the gradients of several workers with one call each.

    python benchmarks/batched_gradients.py [--workers 6] [--repeat 7]

The network is `cipher`. Each worker has its own weights and batch, on all cores of this machine,
with one thread inside an operation. *Threads*: a call for each worker, as many at a time as there
are cores (as the simulator does). *Unrolled*: one call whose graph has every worker's step side by
side. *Vectorised*: one call in which workers are a dimension (`tf.vectorized_map`). Figures are
milliseconds for all workers; the median, and the range, of the alternating repeats.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from local_runs import commit

from dlion_worker.training import threads

if TYPE_CHECKING:
    from collections.abc import Callable

BATCHES = (8, 32, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--repeat", type=int, default=7)
    arguments = parser.parse_args()
    threads.configure(1.0)
    cores = len(os.sched_getaffinity(0))
    print(f"commit {commit()}: {arguments.workers} workers, {cores} cores\n")
    print("| samples each | way | ms | range |\n|---|---|---|---|")
    with ThreadPoolExecutor(cores) as executor:
        for batch in BATCHES:
            ways = _ways(arguments.workers, batch, executor)
            for name, times in _taking_turns(ways, arguments.repeat).items():
                middle = statistics.median(times)
                print(f"| {batch} | {name} | {middle:.0f} | {min(times):.0f} to {max(times):.0f} |")


def _ways(workers: int, batch: int, executor: ThreadPoolExecutor) -> dict[str, Callable[[], Any]]:
    """Return the three methods, ready to be called; they give the same gradients."""
    import numpy as np
    import tensorflow as tf

    from dlion_worker.training.programs.builtin import cipher

    model = cipher((32, 32, 3), 10)
    rng = np.random.default_rng(1)
    x_WB = tf.constant(rng.random((workers, batch, 32, 32, 3), np.float32))
    y_WB = tf.constant(rng.integers(0, 10, (workers, batch)), tf.int32)
    stacked = [
        tf.stack([v.numpy() * (1 + 0.01 * k) for k in range(workers)])
        for v in model.trainable_variables
    ]
    fixed = [v.value for v in model.non_trainable_variables]

    def gradient(weights: list[Any], x_B: Any, y_B: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            logits, _ = model.stateless_call(weights, fixed, x_B, training=True)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y_B, logits=logits)
            )
        return list(tape.gradient(loss, weights))

    def all_unrolled(stacked: list[Any], x_WB: Any, y_WB: Any) -> list[Any]:
        return [gradient([v[k] for v in stacked], x_WB[k], y_WB[k]) for k in range(workers)]

    def vectorised(stacked: list[Any], x_WB: Any, y_WB: Any) -> Any:
        return tf.vectorized_map(lambda one: gradient(*one), (stacked, x_WB, y_WB))

    own = [([v[k] for v in stacked], x_WB[k], y_WB[k]) for k in range(workers)]
    one = tf.function(gradient, autograph=False)
    unrolled = tf.function(all_unrolled, autograph=False)
    mapped = tf.function(vectorised, autograph=False)
    expected = [g.numpy() for g in one(*own[1])]
    for found in (unrolled(stacked, x_WB, y_WB)[1], [g[1] for g in mapped(stacked, x_WB, y_WB)]):
        for right, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(other.numpy(), right, rtol=1e-3, atol=1e-5)
    return {
        "threads": lambda: list(executor.map(lambda each: one(*each)[0].numpy(), own)),
        "unrolled": lambda: unrolled(stacked, x_WB, y_WB)[-1][0].numpy(),
        "vectorised": lambda: mapped(stacked, x_WB, y_WB)[0].numpy(),
    }


def _taking_turns(ways: dict[str, Callable[[], Any]], repeat: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeat):
        for name, call in ways.items():
            began_s = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - began_s))
    return times


if __name__ == "__main__":
    main()
