"""An evaluation taken apart: by document, and by position in the sequence. Letters as in model.py.

A document's targets are its tokens and its end, wherever the cuts between sequences fall; after a
cut its tokens see less of it. Sums are in float64, token by token, so that they do not depend on
how many sequences are scored together.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from palm_jax import model
from palm_jax.corpus.corpora import Corpora
from palm_jax.corpus.reader import Corpus
from palm_jax.use import evaluate
from palm_jax.use.evaluate import Evaluation
from palm_jax.use.material import Material, bytes_of_ids
from palm_jax.use.scoring import Scorer


class Sums:
    """Sums over targets, each in one of a number of bins."""

    def __init__(self, num_bins: int) -> None:
        self.nats = np.zeros(num_bins)
        self.correct = np.zeros(num_bins, np.int64)
        self.targets = np.zeros(num_bins, np.int64)
        self.bytes = np.zeros(num_bins, np.int64)

    def add(self, bins: Any, nats: Any, correct: Any, num_bytes: Any) -> None:
        """One entry of each array for each target."""
        np.add.at(self.nats, bins, nats)
        np.add.at(self.correct, bins, correct)
        np.add.at(self.targets, bins, 1)
        np.add.at(self.bytes, bins, num_bytes)

    def losses(self) -> npt.NDArray[np.float64]:
        """Mean cross-entropy of each bin, in nats per target; NaN where it has none."""
        with np.errstate(invalid="ignore"):
            return self.nats / self.targets

    def accuracies(self) -> npt.NDArray[np.float64]:
        with np.errstate(invalid="ignore"):
            return self.correct / self.targets


@dataclasses.dataclass(frozen=True)
class Document:
    """What was scored of a document."""

    name: str
    loss: float  # nats per target
    bits_per_byte: float | None  # None: its targets stand for no bytes
    accuracy: float
    targets: int  # the last document of a corpus may have more, which fill no sequence
    bytes: int


@dataclasses.dataclass(frozen=True)
class Breakdown:
    evaluation: Evaluation
    accuracy: float  # share of targets that were the most likely token
    bytes: int  # that all targets stand for
    positions: Sums  # [L]
    documents: Sums  # by their place in the material
    material: Material

    def document(self, number: int) -> Document:
        sums = self.documents
        targets, num_bytes = int(sums.targets[number]), int(sums.bytes[number])
        nats = float(sums.nats[number])
        return Document(
            name=self.material.name(number),
            loss=nats / targets,
            bits_per_byte=nats / math.log(2) / num_bytes if num_bytes else None,
            accuracy=int(sums.correct[number]) / targets,
            targets=targets,
            bytes=num_bytes,
        )

    def by_loss(self) -> list[int]:
        """Documents of which something was scored, the highest loss first."""
        (scored,) = np.nonzero(self.documents.targets)
        losses = self.documents.losses()[scored]
        return scored[np.argsort(-losses, kind="stable")].tolist()

    def position_buckets(self) -> list[tuple[range, float, float]]:
        """Positions 0, 1, 2:4, 4:8, ...: each with its mean loss and accuracy."""
        sums, found = self.positions, []
        start, length = 0, self.material.sequence_length
        while start < length:
            own = slice(start, min(max(1, 2 * start), length))
            targets = int(sums.targets[own].sum())
            if targets:
                loss = math.fsum(sums.nats[own]) / targets
                accuracy = int(sums.correct[own].sum()) / targets
                found.append((range(own.start, own.stop), loss, accuracy))
            start = own.stop
        return found


def break_down(
    scorer: Scorer,
    params: model.Params,
    material: Material,
    corpus: Corpus | Corpora | None = None,
) -> Breakdown:
    """Score every sequence once, and add up.

    Args:
      corpus: whose split `material` is. Then the evaluation is what `evaluate` gives, of which
        training records the same bits; None: texts.
    """
    length = material.sequence_length
    bytes_V = bytes_of_ids(material.tokenizer)
    positions, documents = Sums(length), Sums(material.num_documents)
    nats: list[float] = []
    for own, scores in scorer(params, material.num_sequences, material.read):
        first_document = 0
        for stream in material.streams:
            rows = [row for row, sequence in enumerate(own) if sequence in stream.ids]
            if rows:
                first = own[rows[0]] - stream.ids.start
                places_BL = (first + np.arange(len(rows)))[:, None] * length + 1 + np.arange(length)
                counted = places_BL < stream.starts[-1]
                targets = scores.targets_BL[rows][counted]
                token_nats = scores.nats_BL[rows].astype(np.float64)[counted]
                correct = targets == scores.greedy_BL[rows][counted]
                of_each = token_nats, correct, bytes_V[targets]
                positions.add(np.broadcast_to(np.arange(length), counted.shape)[counted], *of_each)
                numbers = np.searchsorted(stream.starts, places_BL[counted], side="right") - 1
                documents.add(first_document + numbers, *of_each)
                nats += _by_sequence(scores.nats_B[rows], scores.nats_BL[rows], counted)
            first_document += stream.num_documents
    targets, num_bytes = int(positions.targets.sum()), int(positions.bytes.sum())
    if corpus is None:
        whole = evaluate.of_sequences(
            nats, split=material.split, targets=targets, num_bytes=num_bytes
        )
    else:
        whole = evaluate.of_split(corpus, material.split, nats, targets)
    return Breakdown(
        evaluation=whole,
        accuracy=int(positions.correct.sum()) / targets,
        bytes=num_bytes,
        positions=positions,
        documents=documents,
        material=material,
    )


def _by_sequence(whole_B: Any, nats_BL: Any, counted_BL: Any) -> list[float]:
    """Each sequence's nats: the device's sum, but for one of which not all targets count."""
    return [
        float(whole) if counted_L.all() else math.fsum(nats_L[counted_L].tolist())
        for whole, nats_L, counted_L in zip(whole_B, nats_BL, counted_BL, strict=True)
    ]
