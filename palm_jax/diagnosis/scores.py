"""Did an arm spike? By its loss on fixed held-out sequences, the probe, after every step.

Losses on other data are not comparable, and a batch of garbage has a high loss of its own without
hurting the model: the training loss decides nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from palm_jax.spikes.robust import median, quantile

NUM_LAST = 10  # steps at the end, of which the gap is taken
CLEAN_SHARE = 0.99  # of clean windows that rise no further than the threshold


class Score(NamedTuple):
    """Of one arm, above the probe's loss where all arms begin; nats."""

    peak: float  # the largest rise; infinite if a loss was not finite
    area: float  # nats x steps above the beginning
    recovery: int | None  # steps after the peak until it is below the threshold; None: never
    gap: float  # median of the last steps
    spiked: bool


def rises(begin: float, losses: Sequence[float]) -> list[float]:
    """Losses above the beginning; infinite where one is not finite."""
    return [loss - begin if math.isfinite(loss) else math.inf for loss in losses]


def threshold(begins: Sequence[float], windows: Sequence[Sequence[float]]) -> float:
    """The rise that 99% of clean windows of the run, as long as an arm, do not reach.

    Args:
      begins: the probe's loss before each window.
    """
    peaks = [max(rises(b, losses)) for b, losses in zip(begins, windows, strict=True)]
    return max(0.0, quantile(sorted(peaks), CLEAN_SHARE))


def score(begin: float, losses: Sequence[float], threshold: float) -> Score:
    """
    Args:
      begin: the probe's loss before the first step.
      losses: after each step, at least one.
    """
    risen = rises(begin, losses)
    peak = max(risen)
    at = risen.index(peak)
    below = [step for step, rise in enumerate(risen[at:]) if rise <= threshold]
    return Score(
        peak=peak,
        area=math.fsum(max(0.0, rise) for rise in risen),
        recovery=below[0] if below else None,
        gap=median(risen[-NUM_LAST:]),
        spiked=peak > threshold,
    )
