"""The decoder: PaLM's (PaLM, section 2), and what its settings make of it.

PaLM: parallel block, SwiGLU, multi-query attention, RoPE. Every other architecture is made of
the same small pieces (decoder/).

Training code sees two functions, `init` and `hidden`; parameters are a plain nested dict
whose names end in the letters of their axes:

  B batch   L length (queries)   S length (keys)   N layers (leading axis of stacked leaves)
  D model   H heads   G keys and values, each of H/G heads   K head size   F feed-forward
  V vocabulary, padded

A letter names a logical axis and never says how the axis is sharded; `sharding.py` has the
one table that does. Where tensor parallelism divides H, G, F, V and the width of the residual
stream (suffix `_BLd`: this device's part of D), a `split` says how parts meet; by default
nothing is divided. The loss owns the unembedding.
"""

from __future__ import annotations

import collections.abc
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from palm_jax import attention, config, rounding
from palm_jax.decoder import dropout, feed_forward, initial, positions
from palm_jax.decoder.embedding import embed, with_positions
from palm_jax.decoder.norms import normalise, normed
from palm_jax.decoder.split import UNDIVIDED, Split

Params = dict[str, Any]
# (name of a kernel's place, inputs [T, I], kernel [I, O]) -> [T, O].
Product = collections.abc.Callable[[str, jax.Array, jax.Array], jax.Array]


class Kept(NamedTuple):
    """What one layer keeps of the tokens so far, rotated and normed: a slot a position."""

    key_BGSK: jax.Array
    value_BGSK: jax.Array


class Behind(NamedTuple):
    """What lies behind the tokens that continue a text, and where they stand."""

    kept: Kept
    first_B: jax.Array  # i32: position of each row's first new token; the others follow it
    positions_BL: jax.Array  # i32, of all new ones
    visible_BLS: jax.Array  # bool: which slots they see


class Seen(NamedTuple):
    """What the layers show of themselves on a microbatch, of this device's part of each.

    Sums over the microbatch, but for the largest logit; none is differentiated.
    """

    residual: jax.Array  # f32[N + 1]: squares of the stream before each layer, and after the last
    branches: jax.Array  # f32[N]: squares of what each layer's branches add
    attention: attention.Seen  # f32[N]


def _sum_of_squares(x: jax.Array) -> jax.Array:
    x = jax.lax.stop_gradient(x).astype(jnp.float32)
    return jnp.sum(x * x)


def _plain_product(name: str, x_TI: jax.Array, w_IO: jax.Array) -> jax.Array:
    return x_TI @ w_IO


def _kept(x: jax.Array, settings: config.Model) -> jax.Array:
    """x, by a name that model.remat keeps. No other program has it: a name alone may move bits."""
    return checkpoint_name(x, attention.KEPT) if settings.remat == "attention" else x


def _raised(x: jax.Array, alpha: float, branch: jax.Array) -> jax.Array:
    """alpha x + branch, float32."""
    return alpha * x.astype(jnp.float32) + branch.astype(jnp.float32)


def _rows(table_SX: Any, positions_BL: jax.Array) -> jax.Array:
    """Rows of a table by position; past its end, where no token's stands, the last one."""
    return jnp.asarray(table_SX).at[positions_BL].get(mode="clip")


def _appended(kept_BGSK: jax.Array, new_BLGK: jax.Array, first_B: jax.Array) -> jax.Array:
    """What was kept, with new tokens from each row's slot `first` on."""
    new_BGLK = new_BLGK.swapaxes(1, 2)

    # Row by row, in place. XLA:CPU would copy all that is kept for a scatter, and for an update
    # outside of a loop, which it makes twice; so it must not see that one row is one turn.
    num_turns = len(first_B) + rounding.unknown_zero(first_B[0])

    def put(row: Any, kept_BGSK: jax.Array) -> jax.Array:
        new_1GLK = jax.lax.dynamic_slice_in_dim(new_BGLK, row, 1)
        return jax.lax.dynamic_update_slice(kept_BGSK, new_1GLK, (row, 0, first_B[row], 0))

    return jax.lax.fori_loop(0, num_turns, put, kept_BGSK)


