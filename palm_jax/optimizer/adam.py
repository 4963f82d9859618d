"""AdamW (Kingma and Ba, 2015; Loshchilov and Hutter, 2019)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from palm_jax import config
from palm_jax.optimizer import parts
from palm_jax.optimizer.parts import average


def adam_step(state: Any, beta1: float, beta2: float, epsilon: float) -> Any:
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
        mu = jax.tree.map(lambda g, m: average(m, g, beta1, zero), updates, state.mu)
        nu = jax.tree.map(lambda g, v: average(v, g * g, beta2, zero), updates, state.nu)
        state = optax.ScaleByAdamState(count=count, mu=mu, nu=nu)
        return adam_step(state, beta1, beta2, epsilon), state

    return optax.GradientTransformationExtraArgs(optax.scale_by_adam().init, update)


def chain(settings: config.AdamW) -> dict[str, Any]:
    moments = {"moments": scale_by_adam(settings.beta1, settings.beta2, settings.epsilon)}
    descent = {"descent": optax.scale(-1.0)}
    wanted = settings.weight_decay
    if settings.independent_decay:
        decay = parts.add_decay(lambda rate, share: wanted * share, settings.no_decay)
        rate = parts.scale_by_rounded_rate()
        return {**moments, "rate": rate, "weight_decay": decay, **descent}
    decay = parts.add_decay(lambda rate, share: wanted, settings.no_decay)
    return {**moments, "weight_decay": decay, "rate": parts.scale_by_rate(), **descent}
