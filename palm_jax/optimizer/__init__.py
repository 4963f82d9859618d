"""Optimizers as optax transformations; PaLM's is Adafactor (PaLM, section 5).

The parts are our own where optax's would not do, and each equals its optax counterpart to a
rounding (tests/test_optimizer.py, tests/test_rules.py):

- Sums over a matrix are taken per layer of a stacked leaf and across the slices of all devices,
  which needs sums that the caller supplies.
- The rate is a number the caller computes once, uses and records.
- Bits must not depend on the size of a slice, so every product that is added to something is
  `rounded` first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from palm_jax import config, schedules
from palm_jax.optimizer import adafactor, adam, lion, muon, parts, sgd, soap, sophia
from palm_jax.optimizer.parts import Matrices, clip_factor

__all__ = [
    "Matrices",
    "build",
    "clip_factor",
    "in_force",
    "needs_share",
    "normalised",
    "wants_curvature",
]


def build(
    settings: config.Optimizer, matrices: Matrices, kernel_rate: float = 1.0
) -> optax.GradientTransformationExtraArgs:
    """The whole rule: `update(gradients, state, params, gradient_norm=, rate=, zero=)`.

    With `share=`, too, where `needs_share(settings)`, and `curvature=`, an estimate that
    curvature.py makes, where `wants_curvature` gives an answer. The form of its state depends on
    `settings.name` (and `factored`) alone: parts that are switched off stand in it, empty, so
    that they can be switched on in the middle of a run.

    Args:
      settings: which rule, and its numbers.
      matrices: only Adafactor, Muon and SOAP ask for anything of it.
      kernel_rate: multiplies what AdamW and Lion do to layers' kernels, but not their decay.
    """
    clip = parts.unless_off(settings.clip_norm, parts.clip_by_norm)
    match settings:
        case config.Adafactor():
            chain = adafactor.chain(settings, matrices)
        case config.AdamW():
            chain = adam.chain(settings)
        case config.Lion():
            chain = lion.chain(settings)
        case config.Muon():
            chain = muon.chain(settings, matrices)
        case config.SOAP():
            chain = soap.chain(settings, matrices)
        case config.SGD():
            chain = sgd.chain(settings)
        case config.Sophia():
            chain = sophia.chain(settings)
    if isinstance(settings, config.AdamW | config.Lion):
        chain["moments"] = parts.with_kernel_rate(chain["moments"], kernel_rate)
    return optax.named_chain(("clip", clip), *chain.items())


def needs_share(settings: config.Optimizer) -> bool:
    """Whether an update takes schedules.share_of_peak, f32[]."""
    return isinstance(settings, config.AdamW) and settings.independent_decay


def wants_curvature(settings: config.Optimizer, state: Any) -> jax.Array | None:
    """bool[]: whether the update from `state` looks at its `curvature`. None: it takes none."""
    return sophia.is_due(settings, state) if isinstance(settings, config.Sophia) else None


def normalised(
    settings: config.Optimizer,
    gradient: Any,
    state_before: Any,
    state_after: Any,
    clip: jax.Array,
    matrices: Matrices,
    zero: jax.Array | int,
) -> Any:
    """What an update takes of the moments, before anything clips, signs or scales it.

    Adafactor's g / sqrt(v), AdamW's m / (sqrt(v) + epsilon), SOAP's, too, Lion's average before
    its sign, Muon's before it is orthogonalised, SGD's and Sophia's momentum; XLA finds that it was
    computed.

    Args:
      gradient: before it was clipped.
      state_before: the optimizer's; `state_after`: with the moments that the update used.
      clip: as from `clip_factor`.
    """
    match settings:
        case config.Adafactor():
            return adafactor.normalised(settings, gradient, state_after, clip, matrices, zero)
        case config.AdamW():
            numbers = settings.beta1, settings.beta2, settings.epsilon
            return adam.adam_step(state_after["moments"], *numbers)
        case config.Lion():
            clipped = jax.tree.map(lambda g: g * clip, gradient)
            return lion.interpolated(clipped, state_before["moments"], settings.beta1, zero)
        case config.Muon():
            return muon.normalised(settings, gradient, state_after, clip, zero)
        case config.SOAP():
            return soap.normalised(settings, state_after, matrices, zero)
        case config.SGD():
            trace = state_after["moments"].trace
            if not settings.nesterov:
                return trace
            clipped = jax.tree.map(lambda g: g * clip, gradient)
            return sgd.accumulated(clipped, trace, settings.momentum, zero)
        case config.Sophia():
            return state_after["moments"].ema


def in_force(
    settings: config.Optimizer, state: Any, rate: jax.Array, share: jax.Array | None = None
) -> dict[str, jax.Array]:
    """The numbers with which `build(settings)` updates from `state`, f32[] each.

    A limit that is switched off is infinite. `weight_decay` is what a parameter loses of itself.
    """
    clip_norm = np.inf if settings.clip_norm is None else settings.clip_norm
    numbers: dict[str, Any] = {"clip_norm": clip_norm}
    match settings:
        case config.Adafactor():
            numbers |= {
                "beta1": settings.beta1,
                "beta2": schedules.beta2(settings.beta2_exponent)(state["second_moment"].count),
            }
            exponent = settings.weight_decay_exponent
            decay = jnp.zeros_like(rate) if exponent is None else rate**exponent
        case config.SGD():
            numbers |= {"momentum": settings.momentum}
            decay = rate * settings.weight_decay
        case config.Muon():
            numbers |= {
                "momentum": settings.momentum,
                "beta1": settings.beta1,
                "beta2": settings.beta2,
            }
            decay = rate * settings.weight_decay
        case config.SOAP():
            numbers |= {"beta1": settings.beta1, "beta2": settings.beta2}
            decay = soap.decay_in_force(settings, state, rate)
        case config.AdamW() | config.Lion() | config.Sophia():
            numbers |= {"beta1": settings.beta1, "beta2": settings.beta2}
            decay = (rate if share is None else share) * settings.weight_decay
    numbers = {name: jnp.asarray(value, jnp.float32) for name, value in numbers.items()}
    return {**numbers, "weight_decay": decay}
