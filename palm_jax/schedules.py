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


def rate(schedule: config.PalmSchedule | config.CosineSchedule) -> Schedule:
    """The learning rate of update `count + 1`.

    Source: PaLM, section 5; the cosine is that of Loshchilov and Hutter, 2017 (SGDR).
    """
    match schedule:
        case config.PalmSchedule():
            return _held_then_inverse_square_root(schedule)
        case config.CosineSchedule():
            return _warmed_up_cosine(schedule)


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


def _held_then_inverse_square_root(schedule: config.PalmSchedule) -> Schedule:
    def value(count: jax.Array | int) -> jax.Array:
        k = jnp.maximum(_update(count), schedule.hold_steps).astype(jnp.float32)
        # A division, because x / x is exactly 1: while held, the rate is exactly the peak.
        return schedule.peak * jnp.sqrt(schedule.hold_steps / k)

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
