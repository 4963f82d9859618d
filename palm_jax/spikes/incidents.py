"""An incident from its onset to its outcome.

It is open while the loss is off its course, and closes as `recovered`, `bad plateau` or
`diverged`. Waiting is a treatment: BLOOM's one spike healed in about 30 steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Literal

from palm_jax.config import Spikes
from palm_jax.spikes.robust import median

Kind = Literal[
    "nonfinite",  # a loss or a gradient that is not finite
    "jump",  # a loss far above the level
    "level",  # a loss further above the level than it scatters
    "drift",  # a slow rise, which no single step shows
    "stall",  # no fall for a long time, as OPT's run 11.10 between steps 4750 and 6700
    "vital",  # a vital beyond where runs have always failed
    "skips",  # update after update was skipped
]
Outcome = Literal["recovered", "bad plateau", "diverged"]


@dataclasses.dataclass(frozen=True)
class Incident:
    """What is known of an incident; `outcome` is None while it is open."""

    kind: Kind
    onset: int  # the first step that is off the course
    detected: int  # the step whose record showed it
    level: float | None  # nats, before; None if there was no history
    limit: float | None  # nats, above which a loss is off the course
    value: float | None  # what showed it: a loss, or the vital that `vital` names
    vital: str = "loss"
    outcome: Outcome | None = None
    closed: int | None = None  # the step whose record decided the outcome
    recovery: int | None = None  # the first step that is on the course again
    peak: float | None = None  # nats: the highest finite loss since the onset
    peak_step: int | None = None
    area: float = 0.0  # nats x steps above the level, where finite
    num_nonfinite: int = 0  # steps
    highest_gradient_norm: float | None = None  # of the finite ones

    @property
    def place(self) -> tuple[str, int, int]:
        """What tells it from every other incident of the same history."""
        return self.kind, self.onset, self.detected


@dataclasses.dataclass(frozen=True)
class Alarm:
    """A vital that left its range, or its level: the loss may follow. Nothing is done."""

    vital: str
    step: int
    value: float
    limit: float
    why: str


class Unfolding:
    """An open incident, step by step."""

    def __init__(self, settings: Spikes, opened: Incident, sigma: float) -> None:
        self.opened, self.settings, self.sigma = opened, settings, sigma
        self._losses: list[float] = []  # since it was detected; infinite where not finite
        self._good_since: int | None = None
        self._nonfinite_in_row = 0
        self._peak: tuple[float, int] | None = None
        self._area = 0.0
        self._num_nonfinite = 0
        self._gradient_norm: float | None = None

    def is_off(self, loss: float) -> bool:
        """Whether a loss, which is not NaN, is off the course."""
        return self.opened.limit is not None and loss > self.opened.limit

    def add(
        self, step: int, loss: float, gradient_norm: float | None, finite: bool
    ) -> Incident | None:
        """Take in a step, the one that showed the incident included; the incident if it closes.

        Args:
          finite: neither loss nor gradient are out of range of the number format.
        """
        if gradient_norm is not None and math.isfinite(gradient_norm):
            self._gradient_norm = max(gradient_norm, self._gradient_norm or 0.0)
        if math.isfinite(loss):
            if self._peak is None or loss > self._peak[0]:
                self._peak = loss, step
            if self.opened.level is not None:
                self._area += max(0.0, loss - self.opened.level)
        self._losses.append(loss if finite else math.inf)
        self._num_nonfinite += not finite
        self._nonfinite_in_row = 0 if finite else self._nonfinite_in_row + 1
        if not finite or self.is_off(loss):
            self._good_since = None
        elif self._good_since is None:
            self._good_since = step
        if self._nonfinite_in_row >= self.settings.nonfinite_steps:
            return self._closed(step, "diverged")
        # A drift is smaller than the scatter of single steps: a few good ones say nothing.
        if self.opened.kind != "drift" and self._good_since is not None:
            good = step - self._good_since + 1
            if good >= self.settings.recover_steps:
                return self._closed(step, "recovered", self._good_since)
        if len(self._losses) >= self.settings.patience_steps:
            return self._judged(step)
        return None

    def _judged(self, step: int) -> Incident:
        """By the medians of the last quarter and of the second."""
        quarter = len(self._losses) // 4
        late = median(self._losses[-quarter:])
        before = median(self._losses[quarter : 2 * quarter])
        if math.isinf(late):
            return self._closed(step, "diverged")
        if not self.is_off(late):
            first = self._good_since if self._good_since is not None else step - quarter + 1
            return self._closed(step, "recovered", first)
        still_rising = late > before + self.sigma
        return self._closed(step, "diverged" if still_rising else "bad plateau")

    def _closed(self, step: int, outcome: Outcome, recovery: int | None = None) -> Incident:
        peak, peak_step = self._peak if self._peak is not None else (None, None)
        return dataclasses.replace(
            self.opened,
            outcome=outcome,
            closed=step,
            recovery=recovery,
            peak=peak,
            peak_step=peak_step,
            area=self._area,
            num_nonfinite=self._num_nonfinite,
            highest_gradient_norm=self._gradient_norm,
        )


NUM_PINNED = 4
# Of so many incidents of a segment the checkpoints are kept.
NEWEST_PINNED = 3


def pinned(onset: int, checkpoint_steps: Iterable[int], settings: Spikes) -> tuple[int, ...]:
    """The checkpoints that the diagnosis of an incident needs, ascending.

    The newest at or before the onset (checkpoint STEP is the state before STEP, so it has not
    seen the onset's batch), and three older ones: the newest at least 1, 2 and 4 times
    `rewind_steps` before it; where two of these are one, the newest of the others. Fewer only
    if there are fewer.
    """
    before = sorted({step for step in checkpoint_steps if step <= onset}, reverse=True)
    chosen: list[int] = []
    for distance in (0, 1, 2, 4):
        there = [s for s in before if s <= onset - distance * settings.rewind_steps]
        if there and there[0] not in chosen:
            chosen.append(there[0])
    chosen += [step for step in before if step not in chosen][: NUM_PINNED - len(chosen)]
    return tuple(sorted(chosen))


def plain(found: Incident | Alarm) -> dict[str, Any]:
    """Its fields, as they stand in a logbook's event."""
    return dataclasses.asdict(found)
