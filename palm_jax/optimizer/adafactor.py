"""Adafactor as PaLM has it (PaLM, section 5), and with factored second moments.

N layers   D model   and the letters of a parameter's other axes, as in model.py

The RMS of a matrix is taken per layer of a stacked leaf and across the slices of all devices,
which needs sums that the caller supplies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from palm_jax import config, schedules
from palm_jax.optimizer import kinds, parts
from palm_jax.optimizer.parts import Matrices, average, one_over_root
from palm_jax.rounding import rounded


def clip_by_matrix_rms(limit: float, matrices: Matrices) -> optax.GradientTransformation:
    """Divide each matrix's update by max(1, RMS / limit) (Adafactor, section 6)."""

    def clip(update: jax.Array, mean_square: jax.Array) -> jax.Array:
        return update * (1.0 / jnp.maximum(1.0, jnp.sqrt(mean_square) * (1.0 / limit)))

    return parts.stateless(
        lambda updates, params, **_: jax.tree.map(clip, updates, matrices.mean_squares(updates))
    )


def scale_by_matrix_rms(floor: float, matrices: Matrices) -> optax.GradientTransformation:
    """Multiply each matrix's update by max(RMS(parameter), floor) (Adafactor, section 8)."""

    def scale(update: jax.Array, mean_square: jax.Array) -> jax.Array:
        return update * jnp.maximum(jnp.sqrt(mean_square), floor)

    return parts.stateless(
        lambda updates, params, **_: jax.tree.map(scale, updates, matrices.mean_squares(params))
    )


class SecondMoment(NamedTuple):
    count: Any  # i32[]: updates so far
    v: Any  # float32, as the parameters


def scale_by_second_moment(
    beta2_exponent: float, epsilon: float
) -> optax.GradientTransformationExtraArgs:
    """g / sqrt(v), v the average of g^2 + epsilon with beta2 = 1 - k^-exponent.

    optax.scale_by_factored_rms(factored=False), without its placeholders for factors.
    """

    def init(params: Any) -> SecondMoment:
        return SecondMoment(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: Any,
        state: SecondMoment,
        params: Any = None,
        zero: jax.Array | int = 0,
        **_: Any,
    ) -> tuple[Any, SecondMoment]:
        beta2 = schedules.beta2(beta2_exponent)(state.count)
        v = jax.tree.map(
            lambda g, old: average(old, rounded(g * g, zero) + epsilon, beta2, zero),
            updates,
            state.v,
        )
        scaled = jax.tree.map(lambda g, new: g * one_over_root(new, zero), updates, v)
        return scaled, SecondMoment(state.count + 1, v)

    return optax.GradientTransformationExtraArgs(init, update)


class FactoredMoment(NamedTuple):
    """Leaves are named for their own axes: of w_gate_DF, rows have w_gate_D, columns w_gate_F."""

    count: Any  # i32[]: updates so far
    rows: Any  # of matrices: means of v over all axes but D (and N)
    columns: Any  # of matrices: means over D
    v: Any  # as the parameters, of those that are no matrices


def _is_matrix(path: kinds.Path) -> bool:
    return kinds.kind(path) in ("kernels", "embeddings") and "D" in _axes(path)


def _axes(path: kinds.Path) -> str:
    """Letters of a parameter's axes, N not among them."""
    return kinds.name_of(path).rpartition("_")[2]


def _factor_names(path: kinds.Path) -> tuple[str, str]:
    """Of a matrix: w_gate_DF -> w_gate_D, w_gate_F."""
    stem, _, axes = kinds.name_of(path).rpartition("_")
    return f"{stem}_D", f"{stem}_{axes.replace('D', '')}"


def _beside(tree: Any, path: kinds.Path, name: str) -> Any:
    """The leaf `name` of nested dicts that stands where `path` does."""
    for entry in path[:-1]:
        tree = tree[entry.key]  # type: ignore[union-attr]
    return tree[name]


def _factors_of(function: Any, tree: Any, path: kinds.Path = ()) -> tuple[Any, Any]:
    """Nested dicts (rows, columns) of `function(path, matrix)`, which gives one of each."""
    rows: dict[str, Any] = {}
    columns: dict[str, Any] = {}
    for key, value in tree.items():
        here = (*path, jax.tree_util.DictKey(key))
        if isinstance(value, dict):
            rows[key], columns[key] = _factors_of(function, value, here)
        elif _is_matrix(here):
            row, column = _factor_names(here)
            rows[row], columns[column] = function(here, value)
    return rows, columns


