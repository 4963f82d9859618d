"""Optimizers as optax transformations (PaLM, section 5).

The parts are our own where optax's would not do, and each equals its optax counterpart to a
rounding (tests/test_optimizer.py):

- The RMS of a matrix is taken per layer of a stacked leaf and across the slices of all devices,
  which needs sums that the caller supplies.
- The rate is a number the caller computes once, uses and records.
- Bits must not depend on the size of a slice, so every product that is added to something is
  `rounded` first.
"""

from __future__ import annotations

import collections.abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from palm_jax import config, schedules
from palm_jax.rounding import rounded

# Tree -> for each leaf the mean square of each matrix in it, shaped to broadcast with it.
MeanSquares = collections.abc.Callable[[Any], Any]


def _stateless(update: Any) -> optax.GradientTransformationExtraArgs:
    def update_fn(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return update(updates, params, **extra), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)


def clip_factor(limit: float | None, gradient_norm: jax.Array) -> jax.Array:
    """What clipping to a global norm of at most `limit` multiplies a gradient by, f32[]."""
    if limit is None:
        return jnp.ones_like(gradient_norm)
    return jnp.minimum(1.0, limit / gradient_norm)


def clip_by_norm(limit: float) -> optax.GradientTransformationExtraArgs:
    """Scale gradients to a global norm of at most `limit`, given `gradient_norm` f32[]."""

    def update(updates: Any, params: Any, *, gradient_norm: jax.Array, **_: Any) -> Any:
        factor = clip_factor(limit, gradient_norm)
        return jax.tree.map(lambda g: g * factor, updates)

    return _stateless(update)


def clip_by_matrix_rms(limit: float, mean_squares: MeanSquares) -> optax.GradientTransformation:
    """Divide each matrix's update by max(1, RMS / limit) (Adafactor, section 6)."""

    def clip(update: jax.Array, mean_square: jax.Array) -> jax.Array:
        return update * (1.0 / jnp.maximum(1.0, jnp.sqrt(mean_square) * (1.0 / limit)))

    return _stateless(
        lambda updates, params, **_: jax.tree.map(clip, updates, mean_squares(updates))
    )


def scale_by_matrix_rms(floor: float, mean_squares: MeanSquares) -> optax.GradientTransformation:
    """Multiply each matrix's update by max(RMS(parameter), floor) (Adafactor, section 8)."""

    def scale(update: jax.Array, mean_square: jax.Array) -> jax.Array:
        return update * jnp.maximum(jnp.sqrt(mean_square), floor)

    return _stateless(
        lambda updates, params, **_: jax.tree.map(scale, updates, mean_squares(params))
    )


def scale_by_rate() -> optax.GradientTransformationExtraArgs:
    return _stateless(
        lambda updates, params, *, rate, **_: jax.tree.map(lambda u: u * rate, updates)
    )


def decay_by_rate_power(exponent: float) -> optax.GradientTransformationExtraArgs:
    """Add rate^exponent x parameter: PaLM's decay, neither scaled nor kept in momentum."""

    def update(
        updates: Any, params: Any, *, rate: jax.Array, zero: jax.Array | int = 0, **_: Any
    ) -> Any:
        decay = rate**exponent
        return jax.tree.map(lambda u, p: u + rounded(decay * p, zero), updates, params)

    return _stateless(update)


def add_decayed_weights(decay: float) -> optax.GradientTransformationExtraArgs:
    """Add decay x parameter (optax.add_decayed_weights)."""

    def update(updates: Any, params: Any, *, zero: jax.Array | int = 0, **_: Any) -> Any:
        return jax.tree.map(lambda u, p: u + rounded(decay * p, zero), updates, params)

    return _stateless(update)


def _average(old: jax.Array, new: jax.Array, beta: Any, zero: Any) -> jax.Array:
    """beta x old + (1 - beta) x new."""
    return rounded(beta * old, zero) + rounded((1 - beta) * new, zero)


def _over_root(g: jax.Array, v: jax.Array, zero: Any) -> jax.Array:
    """g / sqrt(v).

    Not by rsqrt, nor a division by sqrt, which XLA makes one of: it estimates and corrects a
    reciprocal root, and how depends on the size of a slice (docs/bits.md).
    """
    return g * (1.0 / rounded(jnp.sqrt(v), zero))


class SecondMoment(NamedTuple):
    count: Any  # i32[]: updates so far
    v: Any  # float32, as the parameters


def scale_by_second_moment(
    beta2_exponent: float, epsilon: float
) -> optax.GradientTransformationExtraArgs:
    """g / sqrt(v), v the average of g^2 + epsilon with beta2 = 1 - k^-exponent.

    optax.scale_by_factored_rms(factored=False), without its placeholders for factors.
    """

    def init(params: Any) -> SecondMoment:
        return SecondMoment(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: Any,
        state: SecondMoment,
        params: Any = None,
        zero: jax.Array | int = 0,
        **_: Any,
    ) -> tuple[Any, SecondMoment]:
        beta2 = schedules.beta2(beta2_exponent)(state.count)
        v = jax.tree.map(
            lambda g, old: _average(old, rounded(g * g, zero) + epsilon, beta2, zero),
            updates,
            state.v,
        )
        scaled = jax.tree.map(lambda g, new: _over_root(g, new, zero), updates, v)
        return scaled, SecondMoment(state.count + 1, v)

    return optax.GradientTransformationExtraArgs(init, update)


