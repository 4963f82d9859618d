"""Lion: the sign of an interpolated momentum (Chen et al., 2023)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from palm_jax import config
from palm_jax.optimizer import parts
from palm_jax.optimizer.parts import average


class Momentum(NamedTuple):
    count: Any  # i32[]: updates so far
    ema: Any  # float32, as the parameters


def interpolated(updates: Any, before: Momentum, beta1: float, zero: jax.Array | int) -> Any:
    """beta1 x m + (1 - beta1) x g, what the sign is taken of; m as the update finds it."""
    return jax.tree.map(lambda g, m: average(m, g, beta1, zero), updates, before.ema)


def scale_by_sign(beta1: float, beta2: float) -> optax.GradientTransformationExtraArgs:
    """optax.scale_by_lion. Source: Chen et al., 2023, algorithm 2."""

    def init(params: Any) -> Momentum:
        return Momentum(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: Any, state: Momentum, params: Any = None, zero: jax.Array | int = 0, **_: Any
    ) -> tuple[Any, Momentum]:
        signs = jax.tree.map(jnp.sign, interpolated(updates, state, beta1, zero))
        ema = jax.tree.map(lambda g, m: average(m, g, beta2, zero), updates, state.ema)
        return signs, Momentum(state.count + 1, ema)

    return optax.GradientTransformationExtraArgs(init, update)


def chain(settings: config.Lion) -> dict[str, Any]:
    return {
        "moments": scale_by_sign(settings.beta1, settings.beta2),
        "weight_decay": parts.add_decay(
            lambda rate, share: settings.weight_decay, settings.no_decay
        ),
        "rate": parts.scale_by_rounded_rate(),
        "descent": optax.scale(-1.0),
    }
