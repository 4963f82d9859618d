"""Level and spread of a window of numbers, some of which may be outliers.

The spread is half the distance between the quantiles at 15.87% and 84.13%: the standard
deviation of a normal distribution, and of values that alternate between two; a few outliers do
not move it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

ONE_SIGMA = 0.8413447460685429  # of a normal distribution lies below mean + sigma


class Point(NamedTuple):
    step: int
    value: float  # finite
    batch_size: int = 1  # sequences; means over a batch scatter as its inverse square root


class Level(NamedTuple):
    """Where the next value is expected, and how far from there it may be by chance."""

    level: float
    sigma: float


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two; of at least one."""
    return quantile(sorted(values), 0.5)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the ascending `ordered` lie, interpolated."""
    place = share * (len(ordered) - 1)
    below = int(place)
    low, part = ordered[below], place - below
    # Infinity - infinity is no number.
    if part == 0 or low == ordered[below + 1]:
        return low
    return low + part * (ordered[below + 1] - low)


def level(points: Sequence[Point], batch_size: int | None = None) -> Level:
    """Level and spread at the end of at least 9 `points`, in the order of their steps.

    A falling trend, the usual one, is taken out of the spread, so that the steep beginning of a
    run does not hide its spikes. The level is that of the newest third's middle, not of its end,
    and not below that third's median: a loss falls ever more slowly, and a line drawn on would
    soon lie under it. A rising trend is not taken out; it is what we look for.

    Values of larger batches scatter less, so their deviations are scaled up to `batch_size`, by
    default that of the last.
    """
    third = len(points) // 3
    oldest, newest = points[:third], points[-third:]
    middle = (newest[0].step + newest[-1].step) / 2
    now = median([p.value for p in newest])
    rise = now - median([p.value for p in oldest])
    slope = min(0.0, rise / (middle - (oldest[0].step + oldest[-1].step) / 2))
    values = [p.value - slope * (p.step - middle) for p in points]
    ordered = sorted(values)
    centre = quantile(ordered, 0.5)
    size = points[-1].batch_size if batch_size is None else batch_size
    if any(p.batch_size > size for p in points):
        ordered = sorted(
            (value - centre) * math.sqrt(max(1.0, p.batch_size / size))
            for value, p in zip(values, points, strict=True)
        )
    spread = quantile(ordered, ONE_SIGMA) - quantile(ordered, 1 - ONE_SIGMA)
    return Level(max(centre, now) if slope else centre, spread / 2)


class Usual(NamedTuple):
    """Of values without an order."""

    level: float
    sigma: float


def usual(values: Sequence[float]) -> Usual:
    """Median, and half the distance between the quantiles one sigma away."""
    ordered = sorted(values)
    spread = quantile(ordered, ONE_SIGMA) - quantile(ordered, 1 - ONE_SIGMA)
    return Usual(quantile(ordered, 0.5), spread / 2)


def scatter(values: Sequence[float]) -> float:
    """The sigma of at least 2 values about whatever trend they have, from their differences."""
    steps = sorted(b - a for a, b in itertools.pairwise(values))
    return (quantile(steps, ONE_SIGMA) - quantile(steps, 1 - ONE_SIGMA)) / 2 / math.sqrt(2)


def error_of_median(sigma: float, num_values: int) -> float:
    """Of normally distributed values."""
    return math.sqrt(math.pi / 2) * sigma / math.sqrt(num_values)


def rises(values: Sequence[float], ratio: float) -> bool:
    """Whether the newest third of at least 9 values lies above the oldest.

    By more than `ratio`, and by more than the oldest third scatters.
    """
    third = len(values) // 3
    oldest, newest = sorted(values[:third]), median(values[-third:])
    middle = quantile(oldest, 0.5)
    return newest > ratio * middle and newest > quantile(oldest, ONE_SIGMA)
