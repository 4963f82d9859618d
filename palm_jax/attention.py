"""Causal attention in two ways, whose heads share one key and value (PaLM, section 2) or several.

`xla` writes all scores down, [B, H, L, S]. `splash` is the Pallas kernel for TPUs that ships
with JAX: it goes through the scores block by block and keeps none. Scores and softmax are
float32 both ways; the bits of their results differ.

Letters as in model.py. Inside `jax.shard_map`, H and G are the numbers of this device's heads,
and of keys and values.
"""

from __future__ import annotations

import collections.abc
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from palm_jax.errors import CannotDo, WrongInput

Kind = Literal["xla", "splash"]
# Finite, so that a row without any visible key would give numbers and not NaN.
MASKED = -1e30
# The kernel cuts sequences into blocks of a multiple of a TPU's 128 lanes. Heads may have any
# size up to what fits in a v4 core's own memory in float32, in blocks of 512.
LANES, LARGEST_BLOCK, LARGEST_HEAD = 128, 512, 256
# The name, in jax.checkpoint's policies, of what products with kernels read and give, and of what
# attention gives: it is kept where model.remat is "attention".
KEPT = "kept"

# Queries of a microbatch's first sequence whose attention is looked at for the vitals.
OBSERVED_QUERIES = 8


@jax.custom_vjp
def softmax(scores: jax.Array) -> jax.Array:
    """Softmax over the last axis of float32 scores, written without dividing an array.

    XLA may turn `x / broadcast(s)` into `x * (1 / s)`, and chooses differently for
    different device counts; here, forward and backward, there is nothing to choose.
    """
    exponentials = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    return exponentials * (1.0 / jnp.sum(exponentials, axis=-1, keepdims=True))


