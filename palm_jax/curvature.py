"""Estimates of the diagonal of the loss's second derivative, for Sophia (Liu et al., 2023).

Gauss-Newton-Bartlett (algorithm 2 of the paper). Draw a label for every token from the model's
own softmax, and let g be the gradient of the mean cross-entropy of B tokens with these labels.
Such a gradient has mean zero for every token, and tokens are drawn independently, so that
B g * g is on average the diagonal of the Gauss-Newton matrix J' S J of that mean: J is the
derivative of the logits, S the Hessian of the cross-entropy by the logits. B counts tokens,
because a token is what a label is drawn for. It is never negative. The z-loss is no likelihood,
and has no part in it.

Hutchinson (algorithm 1). Draw u from N(0, I): u * (H u) is on average the diagonal of the
Hessian H, here of the whole objective. It may be negative. H u is the gradient of <gradient, u>,
reverse mode over reverse mode: the model's own backward rules (softmax, losses, gathers) have no
forward mode.

Either is taken of a batch's first block of microbatches, as the paper takes it of a part of the
batch: more sequences would hardly make it better. B g * g is the square of a sum of many terms
and so varies like the square of a normal deviate, by sqrt(2) of its mean, however many there are;
and u varies by itself.

What is drawn is a function of (seed, data step, microbatch or parameter, place), which no mesh
changes: an estimate has the same bits on any number of data-parallel devices, and in a replay.

Letters as in model.py.
"""

from __future__ import annotations

import collections.abc
from typing import Any

import jax
import jax.numpy as jnp

from palm_jax import deviates, loss
from palm_jax.decoder import dropout
from palm_jax.decoder.split import Split
from palm_jax.sharding import DATA_PARALLEL, logical_axes, mesh_axes

# Folded into a microbatch's key, of which dropout takes the numbers of layers and places.
_LABELS = 2**31
# In the place of a microbatch's number.
_DIRECTIONS = 2**31


