"""Muon: orthogonalised momentum for the layers' kernels, AdamW for all else.

I inputs   O outputs of a kernel

Source: Jordan et al., 2024 (https://kellerjordan.github.io/posts/muon); the matching of RMS and
the decay: Liu et al., 2025 (Muon is scalable for LLM training), section 2.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from palm_jax import config
from palm_jax.optimizer import adam, kinds, parts
from palm_jax.optimizer.parts import Matrices, average
from palm_jax.reductions import fold
from palm_jax.rounding import rounded

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of X, (X X^T) X and (X X^T)^2 X
EPSILON = 1e-7  # added to the norm of a matrix


def orthogonalised(x: jax.Array, steps: int, zero: jax.Array | int) -> jax.Array:
    """The nearest semi-orthogonal matrix, roughly: singular values from 0.68 to 1.15, f32[I, O].

    By Newton-Schulz iteration. Products and sums are apart, and all in one order.
    """
    a, b, c = COEFFICIENTS
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    squares = rounded(x * x, zero)
    x = x * (1.0 / (jnp.sqrt(fold(fold(squares))) + EPSILON))
    for _ in range(steps):
        gram = rounded(x @ x.T, zero)
        twice = rounded(gram @ gram, zero)
        polynomial = rounded(b * gram, zero) + rounded(c * twice, zero)
        x = rounded(a * x, zero) + rounded(polynomial @ x, zero)
    return x.T if tall else x


def scale(num_inputs: int, num_outputs: int, consistent_rms: float | None) -> float:
    """What an orthogonalised kernel is multiplied by."""
    if consistent_rms is None:
        return math.sqrt(max(1.0, num_outputs / num_inputs))
    return consistent_rms * math.sqrt(max(num_inputs, num_outputs))


class Moments(NamedTuple):
    count: Any  # i32[]: updates so far
    ema: Any  # of the layers' kernels: average of the gradients
    mu: Any  # of all else: AdamW's moments
    nu: Any


def _is_other(path: kinds.Path) -> bool:
    return not kinds.is_layer_kernel(path)


def _momentum(gradient: Any, ema: Any, settings: config.Muon, zero: jax.Array | int) -> Any:
    """What is orthogonalised; `ema` has this update's gradient in it."""
    if not settings.nesterov:
        return ema
    return jax.tree.map(lambda g, m: average(m, g, settings.momentum, zero), gradient, ema)


def _adam(settings: config.Muon) -> optax.GradientTransformationExtraArgs:
    return adam.scale_by_adam(settings.beta1, settings.beta2, settings.epsilon)


def scale_by_muon(
    settings: config.Muon, matrices: Matrices
) -> optax.GradientTransformationExtraArgs:
    def init(params: Any) -> Moments:
        kernels = kinds.chosen(params, kinds.is_layer_kernel)
        others = _adam(settings).init(kinds.chosen(params, _is_other))
        return Moments(others.count, jax.tree.map(jnp.zeros_like, kernels), others.mu, others.nu)

    def update(
        updates: Any, state: Moments, params: Any = None, zero: jax.Array | int = 0, **_: Any
    ) -> tuple[Any, Moments]:
        def step(matrix_IO: jax.Array) -> jax.Array:
            num_inputs, num_outputs = matrix_IO.shape
            factor = scale(num_inputs, num_outputs, settings.consistent_rms)
            x_IO = orthogonalised(matrix_IO, settings.newton_schulz_steps, zero)
            return rounded(x_IO * factor, zero)

        kernels = kinds.chosen(updates, kinds.is_layer_kernel)
        ema = jax.tree.map(lambda g, m: average(m, g, settings.momentum, zero), kernels, state.ema)
        moved = matrices.of_whole(step, _momentum(kernels, ema, settings, zero))
        adams = optax.ScaleByAdamState(count=state.count, mu=state.mu, nu=state.nu)
        others, adams = _adam(settings).update(
            kinds.chosen(updates, _is_other), adams, params, zero=zero
        )
        others = jax.tree.map(lambda u: rounded(settings.adamw_rate * u, zero), others)
        return kinds.joined(moved, others), Moments(adams.count, ema, adams.mu, adams.nu)

    return optax.GradientTransformationExtraArgs(init, update)


def chain(settings: config.Muon, matrices: Matrices) -> dict[str, Any]:
    return {
        "moments": scale_by_muon(settings, matrices),
        "weight_decay": parts.add_decay(
            lambda rate, share: settings.weight_decay, settings.no_decay
        ),
        "rate": parts.scale_by_rounded_rate(),
        "descent": optax.scale(-1.0),
    }


def normalised(
    settings: config.Muon,
    gradient: Any,
    state_after: Any,
    clip: jax.Array,
    zero: jax.Array | int,
) -> Any:
    """AdamW's m / (sqrt(v) + epsilon), and of kernels the momentum before orthogonalisation."""
    moments = state_after["moments"]
    clipped = jax.tree.map(lambda g: g * clip, kinds.chosen(gradient, kinds.is_layer_kernel))
    kernels = _momentum(clipped, moments.ema, settings, zero)
    others = adam.adam_step(moments, settings.beta1, settings.beta2, settings.epsilon)
    return kinds.joined(kernels, others)
