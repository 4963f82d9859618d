"""Optimizers as optax transformations (PaLM, section 5).

optax where it equals the paper; our own part only where it does not: the RMS of a matrix is
taken per layer of a stacked leaf and across the slices of all devices, which needs sums that
the caller supplies, and the rate is a number the caller computes once, uses and records.
"""

from __future__ import annotations

import collections.abc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from palm_jax import config, schedules

# Tree -> for each leaf the mean square of each matrix in it, shaped to broadcast with it.
MeanSquares = collections.abc.Callable[[Any], Any]


def _stateless(update: Any) -> optax.GradientTransformationExtraArgs:
    def update_fn(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return update(updates, params, **extra), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)


def clip_by_norm(limit: float) -> optax.GradientTransformationExtraArgs:
    """Scale gradients to a global norm of at most `limit`, given `gradient_norm` f32[]."""

    def update(updates: Any, params: Any, *, gradient_norm: jax.Array, **_: Any) -> Any:
        factor = jnp.minimum(1.0, limit / gradient_norm)
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

    def update(updates: Any, params: Any, *, rate: jax.Array, **_: Any) -> Any:
        decay = rate**exponent
        return jax.tree.map(lambda u, p: u + decay * p, updates, params)

    return _stateless(update)


def scale_by_adam(
    beta1: float, beta2: float, epsilon: float
) -> optax.GradientTransformationExtraArgs:
    """optax.scale_by_adam, but with the bias corrections as factors.

    optax divides each leaf by a broadcast scalar, which XLA turns into a multiplication for
    some device counts and not for others.
    """

    def update_fn(updates: Any, state: Any, params: Any = None, **_: Any) -> Any:
        count = state.count + 1
        first = 1.0 / (1.0 - beta1 ** count.astype(jnp.float32))
        second = 1.0 / (1.0 - beta2 ** count.astype(jnp.float32))
        mu = jax.tree.map(lambda g, m: beta1 * m + (1 - beta1) * g, updates, state.mu)
        nu = jax.tree.map(lambda g, v: beta2 * v + (1 - beta2) * (g * g), updates, state.nu)
        updates = jax.tree.map(lambda m, v: (m * first) / (jnp.sqrt(v * second) + epsilon), mu, nu)
        return updates, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    init = optax.scale_by_adam().init
    return optax.GradientTransformationExtraArgs(init, update_fn)


def build(
    settings: config.Adafactor | config.AdamW, mean_squares: MeanSquares
) -> optax.GradientTransformationExtraArgs:
    """The whole rule: `update(gradients, state, params, gradient_norm=, rate=)`.

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
            ("weight_decay", optax.add_decayed_weights(settings.weight_decay)),
            ("rate", scale_by_rate()),
            minus,
        )
    # T5X's order, in which the momentum is taken of the finished update, without debiasing.
    return optax.named_chain(
        clip,
        (
            "second_moment",
            optax.scale_by_factored_rms(
                factored=False,
                decay_rate=settings.beta2_exponent,
                decay_rate_fn=lambda count, exponent: schedules.beta2(exponent)(count),
                epsilon=settings.epsilon_square,
            ),
        ),
        (
            "update_clip",
            unless_off(settings.update_clip, lambda limit: clip_by_matrix_rms(limit, mean_squares)),
        ),
        ("rate", scale_by_rate()),
        ("parameter_scale", scale_by_matrix_rms(settings.epsilon_scale, mean_squares)),
        ("momentum", optax.ema(settings.beta1, debias=False)),
        ("weight_decay", unless_off(settings.weight_decay_exponent, decay_by_rate_power)),
        minus,
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
