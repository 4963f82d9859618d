"""Vitals that go bad before the loss does: where they are healthy, and who says so.

In every log of an unstable run some vital drifts first: norms and loss scale in OPT's, the
attention's logits in small models at a high rate. What counts is a vital that was healthy and
no longer is. At the start of a run log Z of 256,000 words is 12.5 and every gradient is clipped,
so those ranges count only once a vital has been within them for a while.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from palm_jax.spikes.incidents import Alarm
from palm_jax.spikes.robust import rises


@dataclasses.dataclass(frozen=True)
class Range:
    vital: str
    low: float
    high: float
    source: str
    in_a_row: int  # steps outside that make an alarm
    after: int = 0  # steps inside, in a row, before the range counts
    fatal: float = math.inf  # beyond this, so many steps in a row, runs have always failed

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high  # NaN compares as "does not"


RANGES = (
    Range(
        "max_attention_logit",
        -1e3,
        1e3,
        "Wortsman et al. 2023: logits forced to 1e3 hurt, every run beyond 1e4 diverged",
        in_a_row=3,
        fatal=1e4,
    ),
    Range(
        "gradient_norm",
        0.0,
        100.0,
        "a rule of thumb: 0.1 to 10 is healthy, above 100 for long is not",
        in_a_row=20,
    ),
    # The share of the window's steps whose gradient was clipped.
    Range(
        "clip_rate",
        0.0,
        0.01,
        "a rule of thumb: below 1%",
        in_a_row=20,
        after=100,
    ),
    Range(
        "mean_log_z",
        -10.0,
        10.0,
        "z-loss below 0.01 at PaLM's weight of 1e-4",
        in_a_row=20,
        after=100,
    ),
    Range(
        "loss_scale",
        1.0,
        math.inf,
        "OPT-175B restarted from checkpoints with a loss scale of 1 or more",
        in_a_row=3,
    ),
)

# Vitals that must not rise towards a checkpoint for it to count as healthy, by the ratio of the
# window's newest to its oldest third. OPT's rule: the last layer's activations trend down.
NOT_RISING = {"gradient_norm": 1.5, "max_attention_logit": 1.5, "last_residual_rms": 1.1}


class Watched:
    """One vital against its range, step by step."""

    def __init__(self, bounds: Range) -> None:
        self.range = bounds
        self._inside = 0  # steps in a row
        self._outside = 0
        self._beyond = 0  # fatal
        self._counts = bounds.after == 0

    @property
    def is_outside(self) -> bool:
        return self._counts and self._outside > 0

    def add(self, step: int, value: float) -> Alarm | None:
        """Take in a step's value; an alarm when it has been outside for long enough."""
        if self.range.holds(value):
            self._inside, self._outside, self._beyond = self._inside + 1, 0, 0
            self._counts = self._counts or self._inside >= self.range.after
            return None
        self._inside, self._outside = 0, self._outside + 1
        # Written so that NaN counts as beyond.
        self._beyond = 0 if value <= self.range.fatal else self._beyond + 1
        if not self._counts or self._outside != self.range.in_a_row:
            return None
        limit = self.range.high if value > self.range.high else self.range.low
        return Alarm(self.range.vital, step, value, limit, self.range.source)

    @property
    def is_fatal(self) -> bool:
        """At the step that makes it so, not at those after it."""
        return self._beyond == self.range.in_a_row


def complaints(watched: Sequence[Watched], recent: dict[str, Sequence[float]]) -> tuple[str, ...]:
    """What is not healthy now; nothing if all is.

    Args:
      recent: the last values of vitals, oldest first.
    """
    outside = [f"{w.range.vital} is out of its range" for w in watched if w.is_outside]
    rising = [
        f"{vital} is rising"
        for vital, ratio in NOT_RISING.items()
        if len(values := recent.get(vital, ())) >= 9 and rises(values, ratio)
    ]
    return (*outside, *rising)
