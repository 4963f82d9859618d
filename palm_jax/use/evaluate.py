"""Loss on a split of the corpora, every sequence once. Reads parameters, changes nothing."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from palm_jax import model
from palm_jax.corpus import joint
from palm_jax.corpus.corpora import Corpora
from palm_jax.corpus.reader import Corpus
from palm_jax.step import Program


@dataclasses.dataclass(frozen=True)
class Evaluation:
    split: str
    loss: float  # cross-entropy in nats per target token, without the z-loss
    perplexity: float
    bits_per_byte: float  # all targets' bits over the bytes they stand for
    sequences: int
    targets: int
    corpora: dict[str, float] | None = None  # of a mixture, bits per byte of each

    def fields(self) -> dict[str, Any]:
        """What is recorded: of one corpus nothing that speaks of several."""
        fields = dataclasses.asdict(self)
        if self.corpora is None:
            del fields["corpora"]
        return fields


def evaluate(
    program: Program, params: model.Params, corpus: Corpus | Corpora, split: str = "held_out"
) -> Evaluation:
    """Evaluate on all of a split; the last, partial batch counts like the others.

    The sum over sequences is exact (math.fsum), so it does not depend on how they are batched.
    """
    numerics = program.settings.numerics
    size = numerics.lanes * numerics.microbatch
    num_sequences = corpus.num_sequences(split)
    nats: list[float] = []
    targets = 0
    rows = program.rows_here(size)
    for first in range(0, num_sequences, size):
        ids = first + rows
        counted = ids < num_sequences
        tokens = np.zeros((len(rows), corpus.sequence_length + 1), np.int32)
        tokens[counted] = corpus.read(split, ids[counted])
        sums = program.losses(params, program.put(tokens), program.put(counted))
        here = np.arange(first, first + size) < num_sequences
        nats += np.asarray(sums.cross_entropy, np.float64).reshape(-1)[here].tolist()
        targets += int(np.sum(sums.targets))
    return of_split(corpus, split, nats, targets)


def of_split(corpus: Corpus | Corpora, split: str, nats: list[float], targets: int) -> Evaluation:
    """The evaluation that the nats of every sequence, in the order of ids, and targets make."""
    return of_sequences(
        nats,
        split=split,
        targets=targets,
        num_bytes=corpus.manifest.splits[split].target_bytes,
        corpora=_bits_per_byte_of_each(corpus, split, nats),
    )


def of_sequences(
    nats: list[float],
    *,
    split: str,
    targets: int,
    num_bytes: int,
    corpora: dict[str, float] | None = None,
) -> Evaluation:
    """
    Args:
      nats: of each sequence.
      num_bytes: that the targets stand for.
    """
    total = math.fsum(nats)
    loss = total / targets
    return Evaluation(
        split=split,
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        bits_per_byte=total / math.log(2) / num_bytes,
        sequences=len(nats),
        targets=targets,
        corpora=corpora,
    )


def _bits_per_byte_of_each(
    corpus: Corpus | Corpora, split: str, nats: list[float]
) -> dict[str, float] | None:
    """By corpus, from the nats of every sequence in the order of ids."""
    if isinstance(corpus, Corpus):
        return None
    contents = corpus.manifest
    return {
        name: math.fsum(nats[own.start : own.stop])
        / math.log(2)
        / contents.corpora[name].splits[split].target_bytes
        for name, own in joint.id_ranges(contents, split).items()
        if name is not None
    }
