"""A program for simulated jobs of the digits: a network as large as the quick start's, 28 k
parameters, whose step costs a fifth of the time."""

from typing import Any

from keras import Input, Sequential, layers


def build_model() -> Any:
    """Images [B, 8, 8, 1] to logits [B, 10]."""
    return Sequential(
        [Input((8, 8, 1)), layers.Flatten(), layers.Dense(376, "relu"), layers.Dense(10)]
    )
