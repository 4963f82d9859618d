"""Arrays of whole numbers from .npy files of somebody else.

np.load evaluates a file's header as Python, if only literals, makes room for whatever shape it
says, and takes other kinds of files, too.
"""

from __future__ import annotations

import math
import re
from typing import IO

import numpy as np

# As np.save writes it for an array in C order.
_HEADER = re.compile(
    rb"\{'descr': '([<|][iu][1248])', 'fortran_order': False, "
    rb"'shape': \(([0-9]{1,15}),(?: ([0-9]{1,15}))?\), ?\}\s*"
)


def header(file: IO[bytes], num_bytes: int) -> tuple[np.dtype, tuple[int, ...], int]:
    """Data type, shape (of one or two axes) and where the elements begin.

    Args:
      file: at its beginning.
      num_bytes: of the whole file, which must be those of such an array.
    Raises:
      ValueError: it holds something else.
    """
    fixed = file.read(10)  # magic, version 1.0, length of the header
    length = int.from_bytes(fixed[8:], "little")
    found = _HEADER.fullmatch(file.read(length))
    if fixed[:8] != b"\x93NUMPY\x01\x00" or found is None:
        raise ValueError("it is no array of whole numbers")
    dtype = np.dtype(found[1].decode())
    shape = tuple(int(size) for size in found.groups()[1:] if size is not None)
    start = len(fixed) + length
    if num_bytes != start + math.prod(shape) * dtype.itemsize:
        raise ValueError(f"its {num_bytes:,} bytes are not those of {dtype} of shape {shape}")
    return dtype, shape, start
