"""Where a step's sequences lie: (step, ramp, weights, exclusions) -> positions, in closed form.

Three numbers name a sequence. Its *index* counts the sequences that are trained on, so step
and ramp give it. Its *position* counts those of its corpus's unskipped stream, which runs on
through epochs; exclusions are intervals of positions, so that adding one leaves alone all that
lies before it. Its *id* is its place in the corpus: the position within its epoch, permuted
(data.py).

Where there are several corpora, weights give each index to one of them (mixing.py), whatever is
excluded: the m-th draw of a corpus is the m-th position of its own stream that is not excluded.
"""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import functools
import itertools
import operator

from palm_jax import config, mixing
from palm_jax.config import Ramp
from palm_jax.errors import WrongInput

Intervals = collections.abc.Sequence[tuple[int, int]]  # [start, stop) in positions
# Of the only corpus, or of the one that is named.
Exclusion = tuple[int, int] | tuple[int, int, str]
Exclusions = collections.abc.Sequence[Exclusion]
Name = str | None  # of a corpus; None: there is one only
Place = tuple[Name, int]  # a position


def batch_size(ramp: Ramp, step: int) -> int:
    """Sequences in the batch of `step`."""
    step = checked(step)
    return next(
        size
        for start, size in zip(reversed(ramp.starts), reversed(ramp.sizes), strict=True)
        if start <= step
    )


def sequences_before(ramp: Ramp, step: int) -> int:
    """Sequences in all batches before `step`: the index of its first."""
    step = checked(step)
    stops = (*ramp.starts[1:], step)
    return sum(
        size * max(0, min(stop, step) - start)
        for start, stop, size in zip(ramp.starts, stops, ramp.sizes, strict=True)
    )


def normalized(exclusions: Exclusions) -> tuple[Exclusion, ...]:
    """The same excluded positions as disjoint, separated intervals, rising corpus by corpus.

    Raises:
      WrongInput: an interval is empty or begins below 0.
    """
    of_corpora: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for start, stop, *name in exclusions:
        of_corpora.setdefault(tuple(map(str, name)), []).append((start, stop))
    return tuple(
        (start, stop, *name)  # type: ignore[misc]
        for name, intervals in sorted(of_corpora.items())
        for start, stop in _merged(intervals)
    )


def _merged(intervals: Intervals) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((operator.index(a), operator.index(b)) for a, b in intervals):
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


def told(exclusion: Exclusion) -> str:
    """An exclusion in words."""
    start, stop, *name = exclusion
    return f"positions {start}:{stop}" + "".join(f" of {corpus}" for corpus in name)


def absolute_position(index: int, exclusions: Intervals = ()) -> int:
    """The `index`-th position, counted from 0, that is not excluded."""
    position = operator.index(index)
    if position < 0:
        raise ValueError(f"index={position} must not be negative")
    for start, stop in _merged(exclusions):
        if position < start:
            break
        position += stop - start
    return position


def stretch(index: int, size: int, exclusions: Intervals = ()) -> tuple[range, ...]:
    """The `size` positions from the `index`-th on that are not excluded; no range is empty."""
    excluded = _merged(exclusions)
    position = absolute_position(index, excluded)
    ranges = []
    for start, stop in excluded:
        if start < position:
            continue
        if start - position >= size:
            break
        ranges.append(range(position, start))
        size -= start - position
        position = stop
    return (*ranges, range(position, position + size)) if size else tuple(ranges)


@dataclasses.dataclass(frozen=True)
class Stream:
    """What a run is fed, step by step, from one corpus or, by the weights of `mixture`, several.

    Raises:
      WrongInput: an exclusion is of no corpus that there is.
    """

    ramp: Ramp
    mixture: config.Mixture | None = None
    exclusions: Exclusions = ()

    def __post_init__(self) -> None:
        for exclusion in self.exclusions:
            if _corpus_of(exclusion) not in self.names:
                there = ", ".join(map(str, self.names)) if self.mixture else "one, without a name"
                raise WrongInput(
                    f"an exclusion is of {told(exclusion)}, which is of none of the run's corpora; "
                    f"there are: {there}"
                )

    @classmethod
    def of(cls, settings: config.Data, exclusions: Exclusions = ()) -> Stream:
        return cls(settings.ramp, settings.mixture, exclusions)

    @property
    def names(self) -> tuple[Name, ...]:
        return (None,) if self.mixture is None else tuple(self.mixture.corpora)

    def corpora(self, step: int) -> list[Name]:
        """The corpus of each row of the batch of `step`."""
        first, names = sequences_before(self.ramp, step), self.names
        order = self._turns.order(first, first + batch_size(self.ramp, step))
        return [names[corpus] for corpus in order]

    def next_positions(self, step: int) -> dict[Name, int]:
        """In each corpus, the position that is drawn next when `step` begins."""
        return {
            name: absolute_position(drawn, self.excluded[name])
            for name, drawn in self._drawn(step).items()
        }

    def first_position(self, step: int) -> int:
        """Positions that lie behind when `step` begins, drawn or left out, in all corpora.

        In one corpus, that is the position of the batch's first sequence.
        """
        return sum(self.next_positions(step).values())

    def places(self, step: int) -> list[Place]:
        """The place of each row of the batch of `step`."""
        corpora = self.corpora(step)
        drawn = collections.Counter(corpora)
        positions = {
            name: itertools.chain(*stretch(before, drawn[name], self.excluded[name]))
            for name, before in self._drawn(step).items()
        }
        return [(name, next(positions[name])) for name in corpora]

    def intervals(self, start: int, stop: int) -> tuple[Exclusion, ...]:
        """What steps [start, stop) draw, and what is left out between, as exclusions."""
        first, last = self.next_positions(start), self.next_positions(stop)
        return tuple(
            (first[name], last[name]) if name is None else (first[name], last[name], name)
            for name in self.names
            if first[name] < last[name]
        )

    def _drawn(self, step: int) -> dict[Name, int]:
        """How often each corpus is drawn before `step`."""
        counts = self._turns.drawn(sequences_before(self.ramp, step))
        return dict(zip(self.names, counts, strict=True))

    @functools.cached_property
    def _turns(self) -> mixing.Turns:
        if self.mixture is None:
            return mixing.Turns((0,), ((1,),))
        starts = tuple(sequences_before(self.ramp, step) for step in self.mixture.starts)
        return mixing.Turns(starts, self.mixture.shares)

    @functools.cached_property
    def excluded(self) -> dict[Name, list[tuple[int, int]]]:
        """The intervals of each corpus."""
        return {
            name: [(e[0], e[1]) for e in self.exclusions if _corpus_of(e) == name]
            for name in self.names
        }


def _corpus_of(exclusion: Exclusion) -> Name:
    return exclusion[2] if len(exclusion) == 3 else None


def checked(step: int) -> int:
    """`step` as Python's own integer.

    Raises:
      ValueError: it is negative.
    """
    # A NumPy integer would overflow at 2^31 or 2^63; Python's do not.
    step = operator.index(step)
    if step < 0:
        raise ValueError(f"step={step} must not be negative")
    return step
