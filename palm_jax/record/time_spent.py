"""Where a run's time went, by its logbook: training that was kept, and all else."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
from typing import Any

from palm_jax.record import chronicle, logbook
from palm_jax.record.chronicle import values

ASSUMED = (
    "from the first start to the last event in the logbook, whose events are known to the second",
    "computed again, or left behind: steps before a crash or a rollback that the history no longer "
    "holds",
    "waiting for data: of the steps that were kept, where the slowest process reads; devices may "
    "have had work meanwhile",
    "standing still: between the last sign of one process and the start of the next. Starting: "
    "what remains, importing, restoring and checking",
)
_KINDS = ("evaluation", "checkpoint", "verification")
_SECONDS = {"evaluation": "seconds", "checkpoint": "blocked_seconds", "verification": "seconds"}


@dataclasses.dataclass(frozen=True)
class TimeSpent:
    """Seconds; they add up to `all_seconds`, but for what the clock's resolution leaves."""

    all_seconds: float
    useful_seconds: float
    redone_seconds: float
    waiting_for_data_seconds: float
    compiling_seconds: float
    saving_seconds: float
    evaluating_seconds: float
    verifying_seconds: float
    standing_still_seconds: float
    starting_seconds: float

    @property
    def goodput(self) -> float | None:
        """The share that was training and was kept; None of a run without any time."""
        return self.useful_seconds / self.all_seconds if self.all_seconds else None

    def figures(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "goodput": self.goodput}

    def rows(self) -> list[tuple[str, float, float | None]]:
        """Name, seconds and share of all."""
        return [
            (name, value, value / self.all_seconds if self.all_seconds else None)
            for name, value in dataclasses.asdict(self).items()
        ]


def of(run_dir: str | os.PathLike[str]) -> TimeSpent:
    """Of a run's own logbook; branches have theirs.

    Raises:
      CannotDo: the logbook is damaged.
    """
    told = chronicle.summary(run_dir)
    seen = _Seen()
    for record in logbook.scan(run_dir):
        if isinstance(record, dict):
            seen.add(record)
    total = 0.0
    if seen.first is not None and seen.last is not None:
        total = max(0.0, (seen.last - seen.first).total_seconds() + seen.since_last)
    # A logbook may hold numbers as large as floats go; their sums are then the text "inf".
    redone = float(told["redone_seconds"]) + float(told["left_behind_seconds"])
    training = float(told["training_seconds"])
    kept = max(0.0, training - redone)
    # Steps that were not kept waited as long as the others did.
    waited = min(kept, seen.waited * kept / training) if 0 < training < math.inf else 0.0
    others = {
        "redone_seconds": redone,
        "waiting_for_data_seconds": waited,
        "compiling_seconds": float(told["compile_seconds"]),
        "saving_seconds": seen.seconds["checkpoint"],
        "evaluating_seconds": seen.seconds["evaluation"],
        "verifying_seconds": seen.seconds["verification"],
        "standing_still_seconds": seen.still,
    }
    useful = kept - waited
    rest = max(0.0, total - useful - sum(others.values()))
    return TimeSpent(all_seconds=total, useful_seconds=useful, **others, starting_seconds=rest)


class _Seen:
    """Takes in a logbook, record by record."""

    def __init__(self) -> None:
        self.first: datetime.datetime | None = None
        self.last: datetime.datetime | None = None
        self.since_last = 0.0  # seconds of steps recorded after the last event with a time
        self.still = 0.0
        self.waited = 0.0
        self.seconds = dict.fromkeys(_KINDS, 0.0)

    def add(self, record: dict[str, Any]) -> None:
        name = record["event"]
        if name == "step":
            self._step(record)
            return
        now = values.moment(record.get("time"))
        if name in _KINDS:
            self.seconds[name] += _time(record.get(_SECONDS[name]))
        if now is None:
            return
        if self.first is None and name == "start":
            self.first = now
        if name == "start" and self.last is not None:
            self.still += max(0.0, (now - self.last).total_seconds() - self.since_last)
        self.last, self.since_last = now, 0.0

    def _step(self, record: dict[str, Any]) -> None:
        measured = record.get("measured")
        if isinstance(measured, dict):
            self.since_last += _time(measured.get("step_seconds"))
            self.waited += _time(measured.get("input_wait_seconds"))


def _time(value: Any) -> float:
    """Seconds as recorded; 0 where nothing sensible is."""
    found = values.number(value)
    return found if found is not None and 0 <= found < math.inf else 0.0
