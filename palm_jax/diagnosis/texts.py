"""What is unusual about a sequence, seen from its tokens alone."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from palm_jax.spikes import robust

Tokens = npt.NDArray[np.integer]
PERIODS = range(1, 14)
REPEATS = 32  # of a period, in a row; fewer are ordinary text
RARE = 1e-4  # share of tokens; one that makes up less of the reference is rare
FAR = 8.0  # sigmas from the median of the reference, from which on a score is unusual
# An ordinary score scatters by at least so much; all alike would make any other unusual.
LEAST_SIGMA = 0.01


class TextScores(NamedTuple):
    """Of one sequence; all between 0 and some 1, and about the same for ordinary text."""

    repetition: float  # share of its tokens that belong to REPEATS of a period up to 13
    compression: float  # bytes after zlib over bytes before
    rare_share: float  # share of tokens that are rare in the reference


class Reference:
    """Ordinary sequences of the same corpus, which others are compared with."""

    def __init__(self, rows: npt.NDArray[np.integer], vocabulary_size: int) -> None:
        """
        Args:
          rows: [sequences, tokens], at least two.
        """
        counts = np.bincount(rows.reshape(-1), minlength=vocabulary_size)
        self._is_rare = counts < RARE * counts.sum()
        scored = [self.scores(row) for row in rows]
        columns = zip(*scored, strict=True)
        self._usual = [robust.usual([float(x) for x in column]) for column in columns]

    def scores(self, tokens: Tokens) -> TextScores:
        text = tokens.astype("<i4", copy=False).tobytes()
        return TextScores(
            repetition=repetition(tokens),
            compression=len(zlib.compress(text, 6)) / len(text),
            rare_share=float(self._is_rare[tokens].mean()),
        )

    def unusual(self, scores: TextScores) -> dict[str, float]:
        """{score: sigmas from the usual} of the scores that are FAR off."""
        off = {
            name: (value - level) / max(sigma, LEAST_SIGMA)
            for name, value, (level, sigma) in zip(scores._fields, scores, self._usual, strict=True)
        }
        return {name: sigmas for name, sigmas in off.items() if abs(sigmas) > FAR}


def repetition(tokens: Tokens) -> float:
    """The share of tokens in stretches that repeat with a period of PERIODS, REPEATS times."""
    inside = np.zeros(len(tokens), bool)
    for period in PERIODS:
        same = tokens[period:] == tokens[:-period]
        for first, last in _stretches(same):
            # `last - first` matches in a row after the first period.
            if last - first >= period * (REPEATS - 1):
                inside[first : last + period] = True
    return float(inside.mean())


def _stretches(flags: npt.NDArray[np.bool_]) -> Iterable[tuple[int, int]]:
    """[first, last) of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
