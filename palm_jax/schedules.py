"""Learning rate and Adafactor's beta2, as functions of the number of updates applied.

A schedule takes `count`, the updates applied so far: the optimizer's own counter, which a
skipped step does not advance. The formulas use k = count + 1, the update being made, which
the papers count from 1. Everything is float32 on scalars and runs inside the jitted step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from palm_jax import config

# Updates applied so far, i32[] or int -> f32[].
Schedule = Callable[[jax.Array | int], jax.Array]


def rate(schedule: config.Schedule) -> Schedule:
    """The learning rate of update `count + 1`, of a batch of the reference size if there is one.

    Source: PaLM, section 5; the cosine is that of Loshchilov and Hutter, 2017 (SGDR); warm-up,
    stable and decay that of Hu et al., 2024 (MiniCPM), its 1-sqrt that of Hagele et al., 2024;
    the inverse square root that of Vaswani et al., 2017, with a peak.
    """
    peak = schedule.peak
    match schedule:
        case config.PalmSchedule():
            return _held_then_inverse_square_root(peak, schedule.hold_steps)
        case config.CosineSchedule():
            return _warmed_up_cosine(schedule)
        case config.LinearSchedule():
            final, start, stop = schedule.final, schedule.warmup_steps, schedule.decay_steps
            after = _falling(peak, final, start, stop, lambda x: 1 - x)
        case config.WsdSchedule():
            after = _constant(peak)
            if schedule.hold_steps is not None and schedule.decay_steps is not None:
                after = _falling(
                    peak,
                    schedule.final,
                    schedule.hold_steps,
                    schedule.decay_steps,
                    _FALLS[schedule.decay],
                )
        case config.InverseSquareRootSchedule():
            after = _held_then_inverse_square_root(peak, schedule.warmup_steps)
        case config.ConstantSchedule():
            after = _constant(peak)
    return _warmed_up(peak, schedule.warmup_steps, after)


def share_of_peak(schedule: config.Schedule) -> Schedule:
    """rate / peak, exactly 1 at the peak: what decay independent of the rate's size follows.

    Source: Wortsman et al., 2023, section 3.2.2 (s_t; its theta - s(eta Delta - lambda theta)
    has a sign too many).
    """
    relative = {"peak": 1.0}
    if (final := getattr(schedule, "final", None)) is not None:
        relative["final"] = final / schedule.peak
    return rate(schedule.model_copy(update=relative))


def batch_factor(schedule: config.Schedule, num_sequences: int) -> float | None:
    """What multiplies the rate of a batch, sqrt(B / reference); None: nothing does.

    Source: Krizhevsky, 2014; with the right-hand side B over B_ref, not its inverse.
    """
    reference = schedule.batch_size_reference
    return None if reference is None else math.sqrt(num_sequences / reference)


def beta2(exponent: float) -> Schedule:
    """Adafactor's second-moment decay, 1 - k^-exponent: zero in the first update.

    Source: PaLM, section 5, with exponent 0.8.
    """

    def value(count: jax.Array | int) -> jax.Array:
        return 1 - _update(count).astype(jnp.float32) ** -exponent

    return value


def _update(count: jax.Array | int) -> jax.Array:
    """k, as an integer: float32 would only be exact up to 2^24 updates."""
    return jnp.asarray(count, jnp.int32) + 1


def _held_then_inverse_square_root(peak: float, hold_steps: int) -> Schedule:
    def value(count: jax.Array | int) -> jax.Array:
        k = jnp.maximum(_update(count), hold_steps).astype(jnp.float32)
        # A division, because x / x is exactly 1: while held, the rate is exactly the peak.
        return peak * jnp.sqrt(hold_steps / k)

    return value


def _constant(peak: float) -> Schedule:
    return lambda count: jnp.float32(peak)


def _warmed_up(peak: float, warmup_steps: int, after: Schedule) -> Schedule:
    """peak x k / warmup_steps before update `warmup_steps`, then `after`: no update is dead."""
    rise = peak / max(warmup_steps, 1)

    def value(count: jax.Array | int) -> jax.Array:
        k = _update(count)
        return jnp.where(k < warmup_steps, rise * k.astype(jnp.float32), after(count))

    return value


# From 1 at x = 0 to 0 at x = 1.
_FALLS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda x: 1 - x,
    "1-sqrt": lambda x: 1 - jnp.sqrt(x),
    "cosine": lambda x: 0.5 + 0.5 * jnp.cos(math.pi * x),
}


def _falling(
    peak: float,
    final: float,
    start: int,
    stop: int,
    fall: Callable[[jax.Array], jax.Array],
) -> Schedule:
    """Exactly `peak` until update `start`, exactly `final` from update `stop` on."""

    def value(count: jax.Array | int) -> jax.Array:
        passed = jnp.clip(_update(count) - start, 0, stop - start)
        share = fall(passed.astype(jnp.float32) * (1.0 / (stop - start)))
        between = share * peak + (1 - share) * final
        # Chosen, because n x (1 / n) need not be 1.
        return jnp.where(passed < stop - start, between, final)

    return value


def _warmed_up_cosine(schedule: config.CosineSchedule) -> Schedule:
    """Update `warmup_steps` is the first at the peak, `decay_steps` the first at `final`.

    Not optax.warmup_cosine_decay_schedule(k), the same curve: its rounding can leave it a
    bit off the peak and off the final rate, and it divides by a number XLA may invert.
    """
    peak, final, warmup = schedule.peak, schedule.final, schedule.warmup_steps
    rise = peak / max(warmup, 1)
    turn = math.pi / (schedule.decay_steps - warmup)

    def value(count: jax.Array | int) -> jax.Array:
        k = _update(count)
        decayed = jnp.clip(k - warmup, 0, schedule.decay_steps - warmup).astype(jnp.float32)
        share = 0.5 + 0.5 * jnp.cos(turn * decayed)  # 1 at the peak, 0 at the end
        # A weighted mean, because it gives both ends exactly.
        cosine = share * peak + (1 - share) * final
        return jnp.where(k < warmup, rise * k.astype(jnp.float32), cosine)

    return value
