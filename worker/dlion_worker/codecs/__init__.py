"""Payloads of messages: arrays to bytes and back, checked as the untrusted input they are.

What goes in: the form of coded gradients, weights and losses, their exact sizes, and the bounds of
what coding loses. What stays out: which entries are worth sending (`policies`), frames and
checksums (`exchange`). Pure functions over NumPy arrays; no I/O, no clock, no thread. To import
this package compiles its inner loops, or loads what was compiled before (`compiling`).
"""

from dlion_worker.codecs.coding import AnyCoding, Coding, IndexCodec, coding_of
from dlion_worker.codecs.payload import (
    HEADER_BYTES,
    GradientPart,
    coded_bytes,
    decode_gradient,
    decode_loss,
    decode_weights,
    encode_loss,
    encode_range,
    encode_selected,
    encode_weights,
    encode_whole,
    kept_that_fit,
    most_coded_bytes,
    range_bytes,
    range_that_fits,
)
from dlion_worker.codecs.selected import Selected
from dlion_worker.codecs.values import NotFiniteError, ValueCodec, require_finite

__all__ = [
    "HEADER_BYTES",
    "AnyCoding",
    "Coding",
    "GradientPart",
    "IndexCodec",
    "NotFiniteError",
    "Selected",
    "ValueCodec",
    "coded_bytes",
    "coding_of",
    "decode_gradient",
    "decode_loss",
    "decode_weights",
    "encode_loss",
    "encode_range",
    "encode_selected",
    "encode_weights",
    "encode_whole",
    "kept_that_fit",
    "most_coded_bytes",
    "range_bytes",
    "range_that_fits",
    "require_finite",
]
