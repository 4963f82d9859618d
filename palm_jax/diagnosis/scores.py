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


LEAST_RISE = 0.02  # nats; less is not called a spike in any run
SAME_SHARE = 0.5  # of the placebo's median rise, from which on an arm has the spike, too
LARGE_RISE = 1.0  # nats; as much is a spike however high the replayed one was
# Windows of one clean stretch overlap and are few: their 99th percentile is known so well only.
MARGIN = 2.0


class Score(NamedTuple):
    """Of one arm, above the lowest loss on the probe within the last horizon; nats."""

    peak: float  # the largest rise; infinite if a loss was not finite
    area: float  # nats x steps above the lowest before
    recovery: int | None  # steps after the peak until it is below the threshold; None: never
    gap: float  # median of the last losses, above the beginning
    spiked: bool


def rises(begin: float, losses: Sequence[float], horizon: int) -> list[float]:
    """Losses above the lowest of the `horizon` before them; infinite where one is not finite.

    Above the lowest, because in an arm that learns fast a spike may end below where it began;
    within a horizon, because the longer an arm, the further chance takes it from its lowest.
    """
    whole, found = [begin, *losses], []
    for place, loss in enumerate(losses, 1):
        before = [x for x in whole[max(0, place - horizon) : place] if math.isfinite(x)]
        is_known = math.isfinite(loss) and before
        found.append(max(0.0, loss - min(before)) if is_known else math.inf)
    return found


def noise(begin: float, losses: Sequence[float], horizon: int) -> float:
    """The rise beyond which clean windows of the run, as long as an arm, do not go.

    Twice the 99th percentile of all windows in a clean stretch, and at least LEAST_RISE.

    Args:
      begin: the probe's loss before the stretch.
      losses: after each of its steps.
      horizon: steps of an arm. A stretch shorter than two arms is cut into windows half its
        length.
    """
    whole = [begin, *losses]
    length = max(1, min(horizon, len(losses) // 2))
    peaks = [
        max(rises(whole[first], whole[first + 1 : first + 1 + length], length), default=0.0)
        for first in range(max(1, len(losses) - length + 1))
    ]
    return max(LEAST_RISE, MARGIN * quantile(sorted(peaks), CLEAN_SHARE))


def threshold(noise: float, with_spike: Sequence[float]) -> float:
    """The rise of an arm that has the spike, too: beyond noise, and of the spike's size.

    For a placebo noise alone counts: how high a spike goes is partly chance.

    Args:
      with_spike: rises of replays and placebos.
    """
    return max(noise, min(SAME_SHARE * median(with_spike), LARGE_RISE))


def score(begin: float, losses: Sequence[float], threshold: float, horizon: int) -> Score:
    """
    Args:
      begin: the probe's loss before the first step.
      losses: after each step, at least one.
    """
    risen = rises(begin, losses, horizon)
    peak = max(risen)
    at = risen.index(peak)
    below = [step for step, rise in enumerate(risen[at:]) if rise <= threshold]
    return Score(
        peak=peak,
        area=math.fsum(risen),
        recovery=below[0] if below else None,
        gap=median([x - begin if math.isfinite(x) else math.inf for x in losses[-NUM_LAST:]]),
        spiked=peak > threshold,
    )
