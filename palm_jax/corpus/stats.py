"""What is in a corpus: lengths of documents, use of the vocabulary, and what stands out."""

from __future__ import annotations

import collections.abc
import dataclasses
import math

import numpy as np
import numpy.typing as npt

from palm_jax.corpus.reader import Corpus
from palm_jax.diagnosis.texts import Reference

MOST_SEQUENCES = 16_384  # looked at, spread evenly over the split
NUM_REFERENCE = 1024  # of them that say what is usual
_CHUNK = 1024  # sequences, or thousands of documents, at a time


@dataclasses.dataclass(frozen=True)
class Bin:
    """Documents of `low` to `high` tokens, both included."""

    low: int
    high: int
    documents: int


@dataclasses.dataclass(frozen=True)
class SplitStats:
    documents: int
    copies: int  # documents whose content is there already
    bytes: int
    tokens: int  # the documents' own
    sequences: int
    lengths: tuple[Bin, ...]


@dataclasses.dataclass(frozen=True)
class Frequent:
    token: int
    text: str
    share: float  # of the tokens looked at


@dataclasses.dataclass(frozen=True)
class Outlier:
    """A sequence that differs from the usual: in repetition, compression or rare tokens."""

    sequence: int
    source: str
    sigmas: dict[str, float]
    text: str


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Documents held out in one corpus that another is trained on."""

    held_out: str
    train: str
    documents: int


@dataclasses.dataclass(frozen=True)
class Stats:
    splits: dict[str, SplitStats]
    looked_at: int  # sequences of train that what follows is about
    entropy: float  # bits a token, if tokens were independent
    unused_ids: int
    frequent: tuple[Frequent, ...]
    ranked: tuple[float, ...]  # shares of the tokens of rank 1, 2, 4, 8 ...
    outliers: tuple[Outlier, ...]  # the furthest off first


Progress = collections.abc.Callable[[str, int, int], None]


def stats(corpus: Corpus, tell: Progress = lambda stage, done, total: None) -> Stats:
    """Count what the corpus holds; of sequences, at most MOST_SEQUENCES are looked at."""
    num = corpus.num_sequences("train")
    chosen = np.unique(np.linspace(0, num - 1, min(num, MOST_SEQUENCES)).astype(np.int64))
    vocabulary_size = corpus.manifest.vocabulary_size
    usual = corpus.read("train", chosen[:: -(-len(chosen) // NUM_REFERENCE)])
    reference = Reference(usual, vocabulary_size) if len(usual) > 1 else None
    counts = np.zeros(vocabulary_size, np.int64)
    outliers = []
    for first in range(0, len(chosen), _CHUNK):
        ids = chosen[first : first + _CHUNK]
        rows = corpus.read("train", ids)
        counts += np.bincount(rows[:, 1:].reshape(-1), minlength=vocabulary_size)
        for sequence, tokens in zip(ids.tolist(), rows, strict=True):
            sigmas = reference.unusual(reference.scores(tokens)) if reference else {}
            if sigmas:
                (source, *_) = corpus.documents("train", sequence)
                outliers.append(Outlier(sequence, source.name, sigmas, corpus.decode(tokens)))
        tell("looking at sequences", first + len(ids), len(chosen))
    outliers.sort(key=lambda o: (-max(map(abs, o.sigmas.values())), o.sequence))
    order = np.argsort(-counts, kind="stable")
    shares = counts[order] / counts.sum()
    return Stats(
        splits={name: _split_stats(corpus, name) for name in corpus.manifest.splits},
        looked_at=len(chosen),
        entropy=float(-sum(p * math.log2(p) for p in shares.tolist() if p > 0)),
        unused_ids=int(np.count_nonzero(counts == 0)),
        frequent=tuple(
            Frequent(token, corpus.decode(np.array([token])), share)
            for token, share in zip(order[:20].tolist(), shares[:20].tolist(), strict=True)
            if share > 0
        ),
        ranked=tuple(shares[2**power - 1] for power in range(len(shares).bit_length())),
        outliers=tuple(outliers),
    )


def _split_stats(corpus: Corpus, name: str) -> SplitStats:
    split, index = corpus.manifest.splits[name], corpus.index(name)
    counts = np.zeros(64, np.int64)
    for first in range(0, split.documents, _CHUNK * 1000):
        lengths = np.diff(index.starts[first : first + _CHUNK * 1000 + 1]) - 1
        # frexp, because log2 of a number below a power of two may round up to it.
        counts += np.bincount(np.frexp(lengths.astype(np.float64))[1] - 1, minlength=64)
    present = np.flatnonzero(counts)
    return SplitStats(
        documents=split.documents,
        copies=split.documents - split.distinct_documents,
        bytes=split.bytes,
        tokens=split.tokens - split.documents,
        sequences=split.sequences,
        lengths=tuple(
            Bin(2**power, 2 ** (power + 1) - 1, int(counts[power]))
            for power in range(int(present[0]), int(present[-1]) + 1)
        ),
    )


def overlap(held_out: Corpus, train: Corpus) -> Overlap:
    """How many documents that one corpus holds out are in the split train of the other."""
    kept = {bytes(row) for row in _rows(held_out.index("held_out").digests)}
    found = {
        digest for row in _rows(train.index("train").digests) if (digest := bytes(row)) in kept
    }
    return Overlap(held_out.folder.name, train.folder.name, len(found))


def _rows(digests: npt.NDArray[np.uint8]) -> collections.abc.Iterator[npt.NDArray[np.uint8]]:
    for first in range(0, len(digests), _CHUNK * 10):
        yield from np.asarray(digests[first : first + _CHUNK * 10])