def _over_factored_root(
    updates: Any, state: FactoredMoment, matrices: Matrices, zero: jax.Array | int
) -> Any:
    """g / sqrt(v), a matrix's v being rows x columns / mean of the rows."""

    def scaled(path: kinds.Path, g: jax.Array) -> jax.Array:
        if not _is_matrix(path):
            return g * one_over_root(_beside(state.v, path, kinds.name_of(path)), zero)
        row_name, column_name = _factor_names(path)
        row, column = _beside(state.rows, path, row_name), _beside(state.columns, path, column_name)
        axes = _axes(path)
        before = g.ndim - len(axes)  # 1 if stacked
        mean = matrices.mean_over_rows(row if before else row[None])
        relative = row * (1.0 / (mean if before else mean[0]))
        d = before + axes.index("D")
        others = [dim for dim in range(before, g.ndim) if dim != d]
        # One after the other: their product would be one more array as large as g.
        g = g * jnp.expand_dims(one_over_root(relative, zero), others)
        return g * jnp.expand_dims(one_over_root(column, zero), d)

    return jax.tree_util.tree_map_with_path(scaled, updates)


def scale_by_factored_moment(
    beta2_exponent: float, epsilon: float, matrices: Matrices
) -> optax.GradientTransformationExtraArgs:
    """As `scale_by_second_moment`, of matrices only the means of rows and columns being kept.

    A matrix has D on one side and all its other axes on the other.

    Source: Shazeer and Stern, 2018 (Adafactor), algorithm 4.
    """

    def init(params: Any) -> FactoredMoment:
        def zeros(path: kinds.Path, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            axes = _axes(path)
            before = x.ndim - len(axes)
            d = before + axes.index("D")
            rows = (*x.shape[:before], x.shape[d])
            columns = (*x.shape[:d], *x.shape[d + 1 :])
            return jnp.zeros(rows, x.dtype), jnp.zeros(columns, x.dtype)

        rows, columns = _factors_of(zeros, params)
        whole = kinds.chosen(params, lambda path: not _is_matrix(path))
        v = jax.tree.map(jnp.zeros_like, whole)
        return FactoredMoment(jnp.zeros((), jnp.int32), rows, columns, v)

    def update(
        updates: Any,
        state: FactoredMoment,
        params: Any = None,
        zero: jax.Array | int = 0,
        **_: Any,
    ) -> tuple[Any, FactoredMoment]:
        beta2 = schedules.beta2(beta2_exponent)(state.count)

        def square(g: jax.Array) -> jax.Array:
            return rounded(g * g, zero) + epsilon

        def averaged(path: kinds.Path, g: jax.Array) -> tuple[jax.Array, jax.Array]:
            row, column = matrices.row_and_column_means(square(g), _axes(path))
            row_name, column_name = _factor_names(path)
            return (
                average(_beside(state.rows, path, row_name), row, beta2, zero),
                average(_beside(state.columns, path, column_name), column, beta2, zero),
            )

        rows, columns = _factors_of(averaged, updates)
        whole = kinds.chosen(updates, lambda path: not _is_matrix(path))
        v = jax.tree.map(lambda g, old: average(old, square(g), beta2, zero), whole, state.v)
        state = FactoredMoment(state.count + 1, rows, columns, v)
        return _over_factored_root(updates, state, matrices, zero), state

    return optax.GradientTransformationExtraArgs(init, update)


class Momentum(NamedTuple):
    ema: Any  # float32, as the parameters


def momentum(beta1: float) -> optax.GradientTransformationExtraArgs:
    """The average of the updates, not debiased (optax.ema)."""

    def update(
        updates: Any, state: Momentum, params: Any = None, zero: jax.Array | int = 0, **_: Any
    ) -> tuple[Any, Momentum]:
        ema = jax.tree.map(lambda u, old: average(old, u, beta1, zero), updates, state.ema)
        return ema, Momentum(ema)

    return optax.GradientTransformationExtraArgs(
        lambda params: Momentum(jax.tree.map(jnp.zeros_like, params)), update
    )


def chain(settings: config.Adafactor, matrices: Matrices) -> dict[str, Any]:
    """T5X's order, in which the momentum is taken of the finished update, without debiasing."""
    numbers = settings.beta2_exponent, settings.epsilon_square
    return {
        "second_moment": scale_by_factored_moment(*numbers, matrices)
        if settings.factored
        else scale_by_second_moment(*numbers),
        "update_clip": parts.unless_off(
            settings.update_clip, lambda limit: clip_by_matrix_rms(limit, matrices)
        ),
        "rate": parts.scale_by_rate(),
        "parameter_scale": scale_by_matrix_rms(settings.epsilon_scale, matrices),
        "momentum": momentum(settings.beta1),
        # PaLM's decay is neither scaled nor kept in the momentum.
        "weight_decay": parts.unless_off(
            settings.weight_decay_exponent,
            lambda exponent: parts.add_decay(lambda rate, share: rate**exponent, settings.no_decay),
        ),
        "descent": optax.scale(-1.0),
    }


def normalised(
    settings: config.Adafactor,
    gradient: Any,
    state_after: Any,
    clip: jax.Array,
    matrices: Matrices,
    zero: jax.Array | int,
) -> Any:
    """g / sqrt(v)."""
    moment = state_after["second_moment"]
    if settings.factored:
        clipped = jax.tree.map(lambda g: g * clip, gradient)
        return _over_factored_root(clipped, moment, matrices, zero)
    return jax.tree.map(lambda g, v: (g * clip) * one_over_root(v, zero), gradient, moment.v)
