"""Whether a run has become slower, over hours: a host that throttles, a disk that fills."""

from __future__ import annotations

from palm_jax.spikes.incidents import Alarm

HOUR_S = 3600.0
SLOWER = 0.9  # of the best hour's rate


class Throughput:
    """Compares each hour of training with the best one before, at the same batch size."""

    def __init__(self) -> None:
        self._best: dict[int, float] = {}  # tokens a second of a whole hour, by batch size
        self._hour: dict[int, tuple[float, int]] = {}  # seconds and tokens of the present one

    def add(self, step: int, batch_size: int, seconds: float, tokens: int) -> Alarm | None:
        """Take in what was done since the last call; an alarm where an hour was slow.

        Args:
          step: the last one done.
          seconds: of training alone, evaluations and compilations left out.
          tokens: targets trained on in that time.
        """
        spent, made = self._hour.get(batch_size, (0.0, 0))
        spent, made = spent + seconds, made + tokens
        if spent < HOUR_S:
            self._hour[batch_size] = spent, made
            return None
        self._hour[batch_size] = 0.0, 0
        rate = made / spent
        best = self._best.get(batch_size, rate)
        self._best[batch_size] = max(rate, best)
        if rate >= SLOWER * best:
            return None
        why = f"of the last hour; the best had {best:,.0f}"
        return Alarm("tokens_per_second", step, rate, SLOWER * best, why)
