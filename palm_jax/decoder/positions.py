"""How a position enters the attention: by turning queries and keys, or by a slope on distance."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np


@functools.cache
def rotary_tables(length: int, head_size: int, base: float) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines f32[L, K/2] of the rotary angles; angles in float64.

    bfloat16 angles would merge positions 256 and 257.
    """
    inverse_frequency = base ** (-np.arange(0, head_size, 2) / head_size)
    angles = np.arange(length)[:, None] * inverse_frequency
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: jax.Array, tables: tuple[np.ndarray, np.ndarray]) -> jax.Array:
    """Rotary embedding over all dims, first half against second half; float32 in and out.

    Source: RoFormer, section 3.2; half-split as in the PaLM authors' inference code.
    """
    cosine, sine = tables
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )


@functools.cache
def alibi_slopes(num_heads: int) -> np.ndarray:
    """What each head's scores lose for each token of distance, f32[H].

    2^(-8i/n) for i = 1..n where n is a power of two. Otherwise those of the power of two below,
    and then every other one of the power of two above.

    Source: ALiBi (Press et al., 2022), section 3, and its code for other numbers of heads.
    """
    below = 2 ** (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / below) for i in range(1, below + 1)]
    between = [2.0 ** (-8 * i / (2 * below)) for i in range(1, 2 * below + 1, 2)]
    return np.asarray(slopes + between[: num_heads - below], np.float32)
