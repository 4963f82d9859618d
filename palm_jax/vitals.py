"""What a step measures beside its loss: per layer, and of the tables (docs/vitals.md).

Nothing here is differentiated or changes a bit of the state. Sums follow the orders of
reductions.py, so that a vital has the same bits on any mesh. Letters as in model.py.
"""

from __future__ import annotations

import collections.abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from palm_jax import attention, config, model, optimizer, reductions, rounding
from palm_jax.decoder.split import Split
from palm_jax.sharding import DATA_PARALLEL, logical_axes

Vitals = dict[str, jax.Array]

RARE = 1  # A token is rare that occurs in a batch's inputs at most so often.
# Smallest normal number, 2^-14, as the bits of a float32.
_SMALLEST_OF_FLOAT16 = int(np.float32(np.finfo(np.float16).tiny).view(np.int32))


# --- of the forward pass ------------------------------------------------------------------


class Seen(NamedTuple):
    """Of one microbatch's forward pass, or of all of a batch's."""

    # f32[3N + 2], so that one collective adds them: model.Seen's `residual` and `branches`, the
    # attention's entropies, the output logits.
    sums: jax.Array
    largest: reductions.Largest  # of the attention's logits f32[N], of log Z f32[]


def of_microbatch(layers: model.Seen, log_z_peaks_B: jax.Array, sum_of_logits: jax.Array) -> Seen:
    parts = layers.residual, layers.branches, layers.attention.entropy, sum_of_logits[None]
    peaks = layers.attention.largest_logit, jnp.max(log_z_peaks_B)
    return Seen(jnp.concatenate(parts), reductions.Largest(peaks))


def complete(seen: Seen, order: reductions.Order) -> Seen:
    """What is left to be done when passes and, of the sums, data-parallel devices are added."""
    everywhere = (*DATA_PARALLEL, "tensor")
    peaks = jax.tree.map(lambda x: reductions.largest(x, everywhere), seen.largest.values)
    return Seen(order.over(seen.sums, "tensor"), reductions.Largest(peaks))


def of_forward(
    seen: Seen, settings: config.Model, per_target: jax.Array, num_microbatches: int
) -> Vitals:
    """
    Args:
      seen: of the whole batch.
      per_target: 1 / the number of the batch's target tokens, f32[].
    """
    N = settings.num_layers
    before_and_after, branches_N, entropy_N, logits_1 = jnp.split(
        seen.sums, [N + 1, 2 * N + 1, 3 * N + 1]
    )
    num_queries = len(attention.observed_queries(settings.sequence_length))
    entropy_N = entropy_N * (1.0 / (settings.num_heads * num_queries * num_microbatches))
    logit_N, log_z = seen.largest.values
    return {
        "max_log_z": log_z,
        "mean_logit": logits_1[0] * per_target * (1.0 / settings.vocabulary_size),
        "max_attention_logit": jnp.max(logit_N),
        "attention_entropy": reductions.fold(entropy_N) * (1.0 / N),
        "layers/max_attention_logit": logit_N,
        "layers/attention_entropy": entropy_N,
        "layers/residual_rms": jnp.sqrt(
            before_and_after[1:] * (per_target * (1.0 / settings.width))
        ),
        "layers/branch_ratio": jnp.sqrt(branches_N / before_and_after[:-1]),
    }


# --- of gradient, parameters and update ---------------------------------------------------


class Squares(NamedTuple):
    """Sums of squares of trees like the parameters, as from MatrixReductions."""

    gradient: list[jax.Array]  # of the mean loss, before it is clipped
    parameters: list[jax.Array]  # before the update
    update: list[jax.Array]


def of_update(
    squares: Squares,
    settings: config.Config,
    params: model.Params,
    gradient: model.Params,
    optimizer_before: Any,
    optimizer_after: Any,
    gradient_norm: jax.Array,
    matrices: reductions.MatrixReductions,
) -> Vitals:
    """Norms and RMS of layers and tables, and what the clip did.

    Args:
      optimizer_before: the optimizer's state, in float32; `optimizer_after`: that the update left.
    """
    clip = optimizer.clip_factor(settings.optimizer.clip_norm, gradient_norm)
    normalised = optimizer.normalised(
        settings.optimizer,
        gradient,
        optimizer_before,
        optimizer_after,
        clip,
        matrices,
        matrices.zero,
    )
    per_element = {name: 1.0 / size for name, size in _elements(params).items()}
    gradients = _by_group(params, squares.gradient)
    parameters = _by_group(params, squares.parameters)
    updates = _by_group(params, squares.update)
    normals = _by_group(params, matrices.sums_of_squares(normalised))
    vitals = {"clip_factor": clip}
    for name, scale in per_element.items():
        vitals |= {
            f"{name}/gradient_norm": jnp.sqrt(gradients[name]),
            f"{name}/normalised_gradient_rms": jnp.sqrt(normals[name] * scale),
            f"{name}/parameter_rms": jnp.sqrt(parameters[name] * scale),
            f"{name}/update_rms": jnp.sqrt(updates[name] * scale),
            f"{name}/update_ratio": jnp.sqrt(updates[name] / parameters[name]),
        }
    return vitals


