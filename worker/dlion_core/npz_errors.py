"""The exceptions that NumPy and the standard library raise for a damaged `.npz` file.

Used by all readers of such archives, and for `.keras` files. Found by fuzzing (tests/fuzz).
Undocumented: an unknown version or method (NotImplementedError), an encryption flag (RuntimeError),
damaged compression, an invalid header (SyntaxError, TokenError), and an impossible shape
(MemoryError).
"""

import lzma
import struct
import tokenize
import zipfile
import zlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

NPZ_ERRORS: Final = (
    ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, OSError, RuntimeError,
    SyntaxError, TypeError, ValueError, lzma.LZMAError, struct.error, tokenize.TokenError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def as_array(member: object) -> NDArray[Any]:
    """The array that `numpy.load` returned for one name. Raises: ValueError where the member lacks
    an array header; NumPy then returns its bytes."""
    if not isinstance(member, np.ndarray):
        raise ValueError("a member of the archive is not an array")
    return member
