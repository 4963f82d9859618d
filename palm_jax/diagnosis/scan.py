"""Unusual text elsewhere: which steps will be fed what looks like the suspects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from palm_jax import config, data
from palm_jax.corpus import joint
from palm_jax.corpus.corpora import Corpora
from palm_jax.corpus.reader import Corpus
from palm_jax.diagnosis.texts import Reference, TextScores
from palm_jax.record.segments import Segment

NUM_REFERENCE = 1024  # sequences, spread over each corpus
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
    corpus: Corpus | Corpora,
    settings: config.Config,
    segment: Segment,
    steps: range,
    kinds: Sequence[str] = TextScores._fields,
    tell: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Scan:
    """Look at every sequence that steps of a segment are fed, beside others of its corpus.

    Args:
      kinds: the scores that count, such as those that stood out in a diagnosis.
    """
    references = [
        (own, _reference(corpus, own, settings.model.vocabulary_size))
        for own in joint.id_ranges(corpus.manifest, "train").values()
    ]
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
            mixture=settings.data.mixture,
        )
        here = []
        for row, tokens in enumerate(batch.tokens):
            sequence = int(batch.sequence_ids[row])
            reference = next(usual for own, usual in references if sequence in own)
            off = reference.unusual(reference.scores(tokens))
            sigmas = {name: value for name, value in off.items() if name in kinds}
            if sigmas:
                (first, *_) = corpus.documents("train", sequence)
                here.append(Unusual(step, row, sequence, sigmas, first.name))
        found += here
        sequences += len(batch.tokens)
        if len(here) >= LARGE_SHARE * len(batch.tokens):
            crowded.append(step)
        tell("scanning steps", done, len(steps))
    return Scan(sequences, tuple(found), tuple(_runs(crowded)))


def _reference(corpus: Corpus | Corpora, own: range, vocabulary_size: int) -> Reference:
    """Of sequences spread over a corpus's own ids."""
    chosen = np.linspace(own.start, own.stop - 1, min(len(own), NUM_REFERENCE)).astype(np.int64)
    return Reference(corpus.read("train", np.unique(chosen)), vocabulary_size)


def _runs(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Rising steps as intervals [first, stop)."""
    found: list[tuple[int, int]] = []
    for step in steps:
        if found and found[-1][1] == step:
            found[-1] = found[-1][0], step + 1
        else:
            found.append((step, step + 1))
    return found
