"""Which parts of a step are computed and stored in which number format.

Norms, softmax, loss and every sum over devices, microbatches or tokens are float32 under all
policies (but for one addition: the two gradients of a tied table meet in the compute format).
A policy chooses the format in which matrices are multiplied and activations are kept, and
whether parameters and optimizer state are float32. docs/precision.md has the whole table.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from palm_jax import config

_COMPUTE = {"bfloat16_pure": "bfloat16", "float8": "bfloat16"}


def compute_dtype(precision: config.Precision) -> jnp.dtype:
    """Format of the matrices' copies and of the activations between layers."""
    return jnp.dtype(_COMPUTE.get(precision.policy, precision.policy))


def parameter_compute_dtype(name: str, dtype: jnp.dtype) -> jnp.dtype:
    """Format in which the parameter `name` enters a layer.

    Norm scales stay float32: they are used inside the norms, and a bfloat16 copy of
    1 + s would swallow s below 2^-8. So do biases and learned positions, whose gradients are sums
    over tokens.
    """
    is_wide = any(word in name for word in ("scale", "bias", "position"))
    return jnp.dtype(jnp.float32) if is_wide else dtype


def stored_dtype(precision: config.Precision) -> jnp.dtype:
    """Format of parameters and optimizer state between steps."""
    return jnp.dtype(jnp.bfloat16 if precision.policy == "bfloat16_pure" else jnp.float32)


def stored(tree: Any, dtype: jnp.dtype) -> Any:
    """A tree's floating leaves, rounded to a format; float32 ones are left alone by float32."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def wide(tree: Any) -> Any:
    """The same values in float32, in which updates are computed."""
    return stored(tree, jnp.dtype(jnp.float32))


def is_emulated(policy: str, platform: str, device_kind: str = "") -> str | None:
    """What to tell a person whose devices compute a policy in other formats; None: they do not.

    Values are the same: they are rounded to the policy's formats and multiplied in a wider one.
    What is not had is the speed.

    Args:
      platform: as JAX names it: cpu, tpu, gpu.
      device_kind: `jax.Device.device_kind`; empty: not known.
    """
    if policy == "float8" and platform == "cpu":
        return (
            "precision.policy=float8 is emulated on a CPU: values are rounded to 8 bits and "
            "multiplied in float32, which is slower than bfloat16"
        )
    if policy == "float8" and device_kind in _WITHOUT_FLOAT8:
        return (
            f"precision.policy=float8 is emulated on {device_kind}, whose matrix units take "
            "bfloat16: it is slower than bfloat16"
        )
    if policy == "float16" and platform == "tpu":
        return (
            "precision.policy=float16 is emulated on TPUs, whose matrix units take bfloat16; "
            "set precision.policy=bfloat16"
        )
    return None


_WITHOUT_FLOAT8 = ("TPU v4", "TPU v5 lite", "TPU v5", "TPU v5p", "TPU v6 lite")


def compiler_options(platform: str, reduction: str) -> dict[str, bool | str]:
    """XLA options without which the bits of a step would depend on the device count.

    Excess precision lets the compiler leave out roundings to narrow formats where it sees two
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
