"""Unusual text elsewhere: which steps will be fed what looks like the suspects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from palm_jax import config, data
from palm_jax.corpus.reader import Corpus
from palm_jax.diagnosis.texts import Reference, TextScores
from palm_jax.record.segments import Segment

NUM_REFERENCE = 1024  # sequences, spread over the corpus
LARGE_SHARE = 0.25  # of a batch; from so many unusual sequences on it is proposed to be left out


@dataclasses.dataclass(frozen=True)
class Unusual:
    step: int
    row: int
    sequence: int
    sigmas: dict[str, float]  # of what stands out
    source: str


@dataclasses.dataclass(frozen=True)
class Scan:
    sequences: int  # that were looked at
    unusual: tuple[Unusual, ...]
    exclude: tuple[tuple[int, int], ...]  # steps [first, stop) that are proposed to be left out


def scan(
    corpus: Corpus,
    settings: config.Config,
    segment: Segment,
    steps: range,
    kinds: Sequence[str] = TextScores._fields,
    tell: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Scan:
    """Look at every sequence that steps of a segment are fed.

    Args:
      kinds: the scores that count, such as those that stood out in a diagnosis.
    """
    num = corpus.num_sequences("train")
    chosen = np.unique(np.linspace(0, num - 1, min(num, NUM_REFERENCE)).astype(np.int64))
    reference = Reference(corpus.read("train", chosen), settings.model.vocabulary_size)
    found: list[Unusual] = []
    crowded: list[int] = []
    sequences = 0
    for done, step in enumerate(steps, 1):
        batch = data.batch(
            corpus,
            settings.seed,
            segment.data_step(step),
            settings.data.ramp,
            segment.exclusions,
        )
        here = []
        for row, tokens in enumerate(batch.tokens):
            off = reference.unusual(reference.scores(tokens))
            sigmas = {name: value for name, value in off.items() if name in kinds}
            if sigmas:
                sequence = int(batch.sequence_ids[row])
                (first, *_) = corpus.documents("train", sequence)
                here.append(Unusual(step, row, sequence, sigmas, first.name))
        found += here
        sequences += len(batch.tokens)
        if len(here) >= LARGE_SHARE * len(batch.tokens):
            crowded.append(step)
        tell("scanning steps", done, len(steps))
    return Scan(sequences, tuple(found), tuple(_runs(crowded)))


def _runs(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Rising steps as intervals [first, stop)."""
    found: list[tuple[int, int]] = []
    for step in steps:
        if found and found[-1][1] == step:
            found[-1] = found[-1][0], step + 1
        else:
            found.append((step, step + 1))
    return found
