"""How a worker writes its payloads: the manifest's choices, in one object.

Made by `policies.building` from `spec.exchange`, taken by `payload`. Whoever reads a payload needs
none of it: a payload says itself how it is coded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from dlion_worker.codecs.values import ValueCodec


class IndexCodec(StrEnum):
    """How positions of kept entries travel; the manifest's `exchange.indexCodec`."""

    FAST = "fast"
    """The smallest of those whose size follows from the number kept, in whole bytes."""
    SMALLEST = "smallest"
    """The smallest of all, Golomb-Rice codes and varints included."""


@dataclass(frozen=True)
class Coding:
    """How payloads are written. `decimals` are polyline's; `seed` is that of int8 and int4, and
    differs from worker to worker, so that their roundings are independent."""

    values: ValueCodec
    indices: IndexCodec = IndexCodec.FAST
    decimals: int = 4
    seed: int = 0

    @property
    def for_weights(self) -> Coding:
        """The same for weights: float16 where values have fewer bits than that.

        A gradient's rounding averages out over steps; a weight's would wipe out steps that are
        smaller than it.
        """
        coarse = (ValueCodec.BFLOAT16, ValueCodec.INT8, ValueCodec.INT4)
        return replace(self, values=ValueCodec.FLOAT16) if self.values in coarse else self


AnyCoding = Coding | ValueCodec
"""A value codec stands for itself with all else as by default."""


def coding_of(coding: AnyCoding) -> Coding:
    """As a `Coding`."""
    return coding if isinstance(coding, Coding) else Coding(coding)
