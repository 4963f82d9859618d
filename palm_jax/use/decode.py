"""The compiled part of generation: a prompt read in chunks, then a token at a time in one loop.

A microbatch of rows on each data-parallel device is computed together, always of one shape, with
room for a whole context. So what a row computes depends neither on its neighbours, nor on how
many rows there are, nor on how many devices share them out: bits included.

Letters as in model.py, and: R rows of a whole pass, B those of one device, S slots, one a
position. Tokens beyond a row's length are padding: they are computed with the others, and
overwritten before anything sees them.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from palm_jax import attention, config, loss, model, precision, reductions, sharding
from palm_jax.step import gathered, split_of
from palm_jax.use import sample

CHUNK = 64  # tokens of a prompt that are read at once

Weights = dict[str, Any]  # parameters in their compute format; `layers` a tuple, one tree a layer


class Rows(NamedTuple):
    """What a pass of rows begins with; made by `Decoder.rows`."""

    tokens_RS: jax.Array  # i32: prompts, then padding
    lengths_R: jax.Array  # i32: of the prompts, one token at least
    limits_R: jax.Array  # i32: lengths at which rows end at the latest
    rows_R: jax.Array  # i32: numbers among all rows, which their noise depends on


@flax.struct.dataclass
class Text:
    """Rows on their way."""

    tokens_RS: jax.Array  # i32: prompt, what was generated, padding
    logprobs_RS: jax.Array  # f32: of generated tokens under the model itself, in nats
    lengths_R: jax.Array  # i32: tokens so far
    limits_R: jax.Array
    rows_R: jax.Array
    ended_R: jax.Array  # bool
    kept: tuple[model.Kept, ...]  # by layer; of all tokens but the last


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The functions of one model on one mesh, compiled when first called."""

    settings: config.Config
    mesh: jax.sharding.Mesh
    num_rows: int  # of a pass
    num_slots: int
    # (parameters as a train state has them) -> Weights
    weights: collections.abc.Callable[[model.Params], Weights]
    # (weights, rows) -> text with all but the prompts' last tokens in its cache
    read: collections.abc.Callable[[Weights, Rows], Text]
    # (weights, text, draw, most tokens to add, is_greedy=, is_filtered=) -> text, which is donated
    advance: Any

    @property
    def context(self) -> int:
        """The longest text that the model can read; it can say one token more."""
        return self.settings.model.sequence_length

    @property
    def cache_bytes(self) -> int:
        """Of the keys and values of a pass's rows, wherever they lie; copies are not counted."""
        m = self.settings.model
        dtype = precision.compute_dtype(self.settings.precision)
        kept = jax.eval_shape(lambda: model.nothing_kept(m, dtype, self.num_rows, self.num_slots))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))

    def rows(
        self,
        prompts: collections.abc.Sequence[np.ndarray],
        most_tokens: collections.abc.Sequence[int],
        first_row: int = 0,
    ) -> Rows:
        """A pass of prompts, each of one token at least; missing ones are filled up.

        Args:
          most_tokens: of each row, to be generated.
          first_row: number of the first prompt among all.
        """
        R, S = self.num_rows, self.num_slots
        assert len(prompts) <= R
        tokens_RS = np.zeros((R, S), np.int32)
        lengths_R, limits_R = np.ones(R, np.int32), np.ones(R, np.int32)
        for number, (prompt, most) in enumerate(zip(prompts, most_tokens, strict=True)):
            assert 0 < len(prompt) <= self.context
            assert len(prompt) + most <= self.context + 1
            tokens_RS[number, : len(prompt)] = prompt
            lengths_R[number], limits_R[number] = len(prompt), len(prompt) + most
        rows_R = np.arange(first_row, first_row + R, dtype=np.int32)
        place = NamedSharding(self.mesh, PartitionSpec(sharding.DATA_PARALLEL))
        return Rows(*jax.device_put((tokens_RS, lengths_R, limits_R, rows_R), place))


