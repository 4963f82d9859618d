"""The batch is a function: (seed, step, ramp, exclusions) -> sequences, on any machine.

Nothing here has a state to save. A step's place in the data is worked out in closed form, in
Python integers, and grain then only reads ahead.

Three numbers name a sequence. Its *index* counts the sequences that are trained on, so step
and ramp give it. Its *position* counts those of the unskipped stream, which runs on through
epochs; exclusions are intervals of positions, so that adding one leaves alone all that lies
before it. Its *id* is its place in the corpus: the position within its epoch, permuted.
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

from palm_jax.config import Ramp
from palm_jax.corpus.manifest import Manifest
from palm_jax.errors import WrongInput

Exclusions = collections.abc.Sequence[tuple[int, int]]  # [start, stop) in positions

# Our choice; 4 is the fewest that grain allows.
_SHUFFLE_ROUNDS = 4
# Far above any corpus, and where grain's floating-point block size is still exact.
_MOST_SEQUENCES = 2**44


def batch_size(ramp: Ramp, step: int) -> int:
    """Sequences in the batch of `step`."""
    step = _step(step)
    return next(
        size
        for start, size in zip(reversed(ramp.starts), reversed(ramp.sizes), strict=True)
        if start <= step
    )


def sequences_before(ramp: Ramp, step: int) -> int:
    """Sequences in all batches before `step`: the index of its first."""
    step = _step(step)
    stops = (*ramp.starts[1:], step)
    return sum(
        size * max(0, min(stop, step) - start)
        for start, stop, size in zip(ramp.starts, stops, ramp.sizes, strict=True)
    )


def normalized(exclusions: Exclusions) -> tuple[tuple[int, int], ...]:
    """The same excluded positions as disjoint, separated, rising intervals.

    Raises:
      WrongInput: an interval is empty or begins below 0.
    """
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((operator.index(a), operator.index(b)) for a, b in exclusions):
        if not 0 <= start < stop:
            raise WrongInput(
                f"exclusion {start}:{stop} is empty or negative; "
                "give START:STOP with 0 <= START < STOP"
            )
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def absolute_position(index: int, exclusions: Exclusions = ()) -> int:
    """The `index`-th position, counted from 0, that is not excluded."""
    position = operator.index(index)
    if position < 0:
        raise ValueError(f"index={position} must not be negative")
    for start, stop in normalized(exclusions):
        if position < start:
            break
        position += stop - start
    return position


@dataclasses.dataclass(frozen=True)
class Window:
    """The positions that make up a step's batch, in order."""

    step: int
    first_position: int
    size: int  # sequences
    ranges: tuple[range, ...]

    def positions(self) -> list[int]:
        return [position for part in self.ranges for position in part]


def window(step: int, ramp: Ramp, exclusions: Exclusions = ()) -> Window:
    """Where the batch of `step` lies in the unskipped stream."""
    step = _step(step)
    size = missing = batch_size(ramp, step)
    excluded = normalized(exclusions)
    first = position = absolute_position(sequences_before(ramp, step), excluded)
    ranges = []
    for start, stop in excluded:
        if start < position:
            continue
        if start - position >= missing:
            break
        ranges.append(range(position, start))
        missing -= start - position
        position = stop
    ranges.append(range(position, position + missing))
    return Window(step, first, size, tuple(ranges))


def sequence_ids(
    seed: int, positions: collections.abc.Iterable[int], num_sequences: int
) -> npt.NDArray[np.int64]:
    """The ids at `positions`: i64[len(positions)], each below `num_sequences`.

    Every epoch holds each id once, in an order of its own.
    """
    num_sequences = operator.index(num_sequences)
    if not 0 < num_sequences <= _MOST_SEQUENCES:
        raise ValueError(f"num_sequences={num_sequences} must be 1 to {_MOST_SEQUENCES}")
    ids = []
    for position in positions:
        epoch, index = divmod(operator.index(position), num_sequences)
        ids.append(_permuted(index, num_sequences, _epoch_seed(seed, epoch)))
    return np.array(ids, np.int64)


@functools.lru_cache(maxsize=64)
def _epoch_seed(seed: int, epoch: int) -> int:
    # A hash, because seed + epoch would make seed 1 repeat the second epoch of seed 0.
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=4, person=b"epoch seed")
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
    first_position: int  # of the whole batch
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
    """Where sequences are read from: a corpus, or what a bundle carries of one."""

    folder: pathlib.Path
    manifest: Manifest

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
    exclusions: Exclusions = ()
    split: str = "train"
    rows: collections.abc.Callable[[int], npt.NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, step: int) -> StepBatch:
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} is not one of {self.num_steps}")
        where = window(step, self.ramp, self.exclusions)
        rows = np.arange(where.size) if self.rows is None else self.rows(where.size)
        positions = where.positions()
        ids = sequence_ids(
            self.seed,
            [positions[row] for row in rows.tolist()],
            self.corpus.num_sequences(self.split),
        )
        tokens = self.corpus.read(self.split, ids)
        return StepBatch(
            where.step, where.first_position, rows, ids, tokens, batch_digest(rows, ids, tokens)
        )


def batch(
    corpus: Rows,
    seed: int,
    step: int,
    ramp: Ramp,
    exclusions: Exclusions = (),
    split: str = "train",
) -> StepBatch:
    """The whole batch of `step`, read here and now."""
    return BatchSource(corpus, seed, ramp, _step(step) + 1, exclusions, split)[step]


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


def _step(step: int) -> int:
    # A NumPy integer would overflow at 2^31 or 2^63; Python's do not.
    step = operator.index(step)
    if step < 0:
        raise ValueError(f"step={step} must not be negative")
    return step
