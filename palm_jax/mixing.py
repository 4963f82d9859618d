"""Whose turn it is: weights become an order in which several corpora are drawn from.

With shares p of whole numbers that add up to q, the order repeats after q turns. Within a period
it is a chairman assignment (Tijdeman 1980): after n turns, corpus c was drawn n p_c / q times but
for at most 1 - 1 / (2k - 2) of a draw, among k corpora; that is half a draw for two, and never a
whole one. So the j-th draw of a corpus must fall between two turns, and as this can be done,
drawing what must be drawn soonest does it.

Weights may change at some turns, where the order begins anew. All is closed form, in Python
integers: the turn at index n takes a few divisions, however far n is.
"""

from __future__ import annotations

import bisect
import collections.abc
import dataclasses
import fractions
import functools
import heapq
import itertools
import math


def shares(weights: collections.abc.Sequence[int | float]) -> tuple[int, ...]:
    """The smallest whole numbers in the proportion of `weights`, of which one is not 0.

    A weight is the decimal number that it is written as, so that 0.7, 0.2, 0.1 are 7, 2, 1.
    """
    exact = [fractions.Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    return tuple(weight // divisor for weight in whole)


@dataclasses.dataclass(frozen=True)
class Period:
    """One period of turns, drawn from corpora that are numbered."""

    order: tuple[int, ...]  # the corpus drawn at each turn
    turns: tuple[tuple[int, ...], ...]  # of each corpus, those that are its own, rising


@functools.lru_cache(maxsize=64)
def period(shares: tuple[int, ...]) -> Period:
    """The period of corpora with these shares; of draws due together, the first named is first."""
    length = sum(shares)
    spread = max(1, 2 * sum(share > 0 for share in shares) - 2)
    # (first turn, last turn, corpus) of each draw: the counts before and after it, which lie at
    # most 1 - 1 / spread from their due, say between which turns.
    draws = sorted(
        (
            -(-(spread * j + 1) * length // (spread * share)) - 1,
            (spread * (j + 1) - 1) * length // (spread * share),
            corpus,
        )
        for corpus, share in enumerate(shares)
        for j in range(share)
    )
    ready: list[tuple[int, int]] = []  # (last turn, corpus), the soonest first
    order: list[int] = []
    turns: list[list[int]] = [[] for _ in shares]
    added = 0
    for turn in range(length):
        while added < length and draws[added][0] <= turn:
            heapq.heappush(ready, draws[added][1:])
            added += 1
        last, corpus = heapq.heappop(ready)
        assert last >= turn  # Tijdeman's theorem
        order.append(corpus)
        turns[corpus].append(turn)
    return Period(tuple(order), tuple(map(tuple, turns)))


@dataclasses.dataclass(frozen=True)
class Turns:
    """The order of draws from numbered corpora, whose shares change at some indices.

    Args:
      starts: the index at which each stage begins, not falling, from 0.
      shares: of each stage, those of all corpora.
    """

    starts: tuple[int, ...]
    shares: tuple[tuple[int, ...], ...]

    def drawn(self, index: int) -> tuple[int, ...]:
        """How often each corpus was drawn before `index`."""
        counts = [0] * len(self.shares[0])
        stops = (*self.starts[1:], index)
        for start, stop, shares in zip(self.starts, stops, self.shares, strict=True):
            if start >= index:
                break
            rounds, rest = divmod(min(stop, index) - start, sum(shares))
            of_corpora = zip(shares, period(shares).turns, strict=True)
            for corpus, (share, turns) in enumerate(of_corpora):
                counts[corpus] += rounds * share + bisect.bisect_left(turns, rest)
        return tuple(counts)

    def order(self, start: int, stop: int) -> list[int]:
        """The corpora drawn at indices [start, stop)."""
        found: list[int] = []
        edges = itertools.pairwise((*self.starts, max(stop, self.starts[-1])))
        for (begin, end), shares in zip(edges, self.shares, strict=True):
            order = period(shares).order
            here = range(max(start, begin) - begin, min(stop, end) - begin)
            found += [order[turn % len(order)] for turn in here]
        return found
