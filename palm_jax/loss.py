"""Next-token loss (PaLM, section 5): float32 cross-entropy and z-loss, as sums and counts.

Whoever adds microbatches and devices up divides once, by the count of them all: a mean of
means would weigh a token by its neighbours.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from palm_jax.attention import MASKED
from palm_jax.decoder.split import UNDIVIDED, Split


class LossSums(NamedTuple):
    """Sums over the target tokens; losses in nats."""

    cross_entropy: jax.Array  # f32[...]: sum of log Z - logit of the target
    z: jax.Array  # f32[...]: sum of (log Z)^2, not yet weighted
    log_z: jax.Array  # f32[...]
    targets: jax.Array  # i32[...]: how many tokens were counted


def logits(
    hidden_BLD: jax.Array,
    unembedding_VD: jax.Array,
    vocabulary_size: int,
    split: Split = UNDIVIDED,
    scale: float | None = None,
) -> jax.Array:
    """Float32 scores [B, L, V], times `scale`; the padding of the table can never win.

    V is the part of the vocabulary that is here.

    Args:
      scale: None: 1/sqrt(D).
    """
    B, L, D = hidden_BLD.shape
    scores_TV = jax.lax.dot_general(
        hidden_BLD.reshape(B * L, D),
        unembedding_VD,
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    scores_BLV = scores_TV.reshape(B, L, -1) * (D**-0.5 if scale is None else scale)
    return jnp.where(_ids_here(scores_BLV.shape[-1], split) >= vocabulary_size, MASKED, scores_BLV)


def _ids_here(num_here: int, split: Split) -> jax.Array:
    """Token ids of the part of the vocabulary that is here, i32[V]."""
    return split.index() * num_here + jnp.arange(num_here)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def token_losses(
    logits_BLV: jax.Array, targets_BL: jax.Array, split: Split = UNDIVIDED
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy and log Z of each token, two f32[B, L], in nats.

    Raises:
      TypeError: the logits are not float32; bfloat16 is too coarse for a log-sum over a
        large vocabulary.
    """
    if logits_BLV.dtype != jnp.float32:
        raise TypeError(f"the loss needs float32 logits, not {logits_BLV.dtype}")
    peak_BL = split.maximum(jnp.max(logits_BLV, axis=-1))
    sum_BL = split.total(jnp.sum(jnp.exp(logits_BLV - peak_BL[..., None]), axis=-1))
    log_z_BL = jnp.log(sum_BL) + peak_BL
    if split.size == 1:
        target_logit_BL = jnp.take_along_axis(logits_BLV, targets_BL[..., None], axis=-1)[..., 0]
    else:
        # One device has a target's logit, the others add zeros.
        is_target_BLV = targets_BL[..., None] == _ids_here(logits_BLV.shape[-1], split)
        target_logit_BL = split.total(jnp.sum(jnp.where(is_target_BLV, logits_BLV, 0), axis=-1))
    return log_z_BL - target_logit_BL, log_z_BL


def _forward(logits_BLV, targets_BL, split):  # type: ignore[no-untyped-def]
    cross_entropy_BL, log_z_BL = token_losses(logits_BLV, targets_BL, split)
    return (cross_entropy_BL, log_z_BL), (logits_BLV, targets_BL, log_z_BL)


def _backward(split, saved, cotangents):  # type: ignore[no-untyped-def]
    """d logits = (dCE + dlogZ) softmax - dCE onehot: no division, no scatter."""
    logits_BLV, targets_BL, log_z_BL = saved
    cross_entropy_BL, log_z_cotangent_BL = cotangents
    softmax_BLV = jnp.exp(logits_BLV - log_z_BL[..., None])
    is_target_BLV = targets_BL[..., None] == _ids_here(logits_BLV.shape[-1], split)
    both_BL = cross_entropy_BL + log_z_cotangent_BL
    return (
        both_BL[..., None] * softmax_BLV - jnp.where(is_target_BLV, cross_entropy_BL[..., None], 0),
        None,
    )


token_losses.defvjp(_forward, _backward)


def sums_by_sequence(
    logits_BLV: jax.Array,
    targets_BL: jax.Array,
    weights_BL: jax.Array | None = None,
    split: Split = UNDIVIDED,
) -> LossSums:
    """LossSums of each sequence, [B].

    Args:
      logits_BLV: float32.
      targets_BL: the token that follows each position, in its own row.
      weights_BL: bool; false takes a token out of every sum. Default: all count.
    """
    return sums_and_peaks(logits_BLV, targets_BL, weights_BL, split)[0]


def sums_and_peaks(
    logits_BLV: jax.Array,
    targets_BL: jax.Array,
    weights_BL: jax.Array | None = None,
    split: Split = UNDIVIDED,
) -> tuple[LossSums, jax.Array]:
    """`sums_by_sequence`, and the largest log Z of each sequence, which is not differentiated."""
    cross_entropy_BL, log_z_BL = token_losses(logits_BLV, targets_BL, split)
    seen_BL = jax.lax.stop_gradient(log_z_BL)
    if weights_BL is not None:
        seen_BL = jnp.where(weights_BL, seen_BL, -jnp.inf)
    peaks_B = jnp.max(seen_BL, axis=-1)
    if weights_BL is None:
        counts_B = jnp.full(targets_BL.shape[:1], targets_BL.shape[1], jnp.int32)
    else:
        cross_entropy_BL = jnp.where(weights_BL, cross_entropy_BL, 0)
        log_z_BL = jnp.where(weights_BL, log_z_BL, 0)
        counts_B = jnp.sum(weights_BL, axis=-1, dtype=jnp.int32)
    sums = LossSums(
        cross_entropy=jnp.sum(cross_entropy_BL, axis=-1),
        z=jnp.sum(log_z_BL * log_z_BL, axis=-1),
        log_z=jnp.sum(log_z_BL, axis=-1),
        targets=counts_B,
    )
    return sums, peaks_B


