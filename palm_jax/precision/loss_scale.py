"""Dynamic loss scaling: keeps float16 gradients inside what float16 can hold.

The loss is multiplied by a scale before it is differentiated, and the summed gradient divided
by it afterwards, in float32. After an overflow the scale shrinks, after many clean updates it
grows. Everything here is a pure function of the scale's own state and of whether the gradient,
summed over all devices, was finite.

Source: Micikevicius et al., 2018, section 3.2; the rules are those of torch.amp.GradScaler,
JMP and Megatron, which differ in their numbers only.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from palm_jax import config


class LossScale(NamedTuple):
    """The scale and its counters; part of the train state."""

    scale: jax.Array  # f32[], a power of two
    clean: jax.Array  # i32[]: finite gradients since the scale last changed
    credit: jax.Array  # i32[]: overflows that are left until it shrinks
    skips_at_floor: jax.Array  # i32[]: overflows in a row at the smallest scale


def init(settings: config.Precision) -> LossScale | None:
    """The state at step 0; None where the policy has no loss scale."""
    if settings.policy != "float16" or settings.loss_scale == "none":
        return None
    constant = settings.loss_scale
    return LossScale(
        scale=jnp.float32(constant if isinstance(constant, float) else settings.loss_scale_initial),
        clean=jnp.int32(0),
        credit=jnp.int32(settings.loss_scale_hysteresis),
        skips_at_floor=jnp.int32(0),
    )


def after(state: LossScale, finite: jax.Array, settings: config.Precision) -> LossScale:
    """The state after a step.

    Args:
      finite: bool[]; whether every element of the gradient was.
    """
    constant = settings.loss_scale
    floor = constant if isinstance(constant, float) else settings.loss_scale_floor
    ceiling = constant if isinstance(constant, float) else settings.loss_scale_ceiling
    factor, full_credit = settings.loss_scale_factor, settings.loss_scale_hysteresis

    # As Megatron does: credit is not given back by clean steps, only as the scale grows.
    credit = jnp.maximum(state.credit - 1, 0)
    shrunk = jnp.maximum(state.scale * (1 / factor), floor)
    overflowed = LossScale(
        scale=jnp.where(credit == 0, shrunk, state.scale),
        clean=jnp.zeros_like(state.clean),
        credit=credit,
        skips_at_floor=jnp.where(state.scale <= floor, state.skips_at_floor + 1, 0),
    )
    grows = state.clean + 1 >= settings.loss_scale_growth_interval
    grown = jnp.minimum(state.scale * factor, ceiling)
    passed = LossScale(
        scale=jnp.where(grows, grown, state.scale),
        clean=jnp.where(grows, 0, state.clean + 1),
        credit=jnp.where(grows, full_credit, state.credit),
        skips_at_floor=jnp.zeros_like(state.skips_at_floor),
    )
    return jax.tree.map(lambda one, other: jnp.where(finite, one, other), passed, overflowed)


def gave_up(skips_at_floor: int, settings: config.Precision) -> str | None:
    """Why a run should stop, or None: its gradients overflow at the smallest scale there is.

    That is a symptom of divergence: no scale is small enough for the gradients to fit.
    """
    if skips_at_floor < settings.loss_scale_patience:
        return None
    constant = settings.loss_scale
    floor = constant if isinstance(constant, float) else settings.loss_scale_floor
    return (
        f"the gradients of {skips_at_floor} steps in a row were not finite at the smallest loss "
        f"scale, {floor:g} (precision.loss_scale_patience={settings.loss_scale_patience}): the "
        "run has diverged, and another scale will not mend it; go back to a step before the "
        "gradient norm rose, and lower the rate or exclude the data there"
    )
