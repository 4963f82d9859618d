"""Dropout whose masks are a function of (seed, step, microbatch, layer, place).

A microbatch's index in its batch belongs to the run and no mesh does, so that masks are the same
on any number of devices, and in a replay.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from palm_jax.decoder.split import Split

# Places of a layer, and of what stands before the layers.
ATTENTION_WEIGHTS, ATTENTION, FEED_FORWARD, EMBEDDING = range(4)


def microbatch_key(seed: int, step: jax.Array, microbatch: jax.Array) -> jax.Array:
    """
    Args:
      step: of the data; `microbatch`: its index within the batch; i32[] both.
    """
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), microbatch)


def dropped(
    x_BLd: jax.Array, share: float, key: jax.Array | None, place: int, split: Split
) -> jax.Array:
    """x, a `share` of whose elements are zero and the rest larger by 1 / (1 - share)."""
    if key is None or share == 0:
        return x_BLd
    B, L, d = x_BLd.shape
    keep_BLD = jax.random.bernoulli(
        jax.random.fold_in(key, place), 1 - share, (B, L, d * split.size)
    )
    keep_BLd = split.part(keep_BLD.T).T
    return jnp.where(keep_BLd, x_BLd * (1 / (1 - share)), 0).astype(x_BLd.dtype)


def kept_weights(
    shape_BLS: tuple[int, int, int], heads_H: jax.Array, share: float, key: jax.Array | None
) -> jax.Array | None:
    """What attention's weights are multiplied by, f32[B, H, L, S]: 0, or 1 / (1 - share).

    Args:
      heads_H: numbers of the heads that are here, among those of all devices.
    """
    if key is None or share == 0:
        return None
    of_layer = jax.random.fold_in(key, ATTENTION_WEIGHTS)

    def of_head(head: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(of_layer, head), 1 - share, shape_BLS)

    return jax.vmap(of_head, out_axes=1)(heads_H) * jnp.float32(1 / (1 - share))
