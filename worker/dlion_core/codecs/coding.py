"""How a worker encodes its payloads: the manifest's choices in one object.

Built by `policies.factory` from `spec.exchange`, used by `payload`. Decoding does not need it:
payloads are self-describing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from dlion_core.codecs.values import ValueCodec


class IndexCodec(StrEnum):
    """Encoding of positions of kept entries; the manifest's `exchange.indexCodec`."""

    FAST = "fast"
    """The smallest byte-aligned encoding whose size follows from the number kept."""
    SMALLEST = "smallest"
    """The smallest of all, including Golomb-Rice codes and varints."""


@dataclass(frozen=True)
class Coding:
    """How to encode payloads. `decimals` is for polyline. `seed` is for int8 and int4; it differs
    between workers, so that their rounding errors are independent."""

    values: ValueCodec
    indices: IndexCodec = IndexCodec.FAST
    decimals: int = 4
    seed: int = 0

    @property
    def for_weights(self) -> Coding:
        """The same for weights: float16 if values would have fewer bits.

        Rounding of gradients averages out over steps; rounding of weights would discard small
        steps.
        """
        coarse = (ValueCodec.BFLOAT16, ValueCodec.INT8, ValueCodec.INT4)
        return replace(self, values=ValueCodec.FLOAT16) if self.values in coarse else self


AnyCoding = Coding | ValueCodec
"""A value codec alone means defaults for all else."""


def coding_of(coding: AnyCoding) -> Coding:
    return coding if isinstance(coding, Coding) else Coding(coding)
