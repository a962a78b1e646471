"""Train the network of `exchange.grouping: learned` on simulated fleets, for `clustering.py`.

One example is a check of a decider: the features of all links that it predicts, computed by the
product's `LinkForecast`, and for each the mean log rate over the next `HORIZON_S`. The network is
that of `dlion_core.topology.forecast_model`, in Keras. The product's parser reads the written file
again, and must predict the same.

Shape suffixes: B checks, E links, N workers, F features, H hidden.
"""

from __future__ import annotations

import json
import math
from concurrent.futures import ProcessPoolExecutor
from itertools import count as counting
from pathlib import Path
from typing import Any

import numpy as np
from clustering_exchange import reports_of
from clustering_fleets import RADIO, Fleet, make_fleet

from dlion_api.names import Rank
from dlion_core.topology import forecast_model
from dlion_core.topology.forecast_model import FEATURES, FORMAT, ForecastModel, parse_model
from dlion_core.topology.link_forecast import MAX_LOG, LinkHistory
from dlion_core.topology.regrouping import CHECK_INTERVAL_S

MODEL_FILE = Path(forecast_model.__file__).with_name(forecast_model.FILE)
HORIZON_S = 30.0
HIDDEN = 8
EPOCHS = 20
FLEETS = 40
"""The last eighth of them is for validation."""
SECONDS = 360
SIZES = (16, 24, 32, 40)
KINDS = ("convoys", "convoys", "highway", "static")
WORKERS_N = max(SIZES)

