"""Selected entries of a flat vector, given by a minimum magnitude per variable.

Built by `policies.gradient.magnitudes`, encoded by `payload`. There is no list of positions: they
are determined when the payload is written, in one pass over the vector.

Legend: D entries of the flat vector, K kept, L variables.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlion_core.codecs import kernels, selection_kernels
from dlion_core.codecs.positions import BLOCK, Positions, positions_bytes

_MAGNITUDE = np.uint32(0x7FFFFFFF)


@dataclass(frozen=True)
class SelectedEntries:
    """The entries of `value_D` with |value| of at least their variable's cut.

    `end_L`: end of each variable, the last one is D. `cut_L`: bits of float32. `kept`: K. `peak`:
    the largest magnitude kept. The vector must not change meanwhile.
    """

    value_D: NDArray[np.float32]
    end_L: NDArray[np.int64]
    cut_L: NDArray[np.uint32]
    kept: int
    peak: float

    def index_K(self) -> NDArray[np.intp]:  # noqa: N802 - an array of K
        """Return their positions, ascending."""
        cut_D = np.repeat(self.cut_L, np.diff(self.end_L, prepend=0))
        return np.flatnonzero((self.value_D.view(np.uint32) & _MAGNITUDE) >= cut_D)

    def gathered(self, scheme: Positions) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        """Return their values in order, and their positions in a scheme other than `ALL`. Raises
        ValueError if their number differs from `kept`."""
        kept, size = self.kept, self.value_D.size
        value_K = np.empty(kept, np.float32)
        positions = np.empty(positions_bytes(scheme, kept, size), np.uint8)
        vector = (self.value_D, self.value_D.view(np.uint32), self.end_L, self.cut_L)
        length = positions.size
        if scheme is Positions.BITMAP:
            written = kernels.gather_bitmap(*vector, value_K, positions)
        elif scheme is Positions.BLOCK:
            blocks = -(-size // BLOCK)
            written = kernels.gather_blocks(
                *vector, value_K, positions[:blocks], positions[blocks:]
            )
        else:
            written, gaps = kernels.gather_gaps(*vector, value_K, positions.view(np.uint16))
            length = 2 * gaps
        if written != kept:
            raise ValueError(
                f"selection of {kept} entries; gathered: {written}: the vector has changed"
            )
        return value_K, positions[:length]


@dataclass(frozen=True)
class PickedEntries(SelectedEntries):
    """Entries whose values and positions are known. `cut_L` is not used."""

    place_K: NDArray[np.uint32]
    """Ascending."""
    picked_K: NDArray[np.float32]

    def index_K(self) -> NDArray[np.intp]:  # noqa: N802 - an array of K
        return self.place_K.astype(np.intp)

    def gathered(self, scheme: Positions) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        size = self.value_D.size
        positions = np.empty(positions_bytes(scheme, self.kept, size), np.uint8)
        length = positions.size
        if scheme is Positions.BITMAP:
            selection_kernels.write_bitmap(self.place_K, positions)
        elif scheme is Positions.BLOCK:
            blocks = -(-size // BLOCK)
            selection_kernels.write_blocks(self.place_K, positions[:blocks], positions[blocks:])
        else:
            length = 2 * selection_kernels.write_gaps(self.place_K, positions.view(np.uint16))
        return self.picked_K, positions[:length]