def sum_of_logits(
    hidden_BLD: jax.Array,
    unembedding_VD: jax.Array,
    vocabulary_size: int,
    split: Split = UNDIVIDED,
    scale: float | None = None,
) -> jax.Array:
    """Sum of all tokens' logits over the part of the vocabulary that is here, f32[].

    The sum of the products is the product of the sums: no logit is looked at. It is not
    differentiated.
    """
    hidden_BLD, unembedding_VD = jax.lax.stop_gradient((hidden_BLD, unembedding_VD))
    D = hidden_BLD.shape[-1]
    is_padding_V = _ids_here(unembedding_VD.shape[0], split) >= vocabulary_size
    rows_VD = jnp.where(is_padding_V[:, None], 0, unembedding_VD.astype(jnp.float32))
    hidden_D = jnp.sum(hidden_BLD.astype(jnp.float32), axis=(0, 1))
    return jnp.sum(hidden_D * jnp.sum(rows_VD, axis=0)) * (D**-0.5 if scale is None else scale)


def _chunk_sums(  # type: ignore[no-untyped-def]
    hidden_BLD, unembedding_VD, targets_BL, weights_BL, vocabulary_size, split, scale
) -> tuple[LossSums, jax.Array]:
    scores_BLV = logits(hidden_BLD, unembedding_VD, vocabulary_size, split, scale)
    return sums_and_peaks(scores_BLV, targets_BL, weights_BL, split)


def in_chunks(x_BL: jax.Array, length: int) -> jax.Array:
    """[B, L, ...] -> [chunks, B, length, ...]."""
    B, L = x_BL.shape[:2]
    return x_BL.reshape(B, L // length, length, *x_BL.shape[2:]).swapaxes(0, 1)


def chunked_sums(
    hidden_BLD: jax.Array,
    unembedding_VD: jax.Array,
    targets_BL: jax.Array,
    weights_BL: jax.Array,
    vocabulary_size: int,
    split: Split,
    length: int,
    scale: float | None = None,
) -> LossSums:
    """`sums_by_sequence` of the logits, of which only `length` positions exist at once.

    Chunks are added from first to last. The backward pass computes each chunk's logits again;
    the table's gradient is added up in float32 whatever its type.
    """
    arrays = hidden_BLD, unembedding_VD, targets_BL, weights_BL
    return chunked_sums_and_peaks(*arrays, vocabulary_size, split, length, scale)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def chunked_sums_and_peaks(
    hidden_BLD: jax.Array,
    unembedding_VD: jax.Array,
    targets_BL: jax.Array,
    weights_BL: jax.Array,
    vocabulary_size: int,
    split: Split,
    length: int,
    scale: float | None = None,
) -> tuple[LossSums, jax.Array]:
    """`chunked_sums`, and the largest log Z as in `sums_and_peaks`."""

    def add(
        total: tuple[LossSums, jax.Array], chunk: tuple[jax.Array, ...]
    ) -> tuple[tuple[LossSums, jax.Array], None]:
        hidden, targets, weights = chunk
        sums, peaks_B = _chunk_sums(
            hidden, unembedding_VD, targets, weights, vocabulary_size, split, scale
        )
        return (jax.tree.map(jnp.add, total[0], sums), jnp.maximum(total[1], peaks_B)), None

    chunks = tuple(in_chunks(x, length) for x in (hidden_BLD, targets_BL, weights_BL))
    zeros_B = jnp.zeros(targets_BL.shape[:1], jnp.float32)
    none = LossSums(zeros_B, zeros_B, zeros_B, zeros_B.astype(jnp.int32))
    return jax.lax.scan(add, (none, jnp.full_like(zeros_B, -jnp.inf)), chunks)[0]


def _chunked_forward(  # type: ignore[no-untyped-def]
    hidden_BLD, unembedding_VD, targets_BL, weights_BL, vocabulary_size, split, length, scale
):
    arrays = hidden_BLD, unembedding_VD, targets_BL, weights_BL
    return chunked_sums_and_peaks(*arrays, vocabulary_size, split, length, scale), arrays


def _chunked_backward(  # type: ignore[no-untyped-def]
    vocabulary_size, split, length, scale, saved, cotangents
):
    hidden_BLD, unembedding_VD, targets_BL, weights_BL = saved

    def pull(gradient_VD, chunk):  # type: ignore[no-untyped-def]
        hidden, targets, weights = chunk
        _, backward = jax.vjp(
            lambda h, table: _chunk_sums(h, table, targets, weights, vocabulary_size, split, scale)[
                0
            ],
            hidden,
            unembedding_VD,
        )
        hidden_gradient, chunk_gradient_VD = backward(cotangents[0])
        return gradient_VD + chunk_gradient_VD.astype(jnp.float32), hidden_gradient

    chunks = tuple(in_chunks(x, length) for x in (hidden_BLD, targets_BL, weights_BL))
    zeros_VD = jnp.zeros(unembedding_VD.shape, jnp.float32)
    gradient_VD, gradients = jax.lax.scan(pull, zeros_VD, chunks)
    hidden_gradient_BLD = gradients.swapaxes(0, 1).reshape(hidden_BLD.shape)
    return hidden_gradient_BLD, gradient_VD.astype(unembedding_VD.dtype), None, None


chunked_sums_and_peaks.defvjp(_chunked_forward, _chunked_backward)


def objective(sums: LossSums, z_weight: float) -> jax.Array:
    """What is differentiated: cross-entropy plus weighted z-loss, still a sum."""
    return sums.cross_entropy + z_weight * sums.z