class Momentum(NamedTuple):
    ema: Any  # float32, as the parameters


def momentum(beta1: float) -> optax.GradientTransformationExtraArgs:
    """The average of the updates, not debiased (optax.ema)."""

    def update(
        updates: Any, state: Momentum, params: Any = None, zero: jax.Array | int = 0, **_: Any
    ) -> tuple[Any, Momentum]:
        ema = jax.tree.map(lambda u, old: _average(old, u, beta1, zero), updates, state.ema)
        return ema, Momentum(ema)

    return optax.GradientTransformationExtraArgs(
        lambda params: Momentum(jax.tree.map(jnp.zeros_like, params)), update
    )


def _adam_step(state: Any, beta1: float, beta2: float, epsilon: float) -> Any:
    """m / (sqrt(v) + epsilon) of debiased moments."""
    count = state.count.astype(jnp.float32)
    first, second = 1.0 / (1.0 - beta1**count), 1.0 / (1.0 - beta2**count)
    return jax.tree.map(
        lambda m, v: (m * first) / (jnp.sqrt(v * second) + epsilon), state.mu, state.nu
    )


def scale_by_adam(
    beta1: float, beta2: float, epsilon: float
) -> optax.GradientTransformationExtraArgs:
    """optax.scale_by_adam, but with the bias corrections as factors.

    optax divides each leaf by a broadcast scalar, which XLA turns into a multiplication for
    some device counts and not for others.
    """

    def update(
        updates: Any, state: Any, params: Any = None, zero: jax.Array | int = 0, **_: Any
    ) -> Any:
        count = state.count + 1
        mu = jax.tree.map(lambda g, m: _average(m, g, beta1, zero), updates, state.mu)
        nu = jax.tree.map(lambda g, v: _average(v, g * g, beta2, zero), updates, state.nu)
        state = optax.ScaleByAdamState(count=count, mu=mu, nu=nu)
        return _adam_step(state, beta1, beta2, epsilon), state

    return optax.GradientTransformationExtraArgs(optax.scale_by_adam().init, update)


def build(
    settings: config.Adafactor | config.AdamW, mean_squares: MeanSquares
) -> optax.GradientTransformationExtraArgs:
    """The whole rule: `update(gradients, state, params, gradient_norm=, rate=, zero=)`.

    The form of its state depends on `settings.name` alone: parts that are switched off stand
    in it, empty, so that they can be switched on in the middle of a run.

    Args:
      settings: which rule, and its numbers.
      mean_squares: as `MeanSquares`; only Adafactor asks for it.
    """

    def unless_off(setting: float | None, part: Any) -> Any:
        return optax.identity() if setting is None else part(setting)

    clip = ("clip", unless_off(settings.clip_norm, clip_by_norm))
    minus = ("descent", optax.scale(-1.0))
    if isinstance(settings, config.AdamW):
        return optax.named_chain(
            clip,
            ("moments", scale_by_adam(settings.beta1, settings.beta2, settings.epsilon)),
            ("weight_decay", add_decayed_weights(settings.weight_decay)),
            ("rate", scale_by_rate()),
            minus,
        )
    # T5X's order, in which the momentum is taken of the finished update, without debiasing.
    return optax.named_chain(
        clip,
        (
            "second_moment",
            scale_by_second_moment(settings.beta2_exponent, settings.epsilon_square),
        ),
        (
            "update_clip",
            unless_off(settings.update_clip, lambda limit: clip_by_matrix_rms(limit, mean_squares)),
        ),
        ("rate", scale_by_rate()),
        ("parameter_scale", scale_by_matrix_rms(settings.epsilon_scale, mean_squares)),
        ("momentum", momentum(settings.beta1)),
        ("weight_decay", unless_off(settings.weight_decay_exponent, decay_by_rate_power)),
        minus,
    )


def normalised(
    settings: config.Adafactor | config.AdamW,
    gradient: Any,
    state_after: Any,
    clip: jax.Array,
    zero: jax.Array | int,
) -> Any:
    """What an update takes of the moments, before anything clips or scales it.

    Adafactor's g / sqrt(v), AdamW's m / (sqrt(v) + epsilon); XLA finds that it was computed.

    Args:
      gradient: before it was clipped.
      state_after: the optimizer's, with the moments that the update used.
      clip: as from `clip_factor`.
    """
    if isinstance(settings, config.AdamW):
        return _adam_step(state_after["moments"], settings.beta1, settings.beta2, settings.epsilon)
    return jax.tree.map(
        lambda g, v: _over_root(g * clip, v, zero), gradient, state_after["second_moment"].v
    )


def in_force(
    settings: config.Adafactor | config.AdamW, state: Any, rate: jax.Array
) -> dict[str, jax.Array]:
    """The numbers with which `build(settings)` updates from `state`, f32[] each.

    A limit that is switched off is infinite.
    """
    clip_norm = np.inf if settings.clip_norm is None else settings.clip_norm
    if isinstance(settings, config.AdamW):
        beta2, decay = jnp.float32(settings.beta2), rate * settings.weight_decay
    else:
        beta2 = schedules.beta2(settings.beta2_exponent)(state["second_moment"].count)
        exponent = settings.weight_decay_exponent
        decay = jnp.zeros_like(rate) if exponent is None else rate**exponent
    return {
        "beta1": jnp.float32(settings.beta1),
        "beta2": beta2,
        "clip_norm": jnp.float32(clip_norm),
        "weight_decay": decay,
    }