def first_block(tokens: jax.Array, lanes: int) -> jax.Array:
    """Of a batch [passes, 1, microbatch, L+1] on this device, what is in the first block."""
    return tokens[: lanes // jax.lax.axis_size(DATA_PARALLEL)]


# --- Gauss-Newton-Bartlett ----------------------------------------------------------------


def labels_key(seed: int, step: jax.Array, microbatch: jax.Array) -> jax.Array:
    """Key of a microbatch's labels; arguments as in dropout.microbatch_key."""
    return jax.random.fold_in(dropout.microbatch_key(seed, step, microbatch), _LABELS)


def drawn(logits_BLV: jax.Array, key: jax.Array, split: Split) -> jax.Array:
    """A token id for each position from the softmax of float32 logits, i32[B, L].

    The largest of logits plus Gumbel noise. Each id has noise of its own key, so that devices
    that share the vocabulary draw what one device would.
    """
    B, L, num_here = logits_BLV.shape
    ids_V = split.index() * num_here + jnp.arange(num_here)

    def noise(token: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(key, token), (B, L), mode="high")

    noisy_BLV = logits_BLV + jax.vmap(noise, out_axes=2)(ids_V)
    best_BL = split.maximum(jnp.max(noisy_BLV, axis=-1))
    # The first of those that are best. Where a logit is NaN none is, and the loss is NaN, too.
    end = split.size * num_here
    first_BL = jnp.min(jnp.where(noisy_BLV == best_BL[..., None], ids_V, end), axis=-1)
    return -split.maximum(-first_BL)


def drawn_labels(
    hidden_BLD: jax.Array,
    unembedding_VD: jax.Array,
    vocabulary_size: int,
    split: Split,
    scale: float | None,
    chunk: int | None,
    key: jax.Array,
) -> jax.Array:
    """Labels i32[B, L] in the place of a microbatch's targets.

    Args:
      hidden_BLD, unembedding_VD, vocabulary_size, split, scale: as in loss.logits.
      chunk: positions whose logits exist at once; None: all of them.
      key: as from `labels_key`.
    """
    hidden_BLD, unembedding_VD = jax.lax.stop_gradient((hidden_BLD, unembedding_VD))

    def of_stretch(hidden_BLD: jax.Array, number: jax.Array | int) -> jax.Array:
        logits_BLV = loss.logits(hidden_BLD, unembedding_VD, vocabulary_size, split, scale)
        return drawn(logits_BLV, jax.random.fold_in(key, number), split)

    if chunk is None:
        return of_stretch(hidden_BLD, 0)
    stretches = loss.in_chunks(hidden_BLD, chunk)
    labels = jax.lax.map(lambda one: of_stretch(*one), (stretches, jnp.arange(len(stretches))))
    return labels.swapaxes(0, 1).reshape(hidden_BLD.shape[:2])


# --- Hutchinson ---------------------------------------------------------------------------


def direction(params: Any, seed: int, step: jax.Array, zero: jax.Array | int) -> Any:
    """u of N(0, I), float32, a tree like the parameters' slices on this device.

    Every index along D has a key of its own, so that a device draws no more than its slice.

    Args:
      step: of the data, i32[].
      zero: as in deviates.normal.
    """
    key = dropout.microbatch_key(seed, step, jnp.uint32(_DIRECTIONS))
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)

    def of_leaf(path: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        dim = logical_axes(path, x.ndim).find("D")
        if dim < 0:
            return deviates.normal(key, x.shape, zero)
        num_here, rest = x.shape[dim], x.shape[:dim] + x.shape[dim + 1 :]
        places = jax.lax.axis_index("fsdp") * num_here + jnp.arange(num_here)
        return jax.vmap(
            lambda place: deviates.normal(jax.random.fold_in(key, place), rest, zero), out_axes=dim
        )(places)

    drawn = [
        of_leaf(path, x, jax.random.fold_in(key, number)) for number, (path, x) in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, drawn)


def along(
    backward: collections.abc.Callable[..., Any], direction: Any
) -> collections.abc.Callable[..., Any]:
    """`backward`, but for the gradient that comes first the Hessian's product with `direction`.

    Args:
      backward: (params, ...) -> ((gradient of params, others), auxiliary), with a gradient that
        is summed over data-parallel devices, as by reductions.gather.
      direction: a tree like the parameters' slices.
    """

    def product(params: Any, *given: Any) -> Any:
        def slope(params: Any) -> tuple[jax.Array, Any]:
            (gradient, *others), auxiliary = backward(params, *given)
            return _inner(gradient, direction), (others, auxiliary)

        turned, (others, auxiliary) = jax.grad(slope, has_aux=True)(params)
        return (turned, *others), auxiliary

    return product


def _inner(gradient: Any, direction: Any) -> jax.Array:
    """This device's term of <gradient, direction>, f32[]: it is differentiated, not looked at.

    Devices that hold the same slice of a gradient have it from one sum over them all. The first
    of them takes the product, or the derivative would count it as often as there are copies;
    the others add zeros, which is exact in any order.
    """

    def of_leaf(path: Any, g: jax.Array, u: jax.Array) -> jax.Array:
        is_cut = "fsdp" in mesh_axes(logical_axes(path, g.ndim))
        copy = jax.lax.axis_index("data" if is_cut else DATA_PARALLEL)
        return jnp.sum(g * jnp.where(copy == 0, u, 0))

    terms = jax.tree_util.tree_map_with_path(of_leaf, gradient, direction)
    return sum(jax.tree.leaves(terms), jnp.float32(0))


# --- both ---------------------------------------------------------------------------------


def estimate(
    gradients: collections.abc.Callable[..., Any],
    params: Any,
    estimator: str,
    *,
    seed: int,
    step: jax.Array,
    num_targets: int,
    unscaled: jax.Array | float,
    zero: jax.Array | int,
) -> Any:
    """The estimate, float32, a tree like `params`.

    Args:
      gradients: step.gradients of the first block: summed over its tokens, given `labels_drawn`
        or `direction`.
      estimator: config.Sophia's.
      step: of the data, i32[].
      num_targets: of the block.
      unscaled: turns what `gradients` gives into that of the block's mean.
      zero: as in rounding.rounded.
    """
    if estimator == "hutchinson":
        u = direction(params, seed, step, zero)
        products = gradients(direction=u).gradient
        return jax.tree.map(lambda u, product: u * (product * unscaled), u, products)
    gradient = gradients(labels_drawn=True).gradient
    return jax.tree.map(lambda g: num_targets * jnp.square(g * unscaled), gradient)
