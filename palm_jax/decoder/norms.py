"""Root-mean-square norm and layer norm, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from palm_jax.decoder.split import UNDIVIDED, Split

EPSILON = 1e-6  # as in the PaLM authors' inference code


def normalise(x: jax.Array, kind: str, split: Split = UNDIVIDED) -> jax.Array:
    """Root-mean-square norm, or layer norm, of the last axis, without a scale; float32.

    Where `split` divides that axis, statistics are those of the whole of it.
    """
    x = x.astype(jnp.float32)
    per_element = 1.0 / (x.shape[-1] * split.size)
    if kind == "layernorm":
        x = x - split.total(jnp.sum(x, axis=-1, keepdims=True)) * per_element
    mean_square = split.total(jnp.sum(x * x, axis=-1, keepdims=True)) * per_element
    return x * jax.lax.rsqrt(mean_square + EPSILON)


def normed(
    x: jax.Array, kind: str, scale_D: jax.Array, bias_D: jax.Array | None, split: Split
) -> jax.Array:
    """`normalise`, times 1 + scale, plus a bias; float32.

    Scales are stored around zero, so that weight decay pulls them to one.
    """
    y = normalise(x, kind, split) * (1.0 + split.part(scale_D))
    return y if bias_D is None else y + split.part(bias_D)
