"""Training under failures, played through: an independent check of the formulas, and what they
leave out. Failures come while saving and while recovering as well; a second, durable copy may be
written less often than a first, fast one that some failures take with them.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics

from palm_jax.errors import WrongInput
from palm_jax.plan.reliability import Saving


@dataclasses.dataclass(frozen=True)
class Durable:
    """A second place for checkpoints: slower, and whole whatever fails."""

    interval_hours: float  # of training; a multiple of the first place's
    saving: Saving
    share: float  # of failures that take the first place with them


@dataclasses.dataclass(frozen=True)
class Played:
    goodput: float  # the mean
    low: float  # 5% of the runs had less
    high: float  # 5% had more
    failures: float  # of a run, on average
    runs: int


def play(
    saving: Saving,
    interval_hours: float,
    *,
    hours: float,
    durable: Durable | None = None,
    runs: int = 100,
    seed: int = 0,
) -> Played:
    """Play `runs` runs through, each of `hours` with all that went wrong.

    Raises:
      WrongInput: the interval, the hours or the second place make no sense.
    """
    for option, value in (("--interval-hours", interval_hours), ("--hours", hours)):
        if not (math.isfinite(value) and value > 0):
            raise WrongInput(f"{option} {value:g}: it must be finite and above 0")
    if durable is not None and not 0 <= durable.share <= 1:
        raise WrongInput(f"--lost-share {durable.share:g}: it must be between 0 and 1")
    found = [
        _Run(saving, interval_hours, durable, random.Random(f"{seed}/{number}")).play(hours)
        for number in range(runs)
    ]
    shares = sorted(kept / hours for kept, _ in found)
    return Played(
        goodput=statistics.fmean(shares),
        low=shares[math.floor(0.05 * (runs - 1))],
        high=shares[math.ceil(0.95 * (runs - 1))],
        failures=statistics.fmean(count for _, count in found),
        runs=runs,
    )


class _Run:
    """One run. A save is good once its writing is done; `pending` are those still written."""

    def __init__(
        self, saving: Saving, interval: float, durable: Durable | None, chance: random.Random
    ) -> None:
        self.saving, self.interval, self.durable, self.chance = saving, interval, durable, chance
        self.fast = 0.0  # hours of training that the newest good save of each place holds
        self.safe = 0.0
        self.failures = 0

    def play(self, hours: float) -> tuple[float, int]:
        """Hours of training that are kept when the time is up, and how often it failed."""
        now, recovery = 0.0, 0.0
        while True:
            ends = now + self.chance.expovariate(1 / self.saving.mtbf_hours)
            trained = self._until(now + recovery, min(ends, hours))
            if ends >= hours:
                return trained, self.failures  # nothing failed: what is not saved yet counts too
            now = ends
            recovery = self._fail()

    def _fail(self) -> float:
        """Lose what a failure takes; returns the hours until training goes on."""
        self.failures += 1
        if self.durable is None:
            return self.saving.recovery_hours
        if self.chance.random() < self.durable.share:
            self.fast = self.safe
            return self.durable.saving.recovery_hours
        return self.saving.recovery_hours

    def _until(self, now: float, end: float) -> float:
        """Train from the newest good save until `end`; returns hours of training, kept or not.

        A failure during recovery, before `now`, leaves all as it was.
        """
        trained = max(self.fast, self.safe)
        last_safe = self.safe
        pending: list[tuple[float, str, float]] = []  # good from when on, place, hours
        while now < end:
            trained += min(self.interval, end - now)
            now += self.interval
            if now >= end:
                break
            place, saving = "fast", self.saving
            if self.durable is not None and (
                trained - last_safe >= self.durable.interval_hours - 1e-9 * self.interval
            ):
                place, saving, last_safe = "safe", self.durable.saving, trained
            now += saving.save_hours
            pending.append((now + saving.write_hours, place, trained))
            pending = self._good(pending, min(now, end))
        self._good(pending, end)
        return trained

    def _good(
        self, pending: list[tuple[float, str, float]], now: float
    ) -> list[tuple[float, str, float]]:
        """Take in the saves that are written by now; returns the others."""
        for good, place, trained in pending:
            if good <= now:
                self.fast = trained  # what is safe is at hand as well
                if place == "safe":
                    self.safe = trained
        return [save for save in pending if save[0] > now]
