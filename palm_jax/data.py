"""The batch is a function: (seed, step, ramp, exclusions) -> sequences, on any machine.

Nothing here has a state to save. A step's place in the data is worked out in closed form, in
Python integers (stream.py): index, corpus, position. Here positions become ids, each epoch of
each corpus in an order of its own, and ids are read; grain then only reads ahead.
"""

# L sequence length

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import hashlib
import operator
import pathlib
import struct
from typing import Protocol

import grain  # imports JAX, as grain always does, but touches no device
import numpy as np
import numpy.typing as npt
from grain.experimental import index_shuffle

from palm_jax import config, stream
from palm_jax.config import Ramp
from palm_jax.corpus import joint
from palm_jax.corpus.joint import Contents

# Our choice; 4 is the fewest that grain allows.
_SHUFFLE_ROUNDS = 4
# Far above any corpus, and where grain's floating-point block size is still exact.
_MOST_SEQUENCES = 2**44


def sequence_ids(
    seed: int,
    positions: collections.abc.Iterable[int],
    num_sequences: int,
    corpus: stream.Name = None,
) -> npt.NDArray[np.int64]:
    """The ids at `positions` of a corpus: i64[len(positions)], each below `num_sequences`.

    Every epoch holds each id once, in an order of its own; so has every corpus of a mixture.
    """
    num_sequences = operator.index(num_sequences)
    if not 0 < num_sequences <= _MOST_SEQUENCES:
        raise ValueError(f"num_sequences={num_sequences} must be 1 to {_MOST_SEQUENCES}")
    ids = []
    for position in positions:
        epoch, index = divmod(operator.index(position), num_sequences)
        ids.append(_permuted(index, num_sequences, _epoch_seed(seed, epoch, corpus)))
    return np.array(ids, np.int64)


def ids_at(
    seed: int,
    places: collections.abc.Sequence[stream.Place],
    id_ranges: collections.abc.Mapping[stream.Name, range],
) -> npt.NDArray[np.int64]:
    """The ids at places in corpora that have these ids: i64[len(places)]."""
    ids = np.empty(len(places), np.int64)
    for name, own in id_ranges.items():
        rows = [row for row, (corpus, _) in enumerate(places) if corpus == name]
        positions = [places[row][1] for row in rows]
        ids[rows] = own.start + sequence_ids(seed, positions, len(own), name)
    return ids


@functools.lru_cache(maxsize=64)
def _epoch_seed(seed: int, epoch: int, corpus: stream.Name) -> int:
    # A hash, because seed + epoch would make seed 1 repeat the second epoch of seed 0.
    text = f"{seed}/{epoch}" if corpus is None else f"{seed}/{epoch}/{corpus}"
    digest = hashlib.blake2b(text.encode(), digest_size=4, person=b"epoch seed")
    return int.from_bytes(digest.digest(), "little")


def _permuted(index: int, num_sequences: int, seed: int) -> int:
    largest = num_sequences - 1
    # grain 0.2.18 sizes its cipher by ceil(log2(largest)), a bit too few where `largest` is a
    # power of two: from 2^16 on, ids then repeat and others are lost. There we permute one
    # more and walk on while we are on it, which leaves a permutation of the rest.
    spare = 1 if largest & (largest - 1) == 0 and largest > 1 else 0
    index = index_shuffle(index, largest + spare, seed, _SHUFFLE_ROUNDS)
    while index > largest:
        index = index_shuffle(index, largest + spare, seed, _SHUFFLE_ROUNDS)
    return index


def rows_of(
    batch_size: int, microbatch: int, width: int, devices: collections.abc.Sequence[int]
) -> npt.NDArray[np.int64]:
    """The rows of a batch that belong to some of `width` data-parallel device slots.

    A row belongs to microbatch row // microbatch, and microbatch j to slot j % width.

    Returns:
      Row indices pass by pass and, within a pass, in the order of `devices`.
    Raises:
      ValueError: the batch is not whole passes, or `devices` are not distinct slots.
    """
    if batch_size % (microbatch * width):
        raise ValueError(
            f"batch size {batch_size} is not a multiple of microbatch x width = "
            f"{microbatch} x {width}"
        )
    if len(set(devices)) != len(devices) or not all(0 <= slot < width for slot in devices):
        raise ValueError(f"devices={list(devices)} must be distinct slots of 0 to {width - 1}")
    rows = np.arange(batch_size, dtype=np.int64).reshape(-1, width, microbatch)
    return rows[:, list(devices)].reshape(-1)


@dataclasses.dataclass(frozen=True, eq=False)
class StepBatch:
    """A step's sequences, or those of them that this process reads."""

    step: int
    first_position: int  # of the whole batch, see `Stream.first_position`
    rows: npt.NDArray[np.int64]  # which rows of the whole batch these are
    sequence_ids: npt.NDArray[np.int64]  # one a row
    tokens: npt.NDArray[np.int32]  # [rows, L+1]
    digest: str  # see `batch_digest`


