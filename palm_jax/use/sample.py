"""Choosing a token from its distribution: temperature, top-k and top-p, seeded by place.

The noise of a token is a function of (seed, row, position), so that what a row draws depends on
no other row, nor on how many there are. Letters as in model.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from palm_jax.attention import MASKED
from palm_jax.errors import WrongInput


class Sampling(NamedTuple):
    """How tokens are drawn."""

    temperature: float = 1.0  # scores are divided by it; 0: the likeliest token, always
    top_k: int | None = None  # only so many likeliest tokens; None, or more than there are: all
    top_p: float = 1.0  # only the likeliest tokens that together have this probability
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_filtered(self) -> bool:
        return not self.is_greedy and (self.top_k is not None or self.top_p < 1)


MOST_SEEDS = 2**32  # a key takes 32 bits of it


def check(sampling: Sampling) -> None:
    """Raise WrongInput for a number that says nothing."""
    if not (0 <= sampling.temperature < math.inf):
        raise WrongInput(
            f"--temperature {sampling.temperature:g} must be a number from 0 (the likeliest token) "
            "up; 1 is the model's own distribution"
        )
    if sampling.top_k is not None and sampling.top_k < 1:
        raise WrongInput(f"--top-k {sampling.top_k} must be 1 or more; leave it out for all tokens")
    if not (0 < sampling.top_p <= 1):
        raise WrongInput(
            f"--top-p {sampling.top_p:g} must be above 0 and at most 1, which keeps all tokens"
        )
    if not (0 <= sampling.seed < MOST_SEEDS):
        raise WrongInput(f"--seed {sampling.seed} must be from 0 to {MOST_SEEDS - 1}")


class Draw(NamedTuple):
    """`Sampling`'s numbers as arrays, of which a compiled program takes any."""

    temperature: jax.Array  # f32[]
    top_k: jax.Array  # i32[]
    top_p: jax.Array  # f32[]
    seed: jax.Array  # u32[]


def draw_of(sampling: Sampling, vocabulary_size: int) -> Draw:
    top_k = vocabulary_size if sampling.top_k is None else min(sampling.top_k, vocabulary_size)
    return Draw(
        jnp.float32(sampling.temperature),
        jnp.int32(top_k),
        jnp.float32(sampling.top_p),
        jnp.uint32(sampling.seed),
    )


def tokens(
    logits_BV: jax.Array,
    rows_B: jax.Array,
    positions_B: jax.Array,
    draw: Draw,
    *,
    is_greedy: bool,
    is_filtered: bool,
) -> jax.Array:
    """A token for each row, i32[B].

    Args:
      logits_BV: float32; those of no word are MASKED, and are never drawn.
      rows_B: numbers of the rows among all that are generated.
      positions_B: where the tokens will stand in their rows.
    Source: the maximum of scores with Gumbel noise is a draw from their softmax (Gumbel-max);
      top-p is nucleus sampling (Holtzman et al., 2020), over what top-k leaves.
    """
    if is_greedy:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    # The largest is 0 whatever the temperature, so that a tiny one gives no infinity less another.
    shifted_BV = logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)
    scores_BV = jnp.where(logits_BV <= MASKED, -jnp.inf, shifted_BV / draw.temperature)
    if is_filtered:
        scores_BV = jnp.where(_kept(scores_BV, draw.top_k, draw.top_p), scores_BV, -jnp.inf)

    def noise_of(row: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(draw.seed), row), position)
        return jax.random.gumbel(key, scores_BV.shape[1:], jnp.float32)

    noise_BV = jax.vmap(noise_of)(rows_B, positions_B)
    return jnp.argmax(scores_BV + noise_BV, axis=-1).astype(jnp.int32)


def _kept(scores_BV: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Which tokens are among the `top_k` likeliest, and within the first `top_p` of those.

    Of equally likely tokens the one with the lower id counts as likelier.
    """
    order_BV = jnp.argsort(-scores_BV, axis=-1, stable=True)
    sorted_BV = jnp.take_along_axis(scores_BV, order_BV, axis=-1)
    ranks_V = jnp.arange(scores_BV.shape[-1])
    weights_BV = jnp.where(ranks_V < top_k, jnp.exp(sorted_BV), 0)  # the first one is 1
    before_BV = jnp.cumsum(weights_BV, axis=-1) - weights_BV
    # The first token is always kept. At top_p = 1 rounding must not lose the last ones.
    whole_B1 = jnp.sum(weights_BV, axis=-1, keepdims=True)
    within_BV = (before_BV < top_p * whole_B1) | (top_p >= 1) | (ranks_V == 0)
    is_kept_BV = (ranks_V < top_k) & within_BV
    back_BV = jnp.argsort(order_BV, axis=-1)
    return jnp.take_along_axis(is_kept_BV, back_BV, axis=-1)
