"""The numbers that stand above the figures, and that `palm-jax report --json` prints."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from palm_jax.plan import parameters
from palm_jax.report.read import Reading
from palm_jax.report.series import MEASURED, History, as_float


# A logbook may hold numbers as large as floats go; what is worked out from them is then infinite.
@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def headline(reading: Reading) -> dict[str, Any]:
    """A run in some twenty numbers; what is not known is None.

    `tokens` are those of the history shown: what was executed again counts once, and what was
    left behind not at all. Numbers that are not finite stay so.
    """
    history, evaluations = reading.history, reading.evaluations
    steps = history.steps_S
    told = reading.teller.summary()
    held_out = [r for r in evaluations if as_float(r.get("bits_per_byte")) is not None]
    last = held_out[-1] if held_out else {}
    loss = history.series("loss")
    return {
        "run": reading.name,
        "segment": reading.segment,
        "status": reading.status,
        "incidents": reading.num_incidents,
        "open_incidents": reading.num_open_incidents,
        "parameters": parameters.number(reading.settings.model),
        "steps": len(steps),
        "first_step": int(steps[0]) if len(steps) else None,
        "next_step": int(steps[-1]) + 1 if len(steps) else None,
        "steps_planned": reading.settings.steps,
        "attempts": told["attempts"],
        "steps_redone": told["steps_redone"],
        "steps_left_behind": told["steps_left_behind"],
        "skipped_updates": int(np.sum(history.series("applied").values_S == 0)),
        "non_finite_losses": int(np.sum(~np.isfinite(loss.values_S))),
        "tokens": tokens(history, reading.settings.model.sequence_length),
        "loss": float(loss.values_S[-1]) if len(loss.values_S) else None,
        "held_out_loss": as_float(last.get("loss")),
        "bits_per_byte": as_float(last.get("bits_per_byte")),
        "evaluated_at_step": last.get("step"),
        "state_digest": None if reading.digest is None else reading.digest[1],
        "state_digest_at_step": None if reading.digest is None else reading.digest[0],
        "tokens_per_second": _median(history, "tokens_per_second"),
        "step_seconds": _median(history, "step_seconds"),
        "model_flops_utilisation": _median(history, "model_flops_utilisation"),
        "training_seconds": told["training_seconds"],
    }


def tokens(history: History, sequence_length: int) -> int | None:
    """Target tokens of a history's batches, with those before its first recorded step.

    The logbook's own count follows from the data step alone; data that was jumped over would
    be in it.
    """
    sizes, counts = history.series("batch_size"), history.series("tokens")
    if not len(counts.steps_S):
        return None
    total = counts.values_S[-1]
    if len(sizes.steps_S) == len(history.steps_S):
        before = counts.values_S[0] - sizes.values_S[0] * sequence_length
        if int(history.steps_S[0]) == 0:
            before = 0
        total = before + sizes.values_S.sum() * sequence_length
    return int(total) if np.isfinite(total) else None


def _median(history: History, name: str) -> float | None:
    values = history.series(MEASURED + name).values_S
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


def short(number: float) -> str:
    """A count for a headline: 1,234, 8.63 billion."""
    if not math.isfinite(number):
        return str(number)
    for unit, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if abs(number) >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,.0f}"