def slots(context: int) -> int:
    """Room for a context and the token after it, in whole chunks."""
    chunk = min(CHUNK, context)
    return -(-(context + 1) // chunk) * chunk


def make_decoder(
    settings: config.Config,
    mesh: jax.sharding.Mesh,
    end_of_document: int,
    microbatch: int | None = None,
) -> Decoder:
    """Prepare (without compiling) what generates.

    Args:
      end_of_document: with it a row ends.
      microbatch: rows that a device computes together; None: numerics.microbatch.
    """
    m = settings.model
    dtype = precision.compute_dtype(settings.precision)
    order = reductions.order_of(settings.numerics)
    rows_here = settings.numerics.microbatch if microbatch is None else microbatch
    num_slots, chunk = slots(m.sequence_length), min(CHUNK, m.sequence_length)
    layout = _layout(settings)

    def whole(weights: Weights) -> Weights:
        """All but the layers, made whole before a loop; a layer is made whole where it is used."""
        top = {name: x for name, x in weights.items() if name != "layers"}
        return {**gathered(top, None, dtype, order), "layers": weights["layers"]}

    def continued(weights: Weights, ids_BL: Any, text: Text, first_B: Any) -> Any:
        documents_BS = (
            attention.document_numbers(text.tokens_RS, end_of_document)
            if m.isolate_documents
            else None
        )
        return model.continued(
            weights,
            ids_BL,
            text.kept,
            first_B,
            settings=m,
            dtype=dtype,
            documents_BS=documents_BS,
            gather_layer=lambda stored: gathered(stored, None, dtype, order),
            split=split_of(settings),
        )

    def read(weights: Weights, rows: Rows) -> Text:
        split, weights = split_of(settings), whole(weights)
        text = Text(
            tokens_RS=rows.tokens_RS,
            logprobs_RS=jnp.zeros(rows.tokens_RS.shape, jnp.float32),
            lengths_R=rows.lengths_R,
            limits_R=rows.limits_R,
            rows_R=rows.rows_R,
            ended_R=rows.lengths_R >= rows.limits_R,
            kept=model.nothing_kept(m, dtype, rows_here, num_slots, split),
        )

        def read_chunk(number: jax.Array, kept: Any) -> Any:
            first = number * chunk
            ids_BL = jax.lax.dynamic_slice_in_dim(text.tokens_RS, first, chunk, axis=1)
            first_B = jnp.full(ids_BL.shape[0], first)
            return continued(weights, ids_BL, text.replace(kept=kept), first_B)[1]  # type: ignore[attr-defined]

        longest = _everywhere(jnp.max(rows.lengths_R))
        num_chunks = (longest - 1 + chunk - 1) // chunk  # the last token is the first to go on from
        kept = jax.lax.fori_loop(0, num_chunks, read_chunk, text.kept)
        return text.replace(kept=kept)  # type: ignore[attr-defined,no-any-return]

    def advance(
        weights: Weights,
        text: Text,
        draw: sample.Draw,
        most: jax.Array,
        *,
        is_greedy: bool,
        is_filtered: bool,
    ) -> Text:
        split, weights = split_of(settings), whole(weights)
        each_B = jnp.arange(text.lengths_R.shape[0])

        def one_token(text: Text) -> Text:
            last_B = text.lengths_R - 1
            ids_B1 = text.tokens_RS[each_B, last_B][:, None]
            hidden_B1d, kept = continued(weights, ids_B1, text, last_B)
            scores_B1V = loss.logits(
                split.whole(hidden_B1d),
                model.unembedding(weights),
                m.vocabulary_size,
                split,
                m.output_scale,
            )
            scores_BV = split.whole(scores_B1V[:, 0])
            chosen_B = sample.tokens(
                scores_BV,
                text.rows_R,
                text.lengths_R,
                draw,
                is_greedy=is_greedy,
                is_filtered=is_filtered,
            )
            logprobs_B = jax.nn.log_softmax(scores_BV)[each_B, chosen_B]
            # An ended row computes along; what it writes beyond its length is padding.
            slot_B = text.lengths_R
            lengths_B = text.lengths_R + ~text.ended_R
            return text.replace(  # type: ignore[attr-defined,no-any-return]
                tokens_RS=text.tokens_RS.at[each_B, slot_B].set(chosen_B, mode="drop"),
                logprobs_RS=text.logprobs_RS.at[each_B, slot_B].set(logprobs_B, mode="drop"),
                lengths_R=lengths_B,
                ended_R=text.ended_R | (chosen_B == end_of_document) | (lengths_B >= text.limits_R),
                kept=kept,
            )

        def body(carry: Any) -> Any:
            number, _, text = carry
            text = one_token(text)
            return number + 1, _everywhere(jnp.any(~text.ended_R)), text

        going = _everywhere(jnp.any(~text.ended_R))
        start = jnp.int32(0), going, text
        return jax.lax.while_loop(lambda c: (c[0] < most) & c[1], body, start)[2]  # type: ignore[no-any-return]

    by_row = PartitionSpec(sharding.DATA_PARALLEL)
    groups = None if m.num_key_value_heads == 1 else sharding.RULES["G"]
    kept_spec = PartitionSpec(sharding.DATA_PARALLEL, groups)
    text_spec = Text(by_row, by_row, by_row, by_row, by_row, by_row, kept_spec)  # type: ignore[arg-type]
    on_mesh = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    options = precision.compiler_options(mesh.devices.flat[0].platform, settings.numerics.reduction)

    @functools.partial(
        jax.jit,
        donate_argnums=1,
        static_argnames=("is_greedy", "is_filtered"),
        compiler_options=options,
    )
    def advance_on_mesh(
        weights: Weights, text: Text, draw: Any, most: Any, *, is_greedy: bool, is_filtered: bool
    ) -> Text:
        how = functools.partial(advance, is_greedy=is_greedy, is_filtered=is_filtered)
        return on_mesh(  # type: ignore[no-any-return]
            how, in_specs=(layout, text_spec, PartitionSpec(), PartitionSpec()), out_specs=text_spec
        )(weights, text, draw, most)

    return Decoder(
        settings=settings,
        mesh=mesh,
        num_rows=rows_here * settings.mesh.data_parallel,
        num_slots=num_slots,
        weights=jax.jit(
            functools.partial(_unstacked, dtype=dtype),
            out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), layout),
        ),
        read=jax.jit(
            on_mesh(read, in_specs=(layout, by_row), out_specs=text_spec), compiler_options=options
        ),
        advance=advance_on_mesh,
    )


