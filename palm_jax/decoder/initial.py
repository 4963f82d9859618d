"""Initial values of kernels and tables, by `model.initialiser`.

| name | kernels | those that write to the residual stream | tables |
| --- | --- | --- | --- |
| palm | 1/sqrt(inputs) | as the others | 1 |
| gpt2 | 0.02 | divided by sqrt(2 layers) | 0.02 |
| bloom | 1/sqrt(3 width) | divided by sqrt(2 layers) | 1/sqrt(3 width) |
| small | sqrt(2 / (5 width)) | as the others | sqrt(2 / (5 width)) |
| wortsman | 1/sqrt(inputs), truncated | as the others | 1/sqrt(width) |
| deepnorm | sqrt(2 / (inputs + outputs)); values, up, gate x beta | x beta | 1/sqrt(width) |

Standard deviations, all of normal deviates; `model.initial_std` replaces those of gpt2, bloom and
small.

Source: PaLM, section 2; GPT-2, section 2.3, with the 0.02 of its code; BLOOM's launch scripts;
SmallInit (Nguyen and Salazar, 2019), section 2.2; Wortsman et al., 2023, section 2.1; DeepNet
(Wang et al., 2022), section 4.
"""

from __future__ import annotations

import collections.abc
import math
from typing import Any

import jax
import jax.numpy as jnp

from palm_jax import config, deviates

Initial = collections.abc.Callable[..., jax.Array]

# Kernels whose products are added to the residual stream, and those DeepNorm's beta scales down.
OUTPUTS = ("attention", "down")
SCALED_BY_BETA = ("value", "gate", "up", "attention", "down")
# Standard deviation of a normal deviate that is drawn again while it is beyond two.
_OF_TRUNCATED = 0.87962566103423978


def deepnorm_alpha(num_layers: int) -> float:
    """What the stream is multiplied by before a branch is added (DeepNet, section 4)."""
    return (2 * num_layers) ** 0.25


def deepnorm_beta(num_layers: int) -> float:
    """What the initial values of branches are multiplied by (DeepNet, section 4)."""
    return (8 * num_layers) ** -0.25


def _fixed_std(m: config.Model) -> float:
    if m.initial_std is not None:
        return m.initial_std
    return {
        "gpt2": 0.02,
        "bloom": (1 / (3 * m.width)) ** 0.5,
        "small": (2 / (5 * m.width)) ** 0.5,
    }[m.initialiser]


def kernel_std(m: config.Model, name: str, num_inputs: int, num_outputs: int) -> float:
    """Standard deviation of the kernel `name` of a layer.

    Under muP, variances fall as 1 / inputs whatever the initialiser (Yang et al., 2022, table 3).
    """
    match m.initialiser:
        case "palm" | "wortsman":
            return num_inputs**-0.5
        case "deepnorm":
            gain = deepnorm_beta(m.num_layers) if name in SCALED_BY_BETA else 1.0
            return gain * (2 / (num_inputs + num_outputs)) ** 0.5
        case "gpt2" | "bloom":
            std = _fixed_std(m) * m.width_multiple**-0.5
            return std / math.sqrt(2 * m.num_layers) if name in OUTPUTS else std
        case "small":
            return _fixed_std(m) * m.width_multiple**-0.5


def table_std(m: config.Model) -> float:
    """Of embedding, unembedding and learned positions; the same at all widths under muP."""
    if m.embedding_std is not None:
        return m.embedding_std
    match m.initialiser:
        case "palm":
            return 1.0
        case "wortsman" | "deepnorm":
            return m.base_width**-0.5
        case _:
            return _fixed_std(m)


def kernel(
    m: config.Model, name: str, num_inputs: int, num_outputs: int, zero: jax.Array | int
) -> Initial:
    """Of a layer's kernel; `zero` as in deviates.normal."""
    std = kernel_std(m, name, num_inputs, num_outputs)

    def initial(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
        if m.initialiser == "wortsman":
            values = deviates.truncated_normal(key, shape, zero) * (std / _OF_TRUNCATED)
        else:
            values = deviates.normal(key, shape, zero) * std
        return values.astype(dtype)

    return initial


def table(
    key: jax.Array, shape: tuple[int, ...], m: config.Model, zero: jax.Array | int
) -> jax.Array:
    """Of embedding, unembedding and learned positions."""
    std = table_std(m)
    values = deviates.normal(key, shape, zero)
    return values if std == 1 else values * std
