"""PaLM's decoder (PaLM, section 2): parallel block, SwiGLU, multi-query attention, RoPE.

Training code sees two functions, `init` and `hidden`; parameters are a plain nested dict
whose names end in the letters of their axes:

  B batch   L length (queries)   S length (keys)   N layers (leading axis of stacked leaves)
  D model   H heads   K head size   F feed-forward   V vocabulary, padded

A letter names a logical axis and never says how the axis is sharded; `sharding.py` has the
one table that does. Where tensor parallelism divides H, F, V and the width of the residual
stream (suffix `_BLd`: this device's part of D), a `split` says how parts meet; by default
nothing is divided. The loss owns the unembedding.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from palm_jax import attention, config, deviates

Params = dict[str, Any]
# (name of a kernel's place, inputs [T, I], kernel [I, O]) -> [T, O].
Product = collections.abc.Callable[[str, jax.Array, jax.Array], jax.Array]


class Split(Protocol):
    """How the devices that share one model's heads, feed-forward and vocabulary work together."""

    @property
    def size(self) -> int:
        """Into how many parts those axes are cut."""

    def index(self) -> Any:
        """Which part is here."""

    def whole(self, x: jax.Array) -> jax.Array:
        """[..., d] -> [..., D]: each device's part of the last axis."""

    def summed(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., d]: the sum over devices, of which each keeps its part."""

    def total(self, x: jax.Array) -> jax.Array:
        """The sum over devices, on all of them."""

    def maximum(self, x: jax.Array) -> jax.Array:
        """The maximum over devices; not differentiated."""

    def part(self, x: jax.Array) -> jax.Array:
        """[D, ...] -> [d, ...]: this device's part of what all have."""


@dataclasses.dataclass(frozen=True)
class Undivided:
    """One device has all of it."""

    size: int = 1

    def index(self) -> int:
        return 0

    def whole(self, x: jax.Array) -> jax.Array:
        return x

    summed = total = maximum = part = whole


UNDIVIDED = Undivided()