def batch_digest(
    rows: npt.NDArray[np.int64],
    sequence_ids: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int32],
) -> str:
    """16 hex digits for (row, sequence id, tokens) of every row.

    A sum modulo 2^64 of one hash a row: the digests of a batch's parts, in whatever way
    processes share it, add up to the digest of the whole (`add_digests`).
    """
    total = 0
    for row, sequence_id, sequence in zip(
        rows.tolist(), sequence_ids.tolist(), tokens.astype("<i4", copy=False), strict=True
    ):
        content = hashlib.blake2b(struct.pack("<qq", row, sequence_id), digest_size=8)
        content.update(np.ascontiguousarray(sequence).data)
        total += int.from_bytes(content.digest(), "little")
    return f"{total % 2**64:016x}"


def add_digests(digests: collections.abc.Iterable[str]) -> str:
    """The digest of a batch from those of its disjoint parts."""
    return f"{sum(int(digest, 16) for digest in digests) % 2**64:016x}"


class Rows(Protocol):
    """Where sequences are read from: a corpus, several, or what a bundle carries of them."""

    folder: pathlib.Path

    @property
    def manifest(self) -> Contents: ...

    def num_sequences(self, split: str) -> int: ...

    def read(
        self, split: str, ids: collections.abc.Sequence[int] | npt.NDArray[np.integer]
    ) -> npt.NDArray[np.int32]: ...


@dataclasses.dataclass(frozen=True, eq=False)
class BatchSource:
    """Random access to the batches of a run: `source[step]`, for 0 <= step < num_steps.

    `rows` chooses, from the size of a batch, which of its rows this process reads; the
    default is all of them.
    """

    corpus: Rows
    seed: int
    ramp: Ramp
    num_steps: int
    exclusions: stream.Exclusions = ()
    split: str = "train"
    rows: collections.abc.Callable[[int], npt.NDArray[np.int64]] | None = None
    mixture: config.Mixture | None = None  # of the corpora that `corpus` holds

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, step: int) -> StepBatch:
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} is not one of {self.num_steps}")
        step = stream.checked(step)
        places = self._stream.places(step)
        rows = np.arange(len(places)) if self.rows is None else self.rows(len(places))
        ids = ids_at(self.seed, [places[row] for row in rows.tolist()], self._id_ranges)
        tokens = self.corpus.read(self.split, ids)
        first = self._stream.first_position(step)
        return StepBatch(step, first, rows, ids, tokens, batch_digest(rows, ids, tokens))

    @functools.cached_property
    def _stream(self) -> stream.Stream:
        return stream.Stream(self.ramp, self.mixture, self.exclusions)

    @functools.cached_property
    def _id_ranges(self) -> dict[stream.Name, range]:
        return id_ranges(self.corpus, self.split, self.mixture)


def id_ranges(
    corpus: Rows, split: str = "train", mixture: config.Mixture | None = None
) -> dict[stream.Name, range]:
    """The ids of each corpus of a mixture, or of the only one."""
    if mixture is None:
        return {None: range(corpus.num_sequences(split))}
    return joint.id_ranges(corpus.manifest, split)


def batch(
    corpus: Rows,
    seed: int,
    step: int,
    ramp: Ramp,
    exclusions: stream.Exclusions = (),
    split: str = "train",
    mixture: config.Mixture | None = None,
) -> StepBatch:
    """The whole batch of `step`, read here and now."""
    num_steps = stream.checked(step) + 1
    return BatchSource(corpus, seed, ramp, num_steps, exclusions, split, mixture=mixture)[step]


class Source(Protocol):
    """Random access to batches, as grain takes it."""

    def __len__(self) -> int: ...

    def __getitem__(self, step: int) -> StepBatch: ...


def batches(
    source: Source, start: int, stop: int, *, threads: int, prefetch: int
) -> collections.abc.Generator[StepBatch, None, None]:
    """The batches of steps [start, stop) in order, read ahead by grain's threads.

    Neither number changes what comes out. Close the generator (`contextlib.closing`) when
    leaving it early: that ends the threads.

    Args:
      threads: that read; 0 reads when asked.
      prefetch: steps to be ahead by, at most.
    Raises:
      ValueError: the steps are not within the source.
    """
    if not 0 <= start <= stop <= len(source):
        raise ValueError(f"steps {start}:{stop} are not within 0:{len(source)}")
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)
    return _read_ahead(grain.MapDataset.source(source)[start:stop], options)


def _read_ahead(
    dataset: grain.MapDataset[StepBatch], options: grain.ReadOptions
) -> collections.abc.Generator[StepBatch, None, None]:
    # A generator, so that an error ends it: grain's iterator would go on after an element it
    # failed to read as if there had been none.
    iterator = iter(dataset.to_iter_dataset(options))
    try:
        yield from iterator
    finally:
        iterator.close()