Example = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Features [E, F], both ends [E, 2] and the change of log rate [E]."""


def training_fleet(number: int) -> Fleet:
    return make_fleet(KINDS[number % 4], SIZES[number // 4 % 4], 100 + number, SECONDS)


def examples_of(fleet: Fleet) -> list[Example]:
    """Return all checks of a fleet with a link to predict."""
    history, known, found = LinkHistory(), {}, []
    everyone = [Rank(rank) for rank in range(fleet.count)]
    every_s, beyond = RADIO["everySeconds"], fleet.radio.beyond_bytes_per_s
    ahead = int(HORIZON_S / every_s)
    for check, news in enumerate(reports_of(fleet, fresh=True)):
        known.update(news)
        now_s = check * CHECK_INTERVAL_S
        step = int(now_s / every_s)
        if step + ahead >= len(fleet.rates):
            break
        measured = history.observe(everyone, known, now_s)
        features, level = history.features(measured, now_s)
        if not features:
            continue
        changes = []
        for pair in features:
            coming = [rates.get(pair, beyond) for rates in fleet.rates[step + 1 : step + 1 + ahead]]
            log = float(np.mean(np.log(np.array(coming) / level)))
            bounded = min(MAX_LOG, max(-MAX_LOG, log))
            changes.append(bounded - math.log(measured[pair] / level))
        found.append(
            (np.array(list(features.values())), np.array(list(features)), np.array(changes))
        )
    return found


def all_examples() -> tuple[list[Example], list[Example]]:
    """Return the examples for training and for validation."""
    with ProcessPoolExecutor() as pool:
        made = list(pool.map(examples_of, map(training_fleet, range(FLEETS))))
    kept = FLEETS - FLEETS // 8
    flat = [[example for each in part for example in each] for part in (made[:kept], made[kept:])]
    return flat[0], flat[1]


def as_arrays(examples: list[Example]) -> dict[str, np.ndarray]:
    """Return all examples, padded to the same number of links."""
    links = max(len(change_E) for *_, change_E in examples)
    shape = (len(examples), links)
    arrays = {
        "features": np.zeros((*shape, len(FEATURES)), np.float32),
        "ends": np.zeros((*shape, 2), np.int32),
        "mask": np.zeros(shape, np.float32),
        "change": np.zeros(shape, np.float32),
    }
    for at, (features_EF, ends_E2, change_E) in enumerate(examples):
        arrays["features"][at, : len(change_E)] = features_EF
        arrays["ends"][at, : len(change_E)] = ends_E2
        arrays["mask"][at, : len(change_E)] = 1.0
        arrays["change"][at, : len(change_E)] = change_E
    return arrays


def network() -> Any:
    """Return the network in Keras: features, ends and mask in; [B, E] out, 0 for padding."""
    import keras
    from keras import layers, ops

    features = keras.Input((None, len(FEATURES)), name="features")
    ends = keras.Input((None, 2), dtype="int32", name="ends")
    mask = keras.Input((None,), name="mask")

    def spread(arguments: list[Any]) -> Any:
        """Return the states of both ends of each link, from the mean messages of its workers."""
        message_BEH, ends_BE2, mask_BE = arguments
        is_end_BEN = ops.sum(ops.one_hot(ends_BE2, WORKERS_N), axis=2) * mask_BE[..., None]
        sum_BNH = ops.einsum("ben,beh->bnh", is_end_BEN, message_BEH)
        count_BN = ops.sum(is_end_BEN, axis=1)
        mean_BNH = sum_BNH / ops.maximum(count_BN, 1.0)[..., None]
        states = [
            ops.einsum("ben,bnh->beh", ops.one_hot(ends_BE2[..., end], WORKERS_N), mean_BNH)
            for end in (0, 1)
        ]
        return ops.stack(states, axis=-1)

    def at_ends(message: Any) -> Any:
        shape = (None, HIDDEN, 2)
        return layers.Lambda(spread, output_shape=shape)([message, ends, mask])

    def both(states: Any) -> Any:
        return layers.Lambda(lambda s: s[..., 0] + s[..., 1], output_shape=(None, HIDDEN))(states)

    def apart(states: Any) -> Any:
        return layers.Lambda(lambda s: ops.abs(s[..., 0] - s[..., 1]), output_shape=(None, HIDDEN))(
            states
        )

    message = layers.Dense(HIDDEN, activation="relu", name="first")(features)
    states = at_ends(message)
    inputs = layers.Concatenate()([features, both(states), apart(states)])
    message = layers.Dense(HIDDEN, activation="relu", name="second")(inputs)
    inputs = layers.Concatenate()([message, both(at_ends(message))])
    hidden = layers.Dense(HIDDEN, activation="relu", name="third")(inputs)
    output = layers.Dense(1, name="output")(hidden)
    masked = layers.Lambda(lambda a: a[0][..., 0] * a[1], output_shape=(None,))([output, mask])
    return keras.Model([features, ends, mask], masked)


def train(path: Path, seed: int = 1) -> None:
    """Train from new weights, write the file, and print its errors on the fleets for validation."""
    training, validation = all_examples()
    import keras  # only after the processes above were forked

    keras.utils.set_random_seed(seed)
    arrays, held_out = as_arrays(training), as_arrays(validation)
    model = network()
    model.compile(optimizer=keras.optimizers.Adam(0.003), loss=keras.losses.Huber(0.5))
    inputs = ["features", "ends", "mask"]
    model.fit(
        [arrays[name] for name in inputs], arrays["change"],
        batch_size=16, epochs=EPOCHS, verbose=2,
        validation_data=([held_out[name] for name in inputs], held_out["change"]),
    )  # fmt: skip
    path.write_text(as_document(model, seed))
    shipped = parse_model(path.read_bytes())
    predicted = model.predict([held_out[name] for name in inputs], verbose=0)
    report(shipped, validation, predicted)


def as_document(model: Any, seed: int) -> str:
    """Return the file's text: a row of weights per line."""
    layers = {}
    for name in ("first", "second", "third", "output"):
        kernel, bias = model.get_layer(name).get_weights()
        rows = [[round(float(weight), 5) for weight in row] for row in kernel.T]
        layers[name] = {"weights": rows, "bias": [round(float(each), 5) for each in bias]}
    document = {
        "format": FORMAT,
        "features": list(FEATURES),
        "horizonSeconds": HORIZON_S,
        "trainedBy": f"python benchmarks/clustering.py --train --seed {seed}",
        "layers": layers,
    }
    text = json.dumps(document, indent=1)
    return _rows_on_lines(text) + "\n"


def _rows_on_lines(text: str) -> str:
    """Join the lines of each innermost list."""
    joined, inside = [], False
    for line in text.splitlines():
        if inside:
            joined[-1] += line.strip() + ("" if line.strip().startswith("]") else " ")
            inside = not line.strip().startswith("]")
        else:
            joined.append(line)
            inside = line.rstrip().endswith("[") and not line.strip().startswith('"weights"')
    return "\n".join(joined).replace(" ]", "]")


def report(shipped: ForecastModel, examples: list[Example], predicted: np.ndarray) -> None:
    """Print errors of log rates, and the maximum difference between the file and Keras."""
    errors: dict[str, list[float]] = {"as measured": [], "predicted": []}
    differences = []
    for at, (features_EF, ends_E2, change_E) in zip(counting(), examples, strict=False):
        edges = [(Rank(int(one)), Rank(int(other))) for one, other in ends_E2]
        found = shipped.predict(dict(zip(edges, features_EF.tolist(), strict=True)))
        own_E = np.array([found[edge] for edge in edges])
        differences.append(np.abs(own_E - predicted[at, : len(edges)]).max())
        errors["as measured"] += np.abs(change_E).tolist()
        errors["predicted"] += np.abs(change_E - own_E).tolist()
    for name, each in errors.items():
        print(f"mean absolute error of log rates, {name}: {np.mean(each):.3f}")
    print(f"greatest difference between the file and Keras: {max(differences):.2g}")