def _group(path: jax.tree_util.KeyPath, params: model.Params) -> str:
    """layers, embedding or unembedding.

    Norms and positions are grouped with the table that they stand by: alone, what begins at zero
    would have no size that its update could be compared with.
    """
    name = str(path[0].key)  # type: ignore[union-attr]
    if name == "layers":
        return name
    after = name.startswith(("unembedding", "final_norm")) and "unembedding_VD" in params
    return "unembedding" if after else "embedding"


def _by_group(params: model.Params, sums: list[jax.Array]) -> dict[str, jax.Array]:
    """Sums over matrices, added within each layer f32[N], and those of the tables f32[]."""
    groups: dict[str, list[jax.Array]] = {}
    for (path, _), one in zip(jax.tree_util.tree_leaves_with_path(params), sums, strict=True):
        groups.setdefault(_group(path, params), []).append(one)
    added = {name: reductions.fold(jnp.stack(parts)) for name, parts in groups.items()}
    return {name: x if name == "layers" else x[0] for name, x in added.items()}


def _elements(params: model.Params) -> dict[str, int]:
    """How many elements a layer and each table have, slices on other devices included."""
    sizes: dict[str, int] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        stacked = logical_axes(path, x.ndim).startswith("N")
        whole = reductions.whole_size(path, x) // (x.shape[0] if stacked else 1)
        group = _group(path, params)
        sizes[group] = sizes.get(group, 0) + whole
    return sizes


def shares(gradient: model.Params, policy: str, matrices: reductions.MatrixReductions) -> Vitals:
    """Which part of a gradient's elements is not finite; under float16, which part underflows.

    Not zero and below the smallest normal number is what underflows. The other policies' formats
    reach as far down as float32.

    Args:
      gradient: float32, as the backward pass gives it, so under float16 still scaled.
      policy: precision.policy.
    """

    # Of bits, because a processor may take for zero what is not.
    def magnitude(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF

    def is_not_finite(x: jax.Array) -> jax.Array:
        return magnitude(x) >= 0x7F800000

    def underflows(x: jax.Array) -> jax.Array:
        return (magnitude(x) > 0) & (magnitude(x) < _SMALLEST_OF_FLOAT16)

    def share(test: collections.abc.Callable[[jax.Array], jax.Array]) -> jax.Array:
        counts = matrices.sums(jax.tree.map(test, gradient))
        per_element = 1.0 / matrices.num_elements(gradient)
        return reductions.fold(jnp.concatenate(counts)) * per_element

    found = {"nonfinite_share": share(is_not_finite)}
    if policy == "float16":
        found["underflow_share"] = share(underflows)
    return found


def of_rare_rows(
    gradient: model.Params,
    tokens: jax.Array,
    split: Split,
    matrices: reductions.MatrixReductions,
) -> Vitals:
    """Norm of the embedding's gradient in the rows of rare tokens.

    A row whose token does not occur gets its gradient from a tied unembedding alone.

    Args:
      tokens: i32[passes, 1, microbatch, L+1], this device's.
    """
    table_VD = gradient["embedding_VD"]
    num_rows = table_VD.shape[0]
    inputs = tokens[..., :-1].reshape(-1)
    counts_V = jnp.zeros(num_rows * split.size, jnp.int32).at[inputs].add(1)
    counts_V = jax.lax.psum(counts_V, DATA_PARALLEL)  # integers add exactly in any order
    here_V = jax.lax.dynamic_slice_in_dim(counts_V, split.index() * num_rows, num_rows)
    squares_VD = rounding.rounded(table_VD * table_VD, matrices.zero)
    squares_VD = jnp.where((here_V <= RARE)[:, None], squares_VD, 0)
    (sums,) = matrices.sums({"embedding_VD": squares_VD})
    return {"embedding/rare_rows_gradient_norm": jnp.sqrt(sums[0])}


def of_step(
    seen: Seen,
    squares: Squares,
    *,
    settings: config.Config,
    tokens: jax.Array,
    per_target: jax.Array,
    params: model.Params,
    raw_gradient: model.Params,
    gradient: model.Params,
    gradient_norm: jax.Array,
    optimizer_before: Any,
    optimizer_after: Any,
    split: Split,
    matrices: reductions.MatrixReductions,
) -> Vitals:
    """All of them.

    Args:
      tokens: i32[passes, 1, microbatch, L+1], this device's.
      raw_gradient: as the backward pass gives it; `gradient`: of the mean loss.
    """
    num_microbatches = tokens.shape[0] * jax.lax.axis_size(DATA_PARALLEL)
    return {
        **of_forward(seen, settings.model, per_target, num_microbatches),
        **of_update(
            squares,
            settings,
            params,
            gradient,
            optimizer_before,
            optimizer_after,
            gradient_norm,
            matrices,
        ),
        **of_rare_rows(gradient, tokens, split, matrices),
        **shares(raw_gradient, settings.precision.policy, matrices),
    }
