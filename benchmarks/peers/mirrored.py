"""Run one worker of TensorFlow's own `MultiWorkerMirroredStrategy`.

    python benchmarks/peers/mirrored.py JOB.yaml --rank 0 --cluster HOST:PORT,... --out FILE

`compare.py` calls it once for each worker. Keras 3's `fit` does not support this strategy
(keras-team/keras issue 20585), so the loop is explicit, as in TensorFlow's guides. Model, loss,
optimizer, data and the worker's share of them are those of the manifest; a ring all-reduce over
gRPC averages gradients. Worker 0 writes a line of JSON for each step and each evaluation, on the
manifest's number of held-out samples. It ends after the manifest's number of steps; `compare.py`
ends it at the target.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import IO, Any

import numpy as np
import yaml


def main() -> None:
    """Train; the cluster must be in the environment before TensorFlow is loaded."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("job", type=Path)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--cluster", required=True, help="address of each worker, with commas")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--evaluate-every", type=int, default=20, help="steps")
    arguments = parser.parse_args()
    cluster = arguments.cluster.split(",")
    task = {"type": "worker", "index": arguments.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": cluster}, "task": task})
    with arguments.out.open("w", buffering=1) as out:
        train(arguments.job, arguments.rank, arguments.evaluate_every, out)


def train(path: Path, rank: int, evaluate_every: int, out: IO[str]) -> None:
    """Run the loop of TensorFlow's guide to custom training on several workers."""
    import tensorflow as tf

    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)

    from dlion_api.spec import load_job  # the strategy must precede any use of TensorFlow
    from dlion_worker.training import datasets, programs

    job = load_job(yaml.safe_load(path.read_text()), source=str(path), lines=None)
    spec = job.spec.trainer
    program = programs.load(spec.program, directory=path.parent)
    data = datasets.load(job, job.workers()[rank], program=program, data_root=Path("/"))
    whole_batch = job.spec.batching.global_batch_size.initial
    local_batch = whole_batch // len(job.workers())
    x, y = next(iter(data.parts.values()))
    tf.keras.utils.set_random_seed(spec.seed)
    with strategy.scope():
        model = program.build(data.input_shape, data.class_count)
        optimizer = tf.keras.optimizers.SGD(
            spec.optimizer.learning_rate, momentum=spec.optimizer.momentum
        )
        optimizer.build(model.trainable_variables)
    plain = program.build(
        data.input_shape, data.class_count
    )  # evaluated with a copy of the weights
    rng = np.random.default_rng([spec.seed, 7])  # the samples of dlion's evaluator
    chosen = rng.permutation(len(data.held_out_y))[: spec.evaluation.max_samples]
    held_out_x = data.held_out_x[chosen].astype("float32") / 255.0
    held_out_y = data.held_out_y[chosen]

    def replica_step(x_B: Any, y_B: Any) -> None:
        with tf.GradientTape() as tape:
            logits = model(tf.cast(x_B, tf.float32) / 255.0, training=True)
            each_B = tf.nn.sparse_softmax_cross_entropy_with_logits(y_B, logits)
            loss = tf.reduce_sum(each_B) / whole_batch
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function  # type: ignore[untyped-decorator]
    def step(x_B: Any, y_B: Any) -> None:
        strategy.run(replica_step, args=(x_B, y_B))

    samples = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(y), seed=spec.seed + rank)
    batches = iter(samples.repeat().batch(local_batch, drop_remainder=True).prefetch(2))
    for number in range(1, (spec.stop.max_steps or 0) + 1):
        step(*next(batches))
        out.write(json.dumps({"step": number, "time_s": time.monotonic()}) + "\n")
        if rank or number % evaluate_every:
            continue
        plain.set_weights(model.get_weights())
        logits = plain.predict(held_out_x, batch_size=500, verbose=0)
        accuracy = float((logits.argmax(-1) == held_out_y).mean())
        out.write(json.dumps({"step": number, "accuracy": accuracy}) + "\n")


if __name__ == "__main__":
    main()
