"""Gradient descent with momentum (Sutskever et al., 2013)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from palm_jax import config
from palm_jax.optimizer import parts
from palm_jax.rounding import rounded


class Trace(NamedTuple):
    count: Any  # i32[]: updates so far
    trace: Any  # float32, as the parameters


def accumulated(gradient: Any, trace: Any, momentum: float, zero: jax.Array | int) -> Any:
    """momentum x trace + g."""
    return jax.tree.map(
        lambda g, t: rounded(momentum * t, zero) + rounded(g, zero), gradient, trace
    )


def scale_by_momentum(momentum: float, nesterov: bool) -> optax.GradientTransformationExtraArgs:
    """optax.trace: the sum of the gradients, those of n updates ago by momentum^n."""

    def init(params: Any) -> Trace:
        return Trace(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: Any, state: Trace, params: Any = None, zero: jax.Array | int = 0, **_: Any
    ) -> tuple[Any, Trace]:
        trace = accumulated(updates, state.trace, momentum, zero)
        moved = accumulated(updates, trace, momentum, zero) if nesterov else trace
        return moved, Trace(state.count + 1, trace)

    return optax.GradientTransformationExtraArgs(init, update)


def chain(settings: config.SGD) -> dict[str, Any]:
    return {
        "moments": scale_by_momentum(settings.momentum, settings.nesterov),
        "weight_decay": parts.add_decay(
            lambda rate, share: settings.weight_decay, settings.no_decay
        ),
        "rate": parts.scale_by_rounded_rate(),
        "descent": optax.scale(-1.0),
    }
