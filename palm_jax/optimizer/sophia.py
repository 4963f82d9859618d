"""Sophia: momentum over an estimate of curvature, each element clipped (Liu et al., 2023)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from palm_jax import config
from palm_jax.optimizer import parts
from palm_jax.optimizer.parts import average


class Moments(NamedTuple):
    count: Any  # i32[]: updates so far
    ema: Any  # average of the gradients; float32, as the parameters
    curvature: Any  # of the estimates of the loss's second derivatives, likewise


def is_due(settings: config.Sophia, state: Any) -> jax.Array:
    """bool[]: whether the update from the chain's `state` takes an estimate into its average.

    The first does, and every k-th from there: t mod k = 1 in the paper, which counts from 1.
    """
    return state["moments"].count % settings.refresh_every == 0


def clipped_step(moments: Moments, gamma: float, epsilon: float) -> Any:
    """m / max(gamma h, epsilon), between -1 and 1; where h is not positive, the sign of m."""
    return jax.tree.map(
        lambda m, h: jnp.clip(m / jnp.maximum(gamma * h, epsilon), -1.0, 1.0),
        moments.ema,
        moments.curvature,
    )


def scale_by_curvature(settings: config.Sophia) -> optax.GradientTransformationExtraArgs:
    """Source: Liu et al., 2023, algorithm 3. Neither average is debiased.

    `update` takes `curvature=`, an estimate like the parameters. It counts where `is_due`.
    """

    def init(params: Any) -> Moments:
        count = jnp.zeros((), jnp.int32)
        ema, curvature = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return Moments(count, ema, curvature)

    def update(
        updates: Any,
        state: Moments,
        params: Any = None,
        *,
        curvature: Any,
        zero: jax.Array | int = 0,
        **_: Any,
    ) -> tuple[Any, Moments]:
        due = is_due(settings, {"moments": state})

        def refreshed(h: jax.Array, estimate: jax.Array) -> jax.Array:
            # An estimate has a backward pass of its own, which may overflow where the
            # gradient's does not; what is lost for ever is an average with such an element.
            usable = due & jnp.isfinite(estimate)
            return jnp.where(usable, average(h, estimate, settings.beta2, zero), h)

        moments = Moments(
            count=state.count + 1,
            ema=jax.tree.map(lambda g, m: average(m, g, settings.beta1, zero), updates, state.ema),
            curvature=jax.tree.map(refreshed, state.curvature, curvature),
        )
        return clipped_step(moments, settings.gamma, settings.epsilon), moments

    return optax.GradientTransformationExtraArgs(init, update)


def chain(settings: config.Sophia) -> dict[str, Any]:
    return {
        "moments": scale_by_curvature(settings),
        "weight_decay": parts.add_decay(
            lambda rate, share: settings.weight_decay, settings.no_decay
        ),
        "rate": parts.scale_by_rounded_rate(),
        "descent": optax.scale(-1.0),
    }