def _softmax_forward(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    probabilities = softmax(scores)
    return probabilities, probabilities


def _softmax_backward(probabilities: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    inner = jnp.sum(cotangent * probabilities, axis=-1, keepdims=True)
    return (probabilities * (cotangent - inner),)


softmax.defvjp(_softmax_forward, _softmax_backward)


def visible(documents_BL: jax.Array | None, length: int) -> jax.Array:
    """Which keys a query may see, bool[B or 1, L, S]: its past and, if given, its document."""
    causal_LS = np.tril(np.ones((length, length), np.bool_))[None]
    if documents_BL is None:
        return jnp.asarray(causal_LS)
    return jnp.asarray(causal_LS) & (documents_BL[:, :, None] == documents_BL[:, None, :])


def document_numbers(ids_BL: jax.Array, end_of_document: int) -> jax.Array:
    """Number within its row of the document each token belongs to, i32[B, L].

    The end-of-document token is the last one of its document.
    """
    ends_BL = (ids_BL == end_of_document).astype(jnp.int32)
    return jnp.cumsum(ends_BL, axis=1) - ends_BL


class Given(NamedTuple):
    """What else an attention takes account of; None: nothing of it."""

    documents_BL: jax.Array | None = None  # as from `document_numbers`: a token sees its own only
    slopes_H: jax.Array | None = None  # f32: what each head's scores lose per token of distance
    kept_BHLS: jax.Array | None = None  # f32: what weights are multiplied by, for dropout


NOTHING = Given()


def _with_distance(
    scores_HQS: jax.Array, slopes_H: jax.Array | None, queries_Q: np.ndarray
) -> jax.Array:
    """Scores [..., H, Q, S] less what their distances cost (ALiBi); Q: positions of queries."""
    if slopes_H is None:
        return scores_HQS
    distance_QS = queries_Q[:, None] - np.arange(scores_HQS.shape[-1])
    return scores_HQS - slopes_H[:, None, None] * distance_QS.astype(np.float32)


def xla(
    query_BLHK: jax.Array, key_BSK: jax.Array, value_BSK: jax.Array, visible_BLS: jax.Array
) -> jax.Array:
    """Attention [B, L, H, K] to the keys that `visible_BLS` shows; arguments as in `attention`."""
    return _xla_and_scores(query_BLHK, key_BSK, value_BSK, visible_BLS)[0]


def _xla_and_scores(
    query_BLHK: jax.Array,
    key_BSK: jax.Array,
    value_BSK: jax.Array,
    visible_BLS: jax.Array,
    slopes_H: jax.Array | None = None,
    kept_BHLS: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    scores_BHLS = jnp.einsum(
        "blhk,bsk->bhls", query_BLHK, key_BSK, preferred_element_type=jnp.float32
    )
    scores_BHLS = _with_distance(scores_BHLS, slopes_H, np.arange(query_BLHK.shape[1]))
    scores_BHLS = jnp.where(visible_BLS[:, None], scores_BHLS, MASKED)
    weights_BHLS = softmax(scores_BHLS)
    if kept_BHLS is not None:
        weights_BHLS = weights_BHLS * kept_BHLS
    weights_BHLS = weights_BHLS.astype(value_BSK.dtype)
    return jnp.einsum("bhls,bsk->blhk", weights_BHLS, value_BSK), scores_BHLS


def cached(
    query_BLHK: jax.Array,
    key_BGSK: jax.Array,
    value_BGSK: jax.Array,
    visible_BLS: jax.Array,
    positions_BL: jax.Array,
    slopes_H: jax.Array | None = None,
) -> jax.Array:
    """Attention [B, L, H, K] of a text's next tokens to all that is kept of it.

    Args:
      query_BLHK: the scale of the scores is already in it.
      key_BGSK, value_BGSK: a slot a position; each serves H/G neighbouring heads.
      visible_BLS: which slots a query sees.
      positions_BL: of the queries.
      slopes_H: as in `Given`.
    """
    B, L, H, K = query_BLHK.shape
    G, S = key_BGSK.shape[1:3]
    query_BGXK = query_BLHK.swapaxes(1, 2).reshape(B, G, H // G * L, K)  # X: heads and queries
    scores_BGXS = jnp.einsum(
        "bgxk,bgsk->bgxs", query_BGXK, key_BGSK, preferred_element_type=jnp.float32
    )
    scores_BHLS = scores_BGXS.reshape(B, H, L, S)
    if slopes_H is not None:
        distance_BLS = (positions_BL[..., None] - jnp.arange(S)).astype(jnp.float32)
        scores_BHLS -= slopes_H[:, None, None] * distance_BLS[:, None]
    weights_BHLS = softmax(jnp.where(visible_BLS[:, None], scores_BHLS, MASKED))
    weights_BGXS = weights_BHLS.astype(value_BGSK.dtype).reshape(scores_BGXS.shape)
    heads_BGXK = jnp.einsum("bgxs,bgsk->bgxk", weights_BGXS, value_BGSK)
    return heads_BGXK.reshape(B, H, L, K).swapaxes(1, 2)


def block_size(length: int) -> int:
    """The largest multiple of LANES, up to LARGEST_BLOCK, that divides the length."""
    return max(size for size in range(LANES, LARGEST_BLOCK + 1, LANES) if length % size == 0)


def splash(
    query_BLHK: jax.Array,
    key_BSK: jax.Array,
    value_BSK: jax.Array,
    documents_BL: jax.Array | None,
    interpret: bool = False,
) -> jax.Array:
    """Attention [B, L, H, K] by the splash kernel; arguments as in `attention`."""
    _, length, num_heads, _ = query_BLHK.shape
    size = block_size(length)
    causal = splash_attention_mask.CausalMask((length, length))
    # Built anew in every trace: it holds arrays that belong to the trace.
    kernel = splash_attention_kernel.make_splash_mqa_single_device(
        splash_attention_mask.MultiHeadMask([causal] * num_heads),
        # The query's gradient has a kernel of its own, which adds in float32. The fused one
        # writes a copy of that gradient for each block of keys, rounded to the compute format.
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=size,
            block_kv=size,
            block_q_dkv=size,
            block_kv_dkv=size,
            block_q_dq=size,
            block_kv_dq=size,
        ),
        residual_checkpoint_name=KEPT,
        interpret=interpret,
    )
    segments = (
        None
        if documents_BL is None
        else splash_attention_kernel.SegmentIds(q=documents_BL, kv=documents_BL)
    )
    # The kernel takes one sequence, heads first.
    heads_BHLK = jax.vmap(kernel)(query_BLHK.swapaxes(1, 2), key_BSK, value_BSK, segments)
    return heads_BHLK.swapaxes(1, 2)


def attention(
    query_BLHK: jax.Array,
    key_BSK: jax.Array,
    value_BSK: jax.Array,
    given: Given = NOTHING,
    *,
    kind: Kind,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention [B, L, H, K], in the format of the inputs.

    Args:
      query_BLHK: the scale of the scores is already in it.
      key_BSK, value_BSK: in the query's format; one for all heads, or [B, S, G, K], each for
        H/G neighbouring heads.
      given: `splash` takes documents alone.
      kind: `splash` must run where all mesh axes are manual: XLA cannot cut a kernel.
      interpret: of `splash`: emulate the kernel, on any platform and slowly, for tests.
    """
    if key_BSK.ndim == 4:
        one = functools.partial(attention, kind=kind, interpret=interpret)
        return _by_group(one, query_BLHK, key_BSK, value_BSK, given)
    if kind == "splash":
        return splash(query_BLHK, key_BSK, value_BSK, given.documents_BL, interpret)
    visible_BLS = visible(given.documents_BL, query_BLHK.shape[1])
    arrays = query_BLHK, key_BSK, value_BSK, visible_BLS
    return _xla_and_scores(*arrays, given.slopes_H, given.kept_BHLS)[0]


def _by_group(
    one: collections.abc.Callable[..., Any],
    query_BLHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    given: Given,
) -> Any:
    """Attention by `one`, which knows one key and value, of each group; what it shows is [G]."""
    B, L, H, K = query_BLHK.shape
    G = key_BSGK.shape[2]
    documents_BL, slopes_H, kept_BHLS = given
    # J: heads of one group.
    slopes_GJ = None if slopes_H is None else slopes_H.reshape(G, H // G)
    kept_BGJLS = (
        None if kept_BHLS is None else kept_BHLS.reshape(B, G, H // G, *kept_BHLS.shape[2:])
    )
    places = (None, None if slopes_H is None else 0, None if kept_BHLS is None else 1)
    found = jax.vmap(lambda q, k, v, given: one(q, k, v, Given(*given)), in_axes=(2, 2, 2, places))(
        query_BLHK.reshape(B, L, G, H // G, K),
        key_BSGK,
        value_BSGK,
        (documents_BL, slopes_GJ, kept_BGJLS),
    )
    heads_GBLJK, *shown = found if isinstance(found, tuple) else (found,)
    heads_BLHK = jnp.moveaxis(heads_GBLJK, 0, 2).reshape(B, L, H, K)
    return (heads_BLHK, *shown) if shown else heads_BLHK


class Seen(NamedTuple):
    """What attention shows of itself on a microbatch; of this device's heads, f32[] each."""

    largest_logit: jax.Array  # of visible keys; `xla`: of all queries, else of the observed ones
    entropy: jax.Array  # in nats, summed over heads and observed queries


def observed_queries(length: int) -> np.ndarray:
    """Which queries are looked at, evenly spaced, the last one among them."""
    num = min(length, OBSERVED_QUERIES)
    return np.arange(1, num + 1) * length // num - 1


def observed(
    query_BLHK: jax.Array,
    key_BSK: jax.Array,
    value_BSK: jax.Array,
    given: Given = NOTHING,
    *,
    kind: Kind,
    interpret: bool = False,
) -> tuple[jax.Array, Seen]:
    """`attention`, and what it shows of itself; that is not differentiated.

    A few queries (Q) of the first sequence stand for all: the kernel shows no logits, and to go
    through them all once more would cost too much.
    """
    if key_BSK.ndim == 4:
        one = functools.partial(observed, kind=kind, interpret=interpret)
        heads_BLHK, seen = _by_group(one, query_BLHK, key_BSK, value_BSK, given)
        return heads_BLHK, Seen(jnp.max(seen.largest_logit), jnp.sum(seen.entropy))
    if kind == "splash":
        heads_BLHK = splash(query_BLHK, key_BSK, value_BSK, given.documents_BL, interpret)
    else:
        visible_BLS = visible(given.documents_BL, query_BLHK.shape[1])
        arrays = query_BLHK, key_BSK, value_BSK, visible_BLS
        heads_BLHK, scores_BHLS = _xla_and_scores(*arrays, given.slopes_H, given.kept_BHLS)
    query_LHK, key_SK = jax.lax.stop_gradient((query_BLHK[0], key_BSK[0]))
    L, H, K = query_LHK.shape
    queries_Q = observed_queries(L)
    scores_XS = jax.lax.dot_general(
        query_LHK[queries_Q].reshape(-1, K),  # X: queries and heads as one axis
        key_SK,
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    if given.slopes_H is not None:
        scores_HQS = scores_XS.reshape(-1, H, L).swapaxes(0, 1)
        scores_HQS = _with_distance(scores_HQS, given.slopes_H, queries_Q)
        scores_XS = scores_HQS.swapaxes(0, 1).reshape(-1, L)
    first_BL = None if given.documents_BL is None else given.documents_BL[:1]
    visible_XS = jnp.repeat(visible(first_BL, L)[0, queries_Q], H, axis=0)
    scores_XS = jnp.where(visible_XS, scores_XS, MASKED)
    peak_X = jnp.max(scores_XS, axis=-1)
    shifted_XS = scores_XS - peak_X[:, None]
    exponentials_XS = jnp.exp(shifted_XS)
    sum_X = jnp.sum(exponentials_XS, axis=-1)
    # Where a key is masked this is 0 x -1e30.
    mean_X = jnp.sum(exponentials_XS * shifted_XS, axis=-1) / sum_X
    if kind == "xla":
        peak_X = jnp.max(jax.lax.stop_gradient(scores_BHLS), axis=-1)
    # The maximum, written so that XLA does not make one search through all scores of this and
    # of the one by rows, which softmax has made already.
    largest_logit = -jnp.min(-peak_X)
    return heads_BLHK, Seen(largest_logit, jnp.sum(jnp.log(sum_X) - mean_X))


def check(kind: Kind, platform: str, sequence_length: int, head_size: int) -> None:
    """Refuse a kind of attention that cannot be computed.

    Raises:
      WrongInput: a size that the kernel cannot take.
      CannotDo: the kernel is for TPUs, and `platform` (of the mesh's devices) is another.
    """
    if kind != "splash":
        return
    if sequence_length % LANES:
        raise WrongInput(
            f"model.sequence_length={sequence_length} must be a multiple of {LANES} with "
            "model.attention=splash; change it, or set model.attention=xla"
        )
    if head_size > LARGEST_HEAD:
        raise WrongInput(
            f"model.head_size={head_size} must be at most {LARGEST_HEAD} with "
            "model.attention=splash; change it, or set model.attention=xla"
        )
    if platform != "tpu":
        raise CannotDo(
            f"model.attention=splash is a kernel for TPUs, and the devices here are {platform}; "
            "set model.attention=xla"
        )