def _everywhere(x: jax.Array) -> jax.Array:
    """The maximum over all devices, which must go round a loop as often as each other."""
    axes = (*sharding.DATA_PARALLEL, "tensor")
    return x if jax.lax.axis_size(axes) == 1 else jax.lax.pmax(x, axes)


def _unstacked(params: model.Params, dtype: Any) -> Weights:
    """Parameters in their compute format, each layer's by themselves."""
    narrow = {
        name: x.astype(precision.parameter_compute_dtype(name, dtype))
        for name, x in params.items()
        if name != "layers"
    }
    stacked = params["layers"]
    num_layers = len(next(iter(stacked.values())))
    return {
        **narrow,
        "layers": tuple(
            {
                name: x[number].astype(precision.parameter_compute_dtype(name, dtype))
                for name, x in stacked.items()
            }
            for number in range(num_layers)
        ),
    }


def _layout(settings: config.Config) -> Any:
    """How `Weights` are cut."""
    # The kernel of splash wants a TPU; parameters are the same without it.
    m = settings.model.model_copy(update={"attention": "xla"})
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), m))
    specs = jax.tree_util.tree_map_with_path(sharding.partition_spec, shapes)
    # A layer has all axes of its stacked leaf but the first.
    of_layer = {name: PartitionSpec(*spec[1:]) for name, spec in specs["layers"].items()}
    return {**specs, "layers": (of_layer,) * m.num_layers}