class Block(nn.Module):
    """One layer.

    parallel   y = x + MLP(norm(x)) + Attention(norm(x)), with one shared norm
    serial     x' = x + Attention(norm(x));        y = x' + MLP(norm(x'))
    deepnorm   x' = norm(alpha x + Attention(x));  y = norm(alpha x' + MLP(x'))

    Suffix _T...: all tokens of the microbatch as one axis, because XLA:CPU runs two-dimensional
    products faster than the einsums they equal.
    """

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
        product: Product = _plain_product,
        key: jax.Array | None = None,
        behind: Behind | None = None,
    ) -> Any:
        """
        Args:
          key: of this layer's dropout; None: nothing is dropped.
          behind: given, the tokens continue others; then (y, Kept with them) is returned.
        """
        m = self.settings
        attend = functools.partial(
            self.attention,
            length=x_BLd.shape[1],
            documents_BL=documents_BL,
            product=product,
            key=key,
            behind=behind,
        )
        feed = functools.partial(self.feed_forward, product=product)
        if m.block == "parallel":
            both = self.tokens(self.norm("norm", x_BLd))  # made whole once for both
            attention_TD, beside = attend(*both)
            sum_TD = feed(both[1]) + attention_TD
            outputs = ("attention", "down")
            branches_BLd = self.branch(sum_TD, outputs, dropout.FEED_FORWARD, key, x_BLd.shape)
            y_BLd = x_BLd + branches_BLd
        elif m.block == "serial":
            attention_TD, beside = attend(*self.tokens(self.norm("attention_norm", x_BLd)))
            first_BLd = self.branch(
                attention_TD, ("attention",), dropout.ATTENTION, key, x_BLd.shape
            )
            between_BLd = x_BLd + first_BLd
            down_TD = feed(self.tokens(self.norm("feed_forward_norm", between_BLd))[1])
            second_BLd = self.branch(down_TD, ("down",), dropout.FEED_FORWARD, key, x_BLd.shape)
            branches_BLd, y_BLd = first_BLd + second_BLd, between_BLd + second_BLd
        else:
            alpha = initial.deepnorm_alpha(m.num_layers)
            attention_TD, beside = attend(*self.tokens(x_BLd))
            first_BLd = self.branch(
                attention_TD, ("attention",), dropout.ATTENTION, key, x_BLd.shape
            )
            between_BLd = self.norm("attention_norm", _raised(x_BLd, alpha, first_BLd))
            down_TD = feed(self.tokens(between_BLd)[1])
            second_BLd = self.branch(down_TD, ("down",), dropout.FEED_FORWARD, key, x_BLd.shape)
            y_BLd = self.norm("feed_forward_norm", _raised(between_BLd, alpha, second_BLd))
            branches_BLd = first_BLd + second_BLd
        if behind is not None:
            return y_BLd, beside
        if not self.observed:
            return y_BLd
        return y_BLd, Seen(_sum_of_squares(x_BLd), _sum_of_squares(branches_BLd), beside)

    def norm(self, name: str, x_BLd: jax.Array) -> jax.Array:
        """The norm `name`, in the compute format."""
        m = self.settings
        scale_D = self.param(f"{name}_scale_D", nn.initializers.zeros, (m.width,))
        bias_D = None
        if m.biases and m.norm == "layernorm":
            bias_D = self.param(f"{name}_bias_D", nn.initializers.zeros, (m.width,))
        return normed(x_BLd, m.norm, scale_D, bias_D, self.split).astype(self.dtype)

    def tokens(self, x_BLd: jax.Array) -> tuple[jax.Array, jax.Array]:
        """All tokens as one axis: this device's part of the stream [T, d], and the whole [T, D]."""
        x_Td = x_BLd.reshape(-1, x_BLd.shape[-1])
        return x_Td, _kept(self.split.whole(x_Td), self.settings)

    def kernel(self, name: str, letters: str, shape: tuple[int, ...], fans: tuple[int, int]) -> Any:
        """The kernel of the product `name`; `fans`: inputs and outputs on all devices."""
        values = initial.kernel(self.settings, name, *fans, self.zero)
        return self.param(f"w_{name}_{letters}", values, shape)

    def biased(self, name: str, letters: str, y_TO: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """`y` plus the bias of the product `name`, if there are biases.

        In float32, so that a bias's gradient is a float32 sum over tokens.
        """
        if not self.settings.biases:
            return y_TO
        bias = self.param(f"{name}_bias_{letters}", nn.initializers.zeros, shape)
        return (y_TO.astype(jnp.float32) + bias.reshape(-1)).astype(y_TO.dtype)

    def branch(
        self,
        partial_TD: jax.Array,
        products: tuple[str, ...],
        place: int,
        key: jax.Array | None,
        shape: tuple[int, ...],
    ) -> jax.Array:
        """What a branch adds to the stream, of shape [B, L, d].

        Args:
          partial_TD: this device's term of the branch's last products, `products`.
        """
        added_BLd = self.split.summed(partial_TD).reshape(shape)
        if self.settings.biases:
            zeros, shape = nn.initializers.zeros, (self.settings.width,)
            biases = [self.param(f"{name}_bias_D", zeros, shape) for name in products]
            wide_BLd = added_BLd.astype(jnp.float32) + self.split.part(
                functools.reduce(jnp.add, biases)
            )
            added_BLd = wide_BLd.astype(added_BLd.dtype)
        return dropout.dropped(added_BLd, self.settings.dropout, key, place, self.split)

    def attention(
        self,
        normed_Td: jax.Array,
        normed_TD: jax.Array,
        *,
        length: int,
        documents_BL: jax.Array | None,
        product: Product,
        key: jax.Array | None,
        behind: Behind | None,
    ) -> tuple[jax.Array, Any]:
        """This device's term of the attention's output [T, D], and beside it what is kept of
        a text that goes on, or what the attention shows if observed."""
        m, split = self.settings, self.split
        D, K = m.width, m.head_size
        H = m.num_heads // split.size  # those here
        T, L = normed_Td.shape[0], length
        B = T // L
        all_heads = m.num_heads * K
        w_query_DHK = self.kernel("query", "DHK", (D, H, K), (D, all_heads))
        query_TX = product("query", normed_TD, w_query_DHK.reshape(D, H * K))
        query_TX = self.biased("query", "HK", query_TX, (H, K))  # X: heads and their size
        query_BLHK = query_TX.reshape(B, L, H, K)
        if m.num_key_value_heads == 1:
            key_BSK, value_BSK = (
                self.shared(name, normed_Td).reshape(B, L, K) for name in ("key", "value")
            )
            groups = None
        else:
            groups = m.num_key_value_heads // split.size
            key_BSK, value_BSK = (
                self.grouped(name, normed_TD, product).reshape(B, L, groups, K)
                for name in ("key", "value")
            )
        w_attention_HKD = self.kernel("attention", "HKD", (H, K, D), (all_heads, D))

        query_BLHK, key_BSK = query_BLHK.astype(jnp.float32), key_BSK.astype(jnp.float32)
        if m.qk_norm:
            zeros = nn.initializers.zeros
            query_scale_K = self.param("query_norm_scale_K", zeros, (K,))
            key_scale_K = self.param("key_norm_scale_K", zeros, (K,))
            query_BLHK = normalise(query_BLHK, "layernorm") * (1.0 + query_scale_K)
            key_BSK = normalise(key_BSK, "layernorm") * (1.0 + key_scale_K)
        if m.positions == "rotary":
            cosine_LK: Any
            sine_LK: Any
            if behind is None:
                cosine_LK, sine_LK = positions.rotary_tables(L, K, m.rope_base)
            else:  # [B, L, K/2] both
                tables = positions.rotary_tables(m.sequence_length, K, m.rope_base)
                cosine_LK, sine_LK = (_rows(table, behind.positions_BL) for table in tables)
            by_head = cosine_LK[..., None, :], sine_LK[..., None, :]
            query_BLHK = positions.rotate(query_BLHK, by_head)
            key_BSK = positions.rotate(key_BSK, (cosine_LK, sine_LK) if groups is None else by_head)
        query_BLHK = query_BLHK * m.score_scale

        heads_H = split.index() * H + jnp.arange(H)
        slopes_H = jnp.asarray(positions.alibi_slopes(m.num_heads))[heads_H]
        if behind is not None:
            new_BLGK = (x.astype(self.dtype).reshape(B, L, -1, K) for x in (key_BSK, value_BSK))
            kept = Kept(
                *map(functools.partial(_appended, first_B=behind.first_B), behind.kept, new_BLGK)
            )
            heads_BLHK = attention.cached(
                query_BLHK.astype(self.dtype),
                *kept,
                behind.visible_BLS,
                behind.positions_BL,
                slopes_H if m.positions == "alibi" else None,
            )
            heads_TX = heads_BLHK.reshape(T, H * K)
            return product("attention", heads_TX, w_attention_HKD.reshape(H * K, D)), kept
        given = attention.Given(
            documents_BL,
            slopes_H if m.positions == "alibi" else None,
            dropout.kept_weights((B, L, L), heads_H, m.attention_dropout, key),
        )
        attend: Any = attention.observed if self.observed else attention.attention
        attend = functools.partial(attend, kind=m.attention)
        found = attend(query_BLHK.astype(self.dtype), key_BSK.astype(self.dtype), value_BSK, given)
        heads_BLHK, seen = found if self.observed else (found, None)
        heads_TX = heads_BLHK.reshape(T, H * K)
        if m.attention == "xla":  # splash names what it keeps, before it is turned
            heads_TX = _kept(heads_TX, m)
        return product("attention", heads_TX, w_attention_HKD.reshape(H * K, D)), seen

    def shared(self, name: str, normed_Td: jax.Array) -> jax.Array:
        """The one key or value of all heads [T, K]: computed once, each device a part of D."""
        D, K = self.settings.width, self.settings.head_size
        w_DK = self.kernel(name, "DK", (D, K), (D, K))
        y_TK = _kept(self.split.total(normed_Td @ self.split.part(w_DK)), self.settings)
        return self.biased(name, "K", y_TK, (K,))

    def grouped(self, name: str, normed_TD: jax.Array, product: Product) -> jax.Array:
        """Keys or values of this device's groups of heads, [T, G K]."""
        m = self.settings
        D, K, G = m.width, m.head_size, m.num_key_value_heads // self.split.size
        w_DGK = self.kernel(name, "DGK", (D, G, K), (D, m.num_key_value_heads * K))
        y_TX = product(name, normed_TD, w_DGK.reshape(D, G * K))
        return self.biased(name, "GK", y_TX, (G, K))

    def feed_forward(self, normed_TD: jax.Array, product: Product) -> jax.Array:
        """This device's term of the feed-forward's output, [T, D]."""
        m, split = self.settings, self.split
        D, F = m.width, m.feed_forward_size // split.size  # F: those here
        into, out = (D, m.feed_forward_size), (m.feed_forward_size, D)
        gate_TF = None
        if m.is_gated:
            gate_TF = product("gate", normed_TD, self.kernel("gate", "DF", (D, F), into))
            gate_TF = self.biased("gate", "F", gate_TF, (F,))
        up_TF = product("up", normed_TD, self.kernel("up", "DF", (D, F), into))
        up_TF = self.biased("up", "F", up_TF, (F,))
        inner_TF = feed_forward.activated(m.activation, gate_TF, up_TF)
        return product("down", inner_TF, self.kernel("down", "FD", (F, D), out))


def init(key: jax.Array, settings: config.Model, zero: jax.Array | int = 0) -> Params:
    """Float32 parameters; layers are stacked along a leading axis N.

    Args:
      zero: as in deviates.normal; 0 where bits may depend on how the arrays are cut.
    """
    key_embedding, key_unembedding, key_layers = jax.random.split(key, 3)
    m = settings
    V, D, L = m.padded_vocabulary_size, m.width, m.sequence_length
    # The kernel of splash wants a TPU and a mesh; shapes are the same without it.
    block = Block(m.model_copy(update={"attention": "xla"}), jnp.float32, zero=zero)
    x_BLD = jnp.zeros((1, L, D))

    def init_layer(key: jax.Array) -> Params:
        return dict(block.init(key, x_BLD, None)["params"])

    params: Params = {
        "embedding_VD": initial.table(key_embedding, (V, D), m, zero),
        "layers": jax.vmap(init_layer)(jax.random.split(key_layers, m.num_layers)),
    }
    if not m.tied_embedding:
        params["unembedding_VD"] = initial.table(key_unembedding, (V, D), m, zero)
    if m.positions == "learned":
        key_positions = jax.random.fold_in(key_embedding, 1)
        params["position_embedding_LD"] = initial.table(key_positions, (L, D), m, zero)
    if m.embedding_norm:
        params["embedding_norm_scale_D"] = jnp.zeros(D)
        params["embedding_norm_bias_D"] = jnp.zeros(D)
    if m.final_norm_scale:
        params["final_norm_scale_D"] = jnp.zeros(D)
        if m.biases and m.norm == "layernorm":
            params["final_norm_bias_D"] = jnp.zeros(D)
    return params


# What a layer's backward pass finds as it was. All else it computes again, and gathers again: kept
# kernels of N layers would be the whole model on each device.
_REMAT_POLICIES: dict[str, Any] = {
    "attention": jax.checkpoint_policies.save_only_these_names(attention.KEPT),
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
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
    key: jax.Array | None = None,
) -> jax.Array:
    """The residual stream after the last layer and the final norm, [B, L, d].

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
      key: of the microbatch's dropout (decoder/dropout.py); None: nothing is dropped.
    """
    shared = settings, dtype, documents_BL, gather_layer, layer_product, split, key
    return _hidden(params, ids_BL, *shared, observed=False)[0]


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
    key: jax.Array | None = None,
) -> tuple[jax.Array, Seen]:
    """`hidden`, and what the layers show of themselves."""
    shared = settings, dtype, documents_BL, gather_layer, layer_product, split, key
    found, seen = _hidden(params, ids_BL, *shared, observed=True)
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
    key: jax.Array | None,
    observed: bool,
) -> tuple[jax.Array, Seen | None]:
    m = settings
    block = Block(m, dtype, split, observed=observed)

    # A plain scan rather than Linen's lifted one: the gather and its own backward rule sit
    # visibly inside it, and compile time does not grow with depth.
    def layer(x_BLd: jax.Array, this: tuple[Any, Any]) -> tuple[jax.Array, Seen | None]:
        stored, number = this
        multiply = layer_product(stored) or _plain_product

        def product(name: str, x_TI: jax.Array, w_IO: jax.Array) -> jax.Array:
            return _kept(multiply(name, x_TI, w_IO), m)

        layer_key = None if key is None else jax.random.fold_in(key, number)
        params = {"params": gather_layer(stored)}
        found: Any = block.apply(params, x_BLd, documents_BL, product, layer_key)
        return found if observed else (found, None)

    if m.remat in _REMAT_POLICIES:
        layer = jax.checkpoint(layer, policy=_REMAT_POLICIES[m.remat], prevent_cse=False)
    x_BLd = _embedded(params, ids_BL, m, split, key)
    numbers = None if key is None else jnp.arange(m.num_layers)
    x_BLd, seen = jax.lax.scan(layer, x_BLd, (params["layers"], numbers))
    if seen is not None:
        last = _sum_of_squares(x_BLd)
        seen = seen._replace(residual=jnp.append(seen.residual, last))
    return _finished(params, x_BLd, m, split).astype(dtype), seen


