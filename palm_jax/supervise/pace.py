"""When silence is a hang."""

from __future__ import annotations

import statistics

from palm_jax import config


class Pace:
    """Learns from a training process's news how long the next may take."""

    def __init__(self, settings: config.Supervise) -> None:
        self._settings = settings
        self._intervals: list[float] = []  # seconds from one news of steps to the next
        self._last_steps: float | None = None

    def hear(self, event: str, at: float) -> None:
        """Take in that `event` was told of at `at`, in seconds of a clock that never jumps."""
        if event in ("start", "phase"):  # what follows compiles, evaluates or verifies
            self._last_steps = None
        elif event == "step":
            if self._last_steps is not None:
                self._intervals.append(at - self._last_steps)
            self._last_steps = at

    def limit(self) -> float:
        """Seconds without news that are a hang."""
        if self._last_steps is None:
            return self._settings.start_s
        usual = statistics.median(self._intervals) if self._intervals else 0.0
        return max(self._settings.stall_s, self._settings.stall_factor * usual)
