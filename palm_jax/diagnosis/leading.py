"""Which recorded vital left its range first, and how long before the loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from palm_jax.record.logbook import MICROBATCH_DIGESTS
from palm_jax.spikes import robust

SIGMAS = 8.0  # of a vital's own scatter; some hundred vitals are looked at, at some fifty steps
IN_A_ROW = 3  # steps, of which one may be back in range
HISTORY = 100  # clean steps that the range comes from, ending LOOK_BACK steps before the onset
LOOK_BACK = 50
_FEWEST = 20  # clean steps; fewer give no range
# What is chosen, or counts, or is the loss itself.
_NOT_VITALS = {
    *("loss", "cross_entropy", "rate", "rate_scale", "skip_above", "applied", "schedule_step"),
    *("targets", "tokens", "batch_size", "first_position", "batch_digest", "beta2", "clip_norm"),
    *("weight_decay", "z_loss", "skips_at_floor", MICROBATCH_DIGESTS),
}


class Departure(NamedTuple):
    vital: str
    step: int  # the first of IN_A_ROW out of range
    before_loss: int  # steps; negative: after it
    value: float
    level: float


def departures(
    steps: Sequence[tuple[int, Mapping[str, Any]]], onset: int, last: int
) -> list[Departure]:
    """Vitals that left their range up to step `last`, the earliest first.

    Args:
      steps: (step, computed fields) as recorded, ascending; those of HISTORY + LOOK_BACK steps
        before the onset are enough.
    """
    found = []
    for name in _names(steps):
        values = [
            (step, value)
            for step, fields in steps
            if (value := _number(fields.get(name))) is not None
        ]
        clean = [v for s, v in values if onset - LOOK_BACK - HISTORY <= s < onset - LOOK_BACK]
        if len(clean) < _FEWEST:  # an early spike: what there is
            clean = [v for s, v in values if s < onset - 10][-HISTORY:]
        if len(clean) < _FEWEST or not all(map(math.isfinite, clean)):
            continue
        level, sigma = robust.usual(clean)
        # With the trend in it, which goes on; and a thousandth of the level is a constant's.
        limit = SIGMAS * max(sigma, 1e-3 * abs(level))
        if limit == 0:
            continue
        watched = [(s, v) for s, v in values if onset - LOOK_BACK <= s <= last]
        off = [not math.isfinite(v) or abs(v - level) > limit for _, v in watched]
        for place, (step, value) in enumerate(watched):
            run = off[place : place + IN_A_ROW]
            if run[0] and (sum(run) >= IN_A_ROW - 1 or len(run) == 1):
                found.append(Departure(name, step, onset - step, value, level))
                break
    return sorted(found, key=lambda d: (d.step, d.vital))


def _names(steps: Iterable[tuple[int, Mapping[str, Any]]]) -> list[str]:
    return sorted({name for _, fields in steps for name in fields} - _NOT_VITALS)


def _number(value: Any) -> float | None:
    """A vital as one number: of layers, the one of largest size."""
    if isinstance(value, list):
        numbers = [_number(v) for v in value]
        known = [n for n in numbers if n is not None]
        if any(math.isnan(n) for n in known):
            return math.nan
        return max(known, key=abs, default=None)
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
