"""What NumPy and the standard library raise for a damaged `.npz` file.

Used by everything that reads one (data sets, checkpoints, snapshots of replicas), and for `.keras`
files, which are such archives with HDF5 in them. Found by fuzzing (tests/fuzz): besides what is
documented there is an unknown version or method of the archive (NotImplementedError), a flag for
encryption (RuntimeError), damaged compression, a header that is no Python (SyntaxError,
TokenError), and a shape that no machine holds (MemoryError).
"""

from __future__ import annotations

import lzma
import struct
import tokenize
import zipfile
import zlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

NPZ_FAULTS: Final = (
    ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, OSError, RuntimeError,
    SyntaxError, TypeError, ValueError, lzma.LZMAError, struct.error, tokenize.TokenError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def as_array(member: object) -> NDArray[Any]:
    """The array that `numpy.load` gave for one name.

    Raises: ValueError where the member has no array's beginning, of which NumPy gives the bytes.
    """
    if not isinstance(member, np.ndarray):
        raise ValueError("a member of the archive is no array")
    return member