def continued(
    params: Params,
    ids_BL: jax.Array,
    kept: tuple[Kept, ...],
    first_B: jax.Array,
    *,
    settings: config.Model,
    dtype: jnp.dtype,
    documents_BS: jax.Array | None = None,
    gather_layer: collections.abc.Callable[[Any], Params] = lambda layer: layer,
    product: Product = _plain_product,
    split: Split = UNDIVIDED,
) -> tuple[jax.Array, tuple[Kept, ...]]:
    """`hidden` of tokens that continue those whose keys and values are kept.

    Args:
      params: as of `hidden`, but `layers` a tuple of one tree a layer: XLA would copy each slice
        of stacked ones, and reading parameters is most of the work.
      ids_BL: each row's next tokens.
      kept: from `nothing_kept`, or from the call before. It is not looked at beyond a row's
        tokens so far.
      first_B: i32, how many tokens each row has so far; with the new ones at most as many as
        there are slots.
      documents_BS: numbers of documents as from attention.document_numbers, of all slots.
    Returns:
      [B, L, d], and `kept` with the new tokens.
    """
    m = settings
    L, S = ids_BL.shape[1], kept[0].key_BGSK.shape[2]
    positions_BL = first_B[:, None] + jnp.arange(L)
    visible_BLS = jnp.arange(S) <= positions_BL[..., None]
    if documents_BS is not None:
        own_BL = jnp.take_along_axis(documents_BS, positions_BL, axis=1)
        visible_BLS &= documents_BS[:, None] == own_BL[..., None]
    block = Block(m, dtype, split)
    x_BLd = _embedded(params, ids_BL, m, split, None, positions_BL)
    keeps = []
    for stored, kept_of_layer in zip(params["layers"], kept, strict=True):
        behind = Behind(kept_of_layer, first_B, positions_BL, visible_BLS)
        layer = {"params": gather_layer(stored)}
        found: Any = block.apply(layer, x_BLd, None, product, None, behind)
        x_BLd, keeps_of_layer = found
        keeps.append(keeps_of_layer)
    return _finished(params, x_BLd, m, split).astype(dtype), tuple(keeps)


