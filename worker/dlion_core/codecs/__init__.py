"""Payloads of messages: encode arrays to bytes, and decode and check untrusted bytes.

Inside: the format of encoded gradients, weights and losses, their exact sizes, and bounds of the
encoding error. Outside: which entries to send (`policies`), frames and checksums (`exchange`). Pure
functions over NumPy arrays; no I/O, no clock, no thread. Importing this package compiles its inner
loops or loads them from a cache (`compiling`).
"""

from dlion_core.codecs.cosines import CosineTransform
from dlion_core.codecs.payload import (
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
    max_coded_bytes,
    max_kept_entries,
    max_range_length,
    range_bytes,
)
from dlion_core.codecs.selected import SelectedEntries
from dlion_core.codecs.values import (
    AnyCoding,
    Coding,
    IndexCodec,
    NotFiniteError,
    ValueCodec,
    coding_of,
    require_finite,
)

__all__ = [
    "HEADER_BYTES",
    "AnyCoding",
    "Coding",
    "CosineTransform",
    "GradientPart",
    "IndexCodec",
    "NotFiniteError",
    "SelectedEntries",
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
    "max_coded_bytes",
    "max_kept_entries",
    "max_range_length",
    "range_bytes",
    "require_finite",
]