EPSILON = 1e-6  # of the norms, as in the authors' inference code


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

    Source: RoFormer, section 3.2; half-split as in the authors' inference code.
    """
    cosine, sine = tables
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )


def _kernel(num_inputs: int, zero: jax.Array | int) -> nn.initializers.Initializer:
    """N(0, 1/num_inputs), neither truncated nor averaged with the outputs (PaLM, section 2)."""

    def initial(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
        return (deviates.normal(key, shape, zero) * num_inputs**-0.5).astype(dtype)

    return initial


class Seen(NamedTuple):
    """What the layers show of themselves on a microbatch, of this device's part of each.

    Sums over the microbatch, but for the largest logit; none is differentiated.
    """

    residual: jax.Array  # f32[N + 1]: squares of the stream before each layer, and after the last
    branches: jax.Array  # f32[N]: squares of what each layer adds to it
    attention: attention.Seen  # f32[N]


def _sum_of_squares(x: jax.Array) -> jax.Array:
    x = jax.lax.stop_gradient(x).astype(jnp.float32)
    return jnp.sum(x * x)


class Block(nn.Module):
    """One layer: y = x + MLP(norm(x)) + Attention(norm(x)), with one shared norm."""

    settings: config.Model
    dtype: Any
    split: Split = UNDIVIDED
    zero: Any = 0  # of `init`: as in deviates.normal
    observed: bool = False  # return (y, Seen of this layer, `residual` being x's), instead of y

    @nn.compact
    def __call__(
        self,
        x_BLd: jax.Array,
        documents_BL: jax.Array | None,
        product: Product = lambda name, x_TI, w_IO: x_TI @ w_IO,
    ) -> Any:
        m, split = self.settings, self.split
        D, K = m.width, m.head_size
        H, F = m.num_heads // split.size, m.feed_forward_size // split.size  # those here
        B, L, d = x_BLd.shape
        T = B * L
        zeros, param, zero = nn.initializers.zeros, self.param, self.zero
        norm_scale_D = param("norm_scale_D", zeros, (D,))
        w_query_DHK = param("w_query_DHK", _kernel(D, zero), (D, H, K))
        w_key_DK = param("w_key_DK", _kernel(D, zero), (D, K))
        w_value_DK = param("w_value_DK", _kernel(D, zero), (D, K))
        w_attention_HKD = param("w_attention_HKD", _kernel(m.num_heads * K, zero), (H, K, D))
        w_gate_DF = param("w_gate_DF", _kernel(D, zero), (D, F))
        w_up_DF = param("w_up_DF", _kernel(D, zero), (D, F))
        w_down_FD = param("w_down_FD", _kernel(m.feed_forward_size, zero), (F, D))

        # Scales are stored around zero, so that weight decay pulls them to one.
        scale_d = 1.0 + split.part(norm_scale_D)
        # Two-dimensional products: XLA:CPU runs them faster than the einsums they equal.
        normed_Td = (normalise(x_BLd, m.norm, split) * scale_d).astype(self.dtype).reshape(T, d)
        normed_TD = split.whole(normed_Td)
        query_THK = product("query", normed_TD, w_query_DHK.reshape(D, H * K))
        query_BLHK = query_THK.reshape(B, L, H, K)
        # All heads share one key and one value: computed once, each device a part of D.
        key_BSK = split.total(normed_Td @ split.part(w_key_DK)).reshape(B, L, K)
        value_BSK = split.total(normed_Td @ split.part(w_value_DK)).reshape(B, L, K)
        gate_TF = product("gate", normed_TD, w_gate_DF).astype(jnp.float32)
        gate_TF = nn.silu(gate_TF).astype(self.dtype)
        up_TF = product("up", normed_TD, w_up_DF)
        feed_forward_TD = product("down", gate_TF * up_TF, w_down_FD)

        query_BLHK, key_BSK = query_BLHK.astype(jnp.float32), key_BSK.astype(jnp.float32)
        if m.qk_norm:
            query_scale_K = param("query_norm_scale_K", zeros, (K,))
            key_scale_K = param("key_norm_scale_K", zeros, (K,))
            query_BLHK = normalise(query_BLHK, "layernorm") * (1.0 + query_scale_K)
            key_BSK = normalise(key_BSK, "layernorm") * (1.0 + key_scale_K)
        cosine_LK, sine_LK = rotary_tables(L, K, m.rope_base)
        query_BLHK = rotate(query_BLHK, (cosine_LK[:, None], sine_LK[:, None])) * K**-0.5
        key_BSK = rotate(key_BSK, (cosine_LK, sine_LK))

        attend: Any = attention.observed if self.observed else attention.attention
        attend = functools.partial(attend, kind=m.attention)
        if m.remat == "attention" and m.attention == "xla":  # splash keeps no scores
            attend = jax.checkpoint(attend)
        heads_BLHK = attend(
            query_BLHK.astype(self.dtype), key_BSK.astype(self.dtype), value_BSK, documents_BL
        )
        if self.observed:
            heads_BLHK, seen = heads_BLHK
        heads_TX = heads_BLHK.reshape(T, H * K)  # X: heads and their size as one axis
        attention_TD = product("attention", heads_TX, w_attention_HKD.reshape(H * K, D))
        branches_BLd = split.summed(feed_forward_TD + attention_TD).reshape(B, L, d)
        y_BLd = x_BLd + branches_BLd
        if not self.observed:
            return y_BLd
        return y_BLd, Seen(_sum_of_squares(x_BLd), _sum_of_squares(branches_BLd), seen)


def init(key: jax.Array, settings: config.Model, zero: jax.Array | int = 0) -> Params:
    """Float32 parameters; layers are stacked along a leading axis N.

    The embedding is N(0, 1) and enters unscaled; the logits are multiplied by 1/sqrt(D).

    Args:
      zero: as in deviates.normal; 0 where bits may depend on how the arrays are cut.
    """
    key_embedding, key_unembedding, key_layers = jax.random.split(key, 3)
    V, D, L = settings.padded_vocabulary_size, settings.width, settings.sequence_length
    # The kernel of splash wants a TPU and a mesh; shapes are the same without it.
    block = Block(settings.model_copy(update={"attention": "xla"}), jnp.float32, zero=zero)
    x_BLD = jnp.zeros((1, L, D))

    def init_layer(key: jax.Array) -> Params:
        return dict(block.init(key, x_BLD, None)["params"])

    params: Params = {
        "embedding_VD": deviates.normal(key_embedding, (V, D), zero),
        "layers": jax.vmap(init_layer)(jax.random.split(key_layers, settings.num_layers)),
    }
    if not settings.tied_embedding:
        params["unembedding_VD"] = deviates.normal(key_unembedding, (V, D), zero)
    return params


_REMAT_POLICIES: dict[str, Any] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def hidden(
    params: Params,
    ids_BL: jax.Array,
    *,
    settings: config.Model,
    dtype: jnp.dtype,
    documents_BL: jax.Array | None = None,
    gather_layer: collections.abc.Callable[[Any], Params] = lambda layer: layer,
    layer_product: collections.abc.Callable[[Any], Product | None] = lambda layer: None,
    split: Split = UNDIVIDED,
) -> jax.Array:
    """The residual stream after the last layer and the final, scale-less norm, [B, L, d].

    Args:
      params: as from `init`, heads, feed-forward and vocabulary as `split` cuts them;
        top-level leaves whole along D and in their compute format, `layers` as
        `gather_layer` wants them.
      ids_BL: token ids, below the vocabulary size.
      documents_BL: as from attention.document_numbers; given, a token sees its own document only.
      gather_layer: turns one layer's stored parameters into the whole ones in their compute
        format. It is called inside the scan, so that only one layer is whole at a time.
      layer_product: how a layer multiplies by its large kernels, from the same; None: in the
        compute format.
    """
    return _hidden(
        params, ids_BL, settings, dtype, documents_BL, gather_layer, layer_product, split, False
    )[0]


def observed_hidden(
    params: Params,
    ids_BL: jax.Array,
    *,
    settings: config.Model,
    dtype: jnp.dtype,
    documents_BL: jax.Array | None = None,
    gather_layer: collections.abc.Callable[[Any], Params] = lambda layer: layer,
    layer_product: collections.abc.Callable[[Any], Product | None] = lambda layer: None,
    split: Split = UNDIVIDED,
) -> tuple[jax.Array, Seen]:
    """`hidden`, and what the layers show of themselves."""
    found, seen = _hidden(
        params, ids_BL, settings, dtype, documents_BL, gather_layer, layer_product, split, True
    )
    assert seen is not None
    return found, seen


def _hidden(
    params: Params,
    ids_BL: jax.Array,
    settings: config.Model,
    dtype: jnp.dtype,
    documents_BL: jax.Array | None,
    gather_layer: collections.abc.Callable[[Any], Params],
    layer_product: collections.abc.Callable[[Any], Product | None],
    split: Split,
    observed: bool,
) -> tuple[jax.Array, Seen | None]:
    block = Block(settings, dtype, split, observed=observed)

    # A plain scan rather than Linen's lifted one: the gather and its own backward rule sit
    # visibly inside it, and compile time does not grow with depth.
    def layer(x_BLd: jax.Array, stored: Any) -> tuple[jax.Array, Seen | None]:
        product = layer_product(stored)
        given = (x_BLd, documents_BL) if product is None else (x_BLd, documents_BL, product)
        found: Any = block.apply({"params": gather_layer(stored)}, *given)
        return found if observed else (found, None)

    if settings.remat in _REMAT_POLICIES:
        layer = jax.checkpoint(layer, policy=_REMAT_POLICIES[settings.remat], prevent_cse=False)
    x_BLd = embed(params["embedding_VD"], ids_BL, split)
    x_BLd, seen = jax.lax.scan(layer, x_BLd, params["layers"])
    if seen is not None:
        last = _sum_of_squares(x_BLd)
        seen = seen._replace(residual=jnp.append(seen.residual, last))
    return normalise(x_BLd, settings.norm, split).astype(dtype), seen


def unembedding(params: Params) -> jax.Array:
    """The table [V, D] that turns hidden states into logits; the part of V that is here."""
    return params["unembedding_VD" if "unembedding_VD" in params else "embedding_VD"]
