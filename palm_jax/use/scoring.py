"""What a model says of each target of given sequences: its cross-entropy, and the greedy token.

The sums by sequence are computed as training's own evaluation computes them (`Program.losses`).
Letters as in model.py.
"""

from __future__ import annotations

import collections.abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import PartitionSpec

from palm_jax import loss, model, precision, sharding
from palm_jax import step as stepping
from palm_jax.decoder.split import Split


class Scores(NamedTuple):
    """Of some sequences, each with L targets."""

    targets_BL: npt.NDArray[np.int32]
    nats_BL: npt.NDArray[np.float32]  # cross-entropy of each target
    greedy_BL: npt.NDArray[np.int32]  # the token of the largest logit; the lowest id of several
    nats_B: npt.NDArray[np.float32]  # each sequence's sum, in the order of training's evaluation


class _OnDevice(NamedTuple):
    targets_BL: jax.Array
    cross_entropy_BL: jax.Array
    greedy_BL: jax.Array
    sums_B: loss.LossSums


@dataclasses.dataclass(frozen=True)
class Scorer:
    """Scores sequences with the program of some settings, compiled when first called."""

    program: stepping.Program
    _call: Any

    @property
    def at_once(self) -> int:
        """How many sequences are scored together."""
        numerics = self.program.settings.numerics
        return numerics.lanes * numerics.microbatch

    def __call__(
        self,
        params: model.Params,
        num_sequences: int,
        read: collections.abc.Callable[[npt.NDArray[np.int64]], npt.NDArray[np.integer]],
    ) -> collections.abc.Iterator[tuple[range, Scores]]:
        """Every sequence once, in order; the last, partial batch counts like the others.

        With several processes, all of them go through this together, and all see all scores.

        Args:
          params: on the program's mesh.
          read: from ids of sequences to their tokens, [ids, L+1].
        """
        size = self.at_once
        rows = self.program.rows_here(size)
        length = self.program.settings.model.sequence_length
        for first in range(0, num_sequences, size):
            ids = first + rows
            counted = ids < num_sequences
            tokens = np.zeros((len(rows), length + 1), np.int32)
            tokens[counted] = read(ids[counted])
            found = self._call(params, self.program.put(tokens), self.program.put(counted))
            own = range(first, min(first + size, num_sequences))
            by_sequence = [
                np.asarray(array).reshape(size, *array.shape[3:])[: len(own)]
                for array in (
                    found.targets_BL,
                    found.cross_entropy_BL,
                    found.greedy_BL,
                    found.sums_B.cross_entropy,
                )
            ]
            yield own, Scores(*by_sequence)


def make_scorer(program: stepping.Program, end_of_document: int) -> Scorer:
    """
    Args:
      end_of_document: as of make_program.
    """
    settings = program.settings

    def one_pass(params: model.Params, rows: tuple[jax.Array, jax.Array]) -> _OnDevice:
        tokens_BL, counted_B = rows[0][0], rows[1][0]
        inputs_BL, targets_BL = tokens_BL[:, :-1], tokens_BL[:, 1:]
        hidden_BLD, table_VD = stepping.outputs(params, inputs_BL, settings, end_of_document)
        counted_BL = jnp.broadcast_to(counted_B[:, None], targets_BL.shape)
        found = _of_microbatch(hidden_BLD, table_VD, targets_BL, counted_BL, program)
        # Whole on every device, so that every process can read it.
        return jax.tree.map(lambda x: jax.lax.all_gather(x, sharding.DATA_PARALLEL, axis=0), found)

    def scores(params: model.Params, tokens: jax.Array, counted: jax.Array) -> _OnDevice:
        return jax.lax.map(lambda rows: one_pass(params, rows), (tokens, counted))

    layout = jax.tree.map(lambda shape: shape.sharding.spec, program.state_shapes.params)
    batch = PartitionSpec(None, sharding.DATA_PARALLEL)
    platform = program.mesh.devices.flat[0].platform
    call = jax.jit(
        jax.shard_map(
            scores,
            mesh=program.mesh,
            in_specs=(layout, batch, batch),
            out_specs=PartitionSpec(),
            check_vma=False,
        ),
        compiler_options=precision.compiler_options(platform, settings.numerics.reduction),
    )
    return Scorer(program, call)


def _of_microbatch(
    hidden_BLD: jax.Array,
    table_VD: jax.Array,
    targets_BL: jax.Array,
    counted_BL: jax.Array,
    program: stepping.Program,
) -> _OnDevice:
    """All positions at once, or by chunks of them where training's loss goes by chunks."""
    settings = program.settings
    split = stepping.split_of(settings)

    def of_chunk(hidden: jax.Array, targets: jax.Array, counted: jax.Array) -> _OnDevice:
        logits = loss.logits(
            hidden,
            table_VD,
            settings.model.vocabulary_size,
            split,
            settings.model.output_scale,
        )
        return _OnDevice(
            targets_BL=targets,
            cross_entropy_BL=loss.token_losses(logits, targets, split)[0],
            greedy_BL=_greedy(logits, split),
            sums_B=loss.sums_by_sequence(logits, targets, counted, split),
        )

    chunk = settings.numerics.loss_chunk
    if chunk is None:
        return of_chunk(hidden_BLD, targets_BL, counted_BL)

    def add(total: loss.LossSums, arrays: Any) -> tuple[loss.LossSums, _OnDevice]:
        found = of_chunk(*arrays)
        return jax.tree.map(jnp.add, total, found.sums_B), found

    zeros_B = jnp.zeros(targets_BL.shape[:1], jnp.float32)
    none = loss.LossSums(zeros_B, zeros_B, zeros_B, zeros_B.astype(jnp.int32))
    chunks = tuple(loss.in_chunks(x, chunk) for x in (hidden_BLD, targets_BL, counted_BL))
    sums_B, found = jax.lax.scan(add, none, chunks)

    def whole(chunks: jax.Array) -> jax.Array:
        return chunks.swapaxes(0, 1).reshape(targets_BL.shape)

    return _OnDevice(targets_BL, whole(found.cross_entropy_BL), whole(found.greedy_BL), sums_B)


def _greedy(logits_BLV: jax.Array, split: Split) -> jax.Array:
    """The token of the largest logit on all devices, i32[B, L]; the lowest id of several."""
    num_here = logits_BLV.shape[-1]
    ids_V = split.index() * num_here + jnp.arange(num_here)
    peak_BL = split.maximum(jnp.max(logits_BLV, axis=-1))
    none = jnp.iinfo(jnp.int32).max
    lowest_BL = jnp.min(jnp.where(logits_BLV == peak_BL[..., None], ids_V, none), axis=-1)
    return -split.maximum(-lowest_BL)
