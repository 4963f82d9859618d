"""The byte-bigram baseline: how well the previous token alone predicts the next.

A model that has learnt anything beyond pairs of tokens is below it.
"""

# V vocabulary

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

# Counts are a dense V x V table, so larger vocabularies have no baseline.
LARGEST_VOCABULARY = 1024


def count_pairs(tokens: npt.NDArray[np.integer], vocabulary_size: int) -> npt.NDArray[np.int64]:
    """i64[V, V]: how often each token (column) follows each (row) in the stream `tokens`."""
    previous, target = tokens[:-1].astype(np.int64), tokens[1:]
    pairs = np.bincount(previous * vocabulary_size + target, minlength=vocabulary_size**2)
    return pairs.reshape(vocabulary_size, vocabulary_size)


def bits_per_byte(
    train_VV: npt.NDArray[np.int64], held_out_VV: npt.NDArray[np.int64], num_bytes: int
) -> float:
    """Bits for each byte of held-out text, under add-one smoothed counts of the train text.

    The nats of all held-out targets, ends of documents among them, over ln 2 and the number
    of bytes that those targets stand for. A run's bits per byte are defined the same way.
    """
    row_total_V = train_VV.sum(axis=1) + train_VV.shape[1]
    nats = math.fsum(
        int(held_out_VV[p, t]) * (math.log(int(row_total_V[p])) - math.log(int(train_VV[p, t]) + 1))
        for p, t in zip(*np.nonzero(held_out_VV), strict=True)
    )
    # Rounded: the last digits of a logarithm belong to the machine, the manifest does not.
    return round(nats / math.log(2) / num_bytes, 9)
