"""The small graph network that predicts links' rates: its file, and its arithmetic.

Two layers of messages between workers over their links. The file is JSON of a few kilobytes,
`forecast_model.json`; `python benchmarks/clustering.py --train` writes it. Plain Python, since a
sidecar does not load NumPy. Used by `link_forecast`.

    m_e  = relu(W1 f_e + b1)                            for each link e, with features f_e
    h_i  = mean of m_e over the links of worker i
    m'_e = relu(W2 [f_e, h_i + h_j, |h_i - h_j|] + b2)  for e between i and j
    h'_i = mean of m'_e over the links of worker i
    o_e  = w . relu(W3 [m'_e, h'_i + h'_j] + b3) + c    the predicted change of log rate

Source: Gilmer et al., Neural message passing for quantum chemistry, 2017; the features, the
symmetric form and the sizes are ours.
"""

from __future__ import annotations

import json
import math
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import add, mul
from typing import Any, Final

from dlion_api.errors import ContractError
from dlion_api.names import Rank

Vector = Sequence[float]
Edge = tuple[Rank, Rank]

FILE: Final = "forecast_model.json"
FORMAT: Final = 1
FEATURES: Final = (
    "rate", "trend", "ageOfMeasurement", "ageOfClass", "roughness", "rateByCommonPeers",
    "shareOfCommonPeers",
)  # fmt: skip
"""Features of one link, in order (`link_forecast`)."""
MAX_HIDDEN: Final = 64
MAX_WEIGHT: Final = 1e3


@dataclass(frozen=True)
class Dense:
    """One layer: a row of weights, and a bias, for each output."""

    rows: tuple[tuple[float, ...], ...]
    bias: tuple[float, ...]

    def relu(self, inputs: Vector) -> list[float]:
        """Its outputs, none below 0."""
        return [
            max(0.0, sum(map(mul, row, inputs)) + bias)
            for row, bias in zip(self.rows, self.bias, strict=True)
        ]


@dataclass(frozen=True)
class ForecastModel:
    """The network's weights."""

    first: Dense
    second: Dense
    third: Dense
    output: Dense
    horizon_s: float
    """The prediction is of the mean over this time."""

    def predict(self, features: Mapping[Edge, Vector]) -> dict[Edge, float]:
        """Return the predicted change of each link's log rate. Links are pairs of workers; which
        name a worker has, and in which order links stand, does not matter beyond rounding."""
        messages = {edge: self.first.relu(each) for edge, each in features.items()}
        state = _means(messages)
        messages = {}
        for (one, other), each in features.items():
            h_i, h_j = state[one], state[other]
            spread = [abs(a - b) for a, b in zip(h_i, h_j, strict=True)]
            inputs = [*each, *map(add, h_i, h_j), *spread]
            messages[one, other] = self.second.relu(inputs)
        state = _means(messages)
        (weights,), (bias,) = self.output.rows, self.output.bias
        return {
            (one, other): bias
            + sum(map(mul, weights, self.third.relu([*each, *map(add, state[one], state[other])])))
            for (one, other), each in messages.items()
        }


def _means(messages: Mapping[Edge, Vector]) -> dict[Rank, list[float]]:
    """The mean message of each worker's links."""
    sums: dict[Rank, list[float]] = {}
    counts: dict[Rank, int] = {}
    for edge, message in messages.items():
        for worker in edge:
            held = sums.get(worker)
            sums[worker] = list(message) if held is None else list(map(add, held, message))
            counts[worker] = counts.get(worker, 0) + 1
    return {worker: [each / counts[worker] for each in held] for worker, held in sums.items()}


@cache
def shipped_model() -> ForecastModel:
    """The model that DLion ships. Raises ContractError if its file is missing or damaged."""
    try:
        data = pkgutil.get_data(__package__, FILE)
    except OSError as error:
        raise _damaged(f"cannot be read: {error.strerror or error}") from None
    if data is None:
        raise _damaged("cannot be read: the package's loader has no files")
    return parse_model(data)


def parse_model(data: bytes) -> ForecastModel:
    """Parse a model file. Raises ContractError that names what is wrong and what to do."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged(f"is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise _damaged("holds no object")
    for field, wanted in (("format", FORMAT), ("features", list(FEATURES))):
        if document.get(field) != wanted:
            raise _damaged(f"has {field} {str(document.get(field))[:80]}; allowed: {wanted}")
    horizon_s: Any = document.get("horizonSeconds")
    if not _is_weight(horizon_s) or not horizon_s > 0:
        raise _damaged(f"has horizonSeconds {horizon_s!r}; allowed: above 0")
    layers = document.get("layers")
    if not isinstance(layers, dict):
        raise _damaged("has no layers")
    first = _layer(layers, "first", None, len(FEATURES))
    hidden = len(first.rows)
    second = _layer(layers, "second", hidden, len(FEATURES) + 2 * hidden)
    third = _layer(layers, "third", hidden, 2 * hidden)
    return ForecastModel(first, second, third, _layer(layers, "output", 1, hidden), horizon_s)


def _layer(layers: Mapping[str, Any], name: str, outputs: int | None, inputs: int) -> Dense:
    layer = layers.get(name)
    rows, bias = (layer.get("weights"), layer.get("bias")) if isinstance(layer, dict) else (0, 0)
    if not isinstance(rows, list) or not isinstance(bias, list) or not 0 < len(rows) <= MAX_HIDDEN:
        raise _damaged(f"lacks weights or bias of layer {name}")
    if len(rows) != (outputs or len(rows)) or len(bias) != len(rows):
        raise _damaged(f"has {len(rows)} rows and {len(bias)} biases in layer {name}")
    for row in rows:
        if not isinstance(row, list) or len(row) != inputs:
            raise _damaged(f"has a row in layer {name} that is not of {inputs} weights")
    if not all(map(_is_weight, [*bias, *(weight for row in rows for weight in row)])):
        raise _damaged(f"has weights in layer {name} that are not numbers up to {MAX_WEIGHT:g}")
    return Dense(tuple(tuple(map(float, row)) for row in rows), tuple(map(float, bias)))


def _is_weight(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and abs(value) <= MAX_WEIGHT


def _damaged(what: str) -> ContractError:
    return ContractError(
        f"the model of exchange.grouping learned, {FILE} of the package {__package__}, {what}. "
        "Install DLion again, set exchange.grouping: links, or train the model by "
        "`python benchmarks/clustering.py --train`"
    )
