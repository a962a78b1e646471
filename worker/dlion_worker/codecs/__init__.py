"""Payloads of messages: arrays to bytes and back, checked as the untrusted input they are.

What goes in: the form of coded gradients, weights and losses, their exact sizes, and the bounds of
what coding loses. What stays out: which entries are worth sending (`policies`), frames and
checksums (`exchange`). Pure functions over NumPy arrays; no I/O, no clock, no thread.
"""

from dlion_worker.codecs.payload import (
    HEADER_BYTES,
    GradientPart,
    coded_bytes,
    decode_gradient,
    decode_loss,
    decode_weights,
    encode_loss,
    encode_sparse,
    encode_weights,
    encode_whole,
    kept_that_fit,
)
from dlion_worker.codecs.values import ValueCodec, require_finite

__all__ = [
    "HEADER_BYTES",
    "GradientPart",
    "ValueCodec",
    "coded_bytes",
    "decode_gradient",
    "decode_loss",
    "decode_weights",
    "encode_loss",
    "encode_sparse",
    "encode_weights",
    "encode_whole",
    "kept_that_fit",
    "require_finite",
]
