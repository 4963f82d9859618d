"""What rules are chained from: clips, rates, decay, averages.

Every product that is added to something is `rounded` first, so that bits do not depend on the
size of a slice.
"""

from __future__ import annotations

import collections.abc
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from palm_jax.optimizer import kinds
from palm_jax.rounding import rounded

Arrays = dict[str, jax.Array]


class Matrices(Protocol):
    """What rules ask of whole matrices, of which a device may hold a slice.

    A stacked leaf is N matrices. reductions.MatrixReductions is one of these.
    """

    def mean_squares(self, tree: Any) -> Any:
        """For each leaf the mean square of each matrix in it, shaped to broadcast with it."""

    def row_and_column_means(self, x: jax.Array, axes: str) -> tuple[jax.Array, jax.Array]:
        """Of a matrix with axes D and others, stacked or not: means over the others, and over D."""

    def mean_over_rows(self, rows: jax.Array) -> jax.Array:
        """Mean over D of [N, D], f32[N, 1]."""

    def of_whole(
        self, function: collections.abc.Callable[[jax.Array], jax.Array], tree: Any
    ) -> Any:
        """`function` [inputs, outputs] -> the same shape, of every layer's kernel, whole."""

    def of_layers(
        self,
        function: collections.abc.Callable[[Arrays, Arrays], tuple[Arrays, Arrays]],
        axes: str,
        kernels: Arrays,
        squares: Arrays,
    ) -> tuple[Arrays, Arrays]:
        """`function` of every layer's matrices: [inputs, outputs] of a kernel, and squares."""


def stateless(update: Any) -> optax.GradientTransformationExtraArgs:
    def update_fn(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return update(updates, params, **extra), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)


def clip_factor(limit: float | None, gradient_norm: jax.Array) -> jax.Array:
    """What clipping to a global norm of at most `limit` multiplies a gradient by, f32[]."""
    if limit is None:
        return jnp.ones_like(gradient_norm)
    return jnp.minimum(1.0, limit / gradient_norm)


def clip_by_norm(limit: float) -> optax.GradientTransformationExtraArgs:
    """Scale gradients to a global norm of at most `limit`, given `gradient_norm` f32[]."""

    def update(updates: Any, params: Any, *, gradient_norm: jax.Array, **_: Any) -> Any:
        factor = clip_factor(limit, gradient_norm)
        return jax.tree.map(lambda g: g * factor, updates)

    return stateless(update)


def unless_off(setting: Any, part: collections.abc.Callable[[Any], Any]) -> Any:
    """`part(setting)`; an empty part, so that the state keeps its form, where that is null."""
    return optax.identity() if setting is None else part(setting)


def with_kernel_rate(
    direction: optax.GradientTransformationExtraArgs, factor: float
) -> optax.GradientTransformationExtraArgs:
    """`direction`, whose steps of layers' kernels are multiplied by `factor` (muP's 1/m)."""
    if factor == 1:
        return direction

    def update(
        updates: Any, state: Any, params: Any = None, zero: jax.Array | int = 0, **extra: Any
    ) -> tuple[Any, Any]:
        steps, state = direction.update(updates, state, params, zero=zero, **extra)
        steps = jax.tree_util.tree_map_with_path(
            lambda path, u: rounded(u * factor, zero) if kinds.is_layer_kernel(path) else u, steps
        )
        return steps, state

    return optax.GradientTransformationExtraArgs(direction.init, update)


def scale_by_rate() -> optax.GradientTransformationExtraArgs:
    return stateless(
        lambda updates, params, *, rate, **_: jax.tree.map(lambda u: u * rate, updates)
    )


def scale_by_rounded_rate() -> optax.GradientTransformationExtraArgs:
    """`scale_by_rate`, its products rounded: for rules that add them to something next."""

    def update(
        updates: Any, params: Any, *, rate: jax.Array, zero: jax.Array | int = 0, **_: Any
    ) -> Any:
        return jax.tree.map(lambda u: rounded(u * rate, zero), updates)

    return stateless(update)


def add_decay(
    factor: collections.abc.Callable[..., Any], no_decay: collections.abc.Collection[str]
) -> optax.GradientTransformationExtraArgs:
    """Add factor x parameter, but for kinds of parameters that do not decay.

    Args:
      factor: of an update's `rate` and `share`.
    """
    of = kinds.decays(no_decay)

    def update(
        updates: Any,
        params: Any,
        *,
        rate: jax.Array,
        share: jax.Array | None = None,
        zero: jax.Array | int = 0,
        **_: Any,
    ) -> Any:
        decay = factor(rate, share)
        return jax.tree_util.tree_map_with_path(
            lambda path, u, p: u + rounded(decay * p, zero) if of(path) else u, updates, params
        )

    return stateless(update)


def average(old: jax.Array, new: jax.Array, beta: Any, zero: Any) -> jax.Array:
    """beta x old + (1 - beta) x new."""
    return rounded(beta * old, zero) + rounded((1 - beta) * new, zero)


def one_over_root(v: jax.Array, zero: Any) -> jax.Array:
    """1 / sqrt(v).

    Not by rsqrt, nor a division by sqrt, which XLA makes one of: it estimates and corrects a
    reciprocal root, and how depends on the size of a slice (docs/bits.md).
    """
    return 1.0 / rounded(jnp.sqrt(v), zero)
