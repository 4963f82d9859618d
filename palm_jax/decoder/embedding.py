"""Rows of the embedding, and where a sequence's positions enter with them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from palm_jax.decoder.split import UNDIVIDED, Split


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def embed(table_VD: jax.Array, ids_BL: jax.Array, split: Split = UNDIVIDED) -> jax.Array:
    """Rows of the embedding [B, L, d]; a row's gradient is summed in float32 whatever its type.

    A frequent token's row receives thousands of terms: bfloat16 would stop adding at 256.
    """
    if split.size == 1:
        return table_VD[ids_BL]
    # One device has a token's row, the others add zeros: exact in any order.
    rows_BLD = table_VD.at[_rows_here(table_VD, ids_BL, split)].get(mode="fill", fill_value=0)
    return split.summed(rows_BLD)


def _rows_here(table_VD: jax.Array, ids_BL: jax.Array, split: Split) -> jax.Array:
    """Where tokens' rows stand in this device's part of a table; past its end if elsewhere."""
    num_rows = table_VD.shape[0]
    rows_BL = ids_BL - split.index() * num_rows
    return jnp.where((rows_BL >= 0) & (rows_BL < num_rows), rows_BL, num_rows)


def _embed_forward(table_VD: jax.Array, ids_BL: jax.Array, split: Split) -> tuple[jax.Array, Any]:
    return embed(table_VD, ids_BL, split), (table_VD, ids_BL)


def _embed_backward(split: Split, saved: Any, cotangent_BLd: jax.Array) -> tuple[jax.Array, None]:
    table_VD, ids_BL = saved
    cotangent_BLD = split.whole(cotangent_BLd).astype(jnp.float32)
    rows_BL = ids_BL if split.size == 1 else _rows_here(table_VD, ids_BL, split)
    zeros_VD = jnp.zeros(table_VD.shape, jnp.float32)
    gradient_VD = zeros_VD.at[rows_BL].add(cotangent_BLD, mode="drop")
    return gradient_VD.astype(table_VD.dtype), None


embed.defvjp(_embed_forward, _embed_backward)


def with_positions(x_BLd: jax.Array, positions_LD: jax.Array, split: Split) -> jax.Array:
    """Add a learned vector for each position, f32[L, D] or f32[B, L, D], in float32.

    So its gradient is a float32 sum over sequences.
    """
    positions_Ld = split.part(positions_LD.T).T
    return (x_BLd.astype(jnp.float32) + positions_Ld).astype(x_BLd.dtype)
