"""Which parts of a step are computed in which number format.

Master weights, optimizer state, norms, softmax, loss and every sum over devices,
microbatches or tokens are float32 under both policies (but for one addition: the two
gradients of a tied table meet in the compute format). A policy chooses the format in which
matrices are multiplied and activations are kept.
"""

from __future__ import annotations

import jax.numpy as jnp

from palm_jax import config


def compute_dtype(precision: config.Precision) -> jnp.dtype:
    """Format of the matrices' copies and of the activations between layers."""
    return jnp.dtype(precision.policy)


def parameter_compute_dtype(name: str, dtype: jnp.dtype) -> jnp.dtype:
    """Format in which the parameter `name` enters a layer.

    Norm scales stay float32: they are used inside the norms, and a bfloat16 copy of
    1 + s would swallow s below 2^-8.
    """
    return jnp.dtype(jnp.float32) if "scale" in name else dtype


def compiler_options(platform: str, reduction: str) -> dict[str, bool | str]:
    """XLA options without which the bits of a step would depend on the device count.

    Excess precision lets the compiler leave out roundings to bfloat16 where it sees two
    conversions in a row, which depends on what stands between them. On CPU, reductions go
    to a library with another order of summation if they are large enough, and a slice of a
    parameter is smaller on more devices.

    Args:
      platform: of the devices.
      reduction: numerics.reduction; `fast` leaves XLA all its choices.
    """
    if reduction == "fast":
        return {}
    options: dict[str, bool | str] = {"xla_allow_excess_precision": False}
    if platform == "cpu":
        options["xla_cpu_experimental_ynn_fusion_type"] = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
    return options