def nothing_kept(
    settings: config.Model,
    dtype: jnp.dtype,
    num_rows: int,
    num_slots: int,
    split: Split = UNDIVIDED,
) -> tuple[Kept, ...]:
    """Room for the keys and values of `num_slots` tokens of each row: those that there are.

    That is one of each where all heads share them (PaLM, section 2), and one a group of heads
    otherwise; of this device's groups.
    """
    G = settings.num_key_value_heads
    groups = G if G == 1 else G // split.size
    shape = num_rows, groups, num_slots, settings.head_size
    return tuple(
        Kept(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(settings.num_layers)
    )


def _embedded(
    params: Params,
    ids_BL: jax.Array,
    m: config.Model,
    split: Split,
    key: jax.Array | None,
    positions_BL: jax.Array | None = None,
) -> jax.Array:
    """What enters the first layer, [B, L, d].

    Args:
      positions_BL: of the tokens; None: rows begin at 0.
    """
    x_BLd = embed(params["embedding_VD"], ids_BL, split)
    if m.embedding_scale != 1:
        x_BLd = x_BLd * m.embedding_scale
    if m.positions == "learned":
        table_LD = params["position_embedding_LD"]
        if positions_BL is not None:
            table_LD = _rows(table_LD, positions_BL)
        x_BLd = with_positions(x_BLd, table_LD, split)
    if m.embedding_norm:
        given = params["embedding_norm_scale_D"], params["embedding_norm_bias_D"]
        x_BLd = normed(x_BLd, "layernorm", *given, split).astype(x_BLd.dtype)
    return dropout.dropped(x_BLd, m.embedding_dropout, key, dropout.EMBEDDING, split)


def _finished(params: Params, x_BLd: jax.Array, m: config.Model, split: Split) -> jax.Array:
    """The norm before the logits, f32[B, L, d]; PaLM's has no scale."""
    if m.block == "deepnorm":
        return x_BLd.astype(jnp.float32)
    if not m.final_norm_scale:
        return normalise(x_BLd, m.norm, split)
    bias_D = params.get("final_norm_bias_D")
    return normed(x_BLd, m.norm, params["final_norm_scale_D"], bias_D, split)


def unembedding(params: Params) -> jax.Array:
    """The table [V, D] that turns hidden states into logits; the part of V that is here."""
    return params["unembedding_VD" if "unembedding_VD" in params else "embedding_VD"]
