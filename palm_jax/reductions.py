"""Sums over microbatches, devices and parameters, in an order that no mesh can change.

A microbatch is the unit of computation. A batch is blocks of `lanes` microbatches; within a
block sums follow one binary tree in index order, and blocks are added in order. A pass takes
as many neighbouring microbatches as there are data-parallel devices, one a device: the
lowest levels of the tree cross devices (`over`, `scatter`), the upper ones are streamed
(`stream`). Data parallelism and accumulation are then one thing, and neither changes the bits
of a sum. That is `Canonical`. `Fast` leaves the order to XLA's own collectives.

All of this runs inside shard_map, where the mesh axes are bound. Letters as in model.py.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from palm_jax import config
from palm_jax.record import digests
from palm_jax.rounding import rounded
from palm_jax.sharding import DATA_PARALLEL, logical_axes, mesh_axes

Axes = str | tuple[str, ...]
Arrays = dict[str, jax.Array]


WORTH_SLICING = 2**16  # elements from which a sum over devices is shared out among them
AT_ONCE = 16  # terms that one expression adds, so that no partial sum passes through memory


def _pairwise(parts: list[jax.Array]) -> jax.Array:
    """Sum of a power of two of arrays, neighbours first."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[0::2], parts[1::2], strict=True)]
    return parts[0]


def tree_sum(terms: jax.Array) -> jax.Array:
    """Sum over the first axis, whose size is a power of two, by a binary tree in index order.

    Elementwise additions of slices, so that no compiler may choose another order. Floating
    terms are added in float32.
    """
    wide = jnp.promote_types(terms.dtype, jnp.float32) if _is_floating(terms) else terms.dtype
    while (size := terms.shape[0]) > 1:
        group = min(size, AT_ONCE)
        groups = terms.reshape(size // group, group, *terms.shape[1:])
        terms = _pairwise([groups[:, i].astype(wide) for i in range(group)])
    return terms[0]


def fold(terms: jax.Array, axis: int = 0) -> jax.Array:
    """Sum over an axis of any size, in an order that depends on its size alone.

    Additions of slices, each a stretch of the axis, floating terms in float32. Not jnp.sum:
    XLA:CPU lets LLVM reorder its additions, which does so by the sizes of the other axes.
    """
    if _is_floating(terms):
        terms = terms.astype(jnp.float32)

    def stretch(start: int, stop: int) -> jax.Array:
        return jax.lax.slice_in_dim(terms, start, stop, axis=axis)

    while (size := terms.shape[axis]) > 1:
        group = math.gcd(size, AT_ONCE)
        if group == 1:
            half = size // 2
            sums = stretch(0, half) + stretch(half, 2 * half)
            terms = jnp.concatenate([sums, stretch(2 * half, size)], axis=axis)
            continue
        length = size // group
        terms = _pairwise([stretch(i * length, (i + 1) * length) for i in range(group)])
    return jnp.squeeze(terms, axis)


def _is_floating(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _ordered(terms: jax.Array) -> jax.Array:
    """Sum over the first axis, floating terms in float32; by the tree, if its size allows one."""
    return fold(terms) if terms.shape[0] & (terms.shape[0] - 1) else tree_sum(terms)


def _no_term(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """What leaves every number's bits as they are when it is added: -0.0, or the integer 0."""
    return jnp.full(
        shape.shape, -0.0 if jnp.issubdtype(shape.dtype, jnp.floating) else 0, shape.dtype
    )


class Largest(NamedTuple):
    """In what a pass returns to `stream`: floating values, whose maximum is kept."""

    values: Any


def largest(x: jax.Array, axes: Axes) -> jax.Array:
    """Maximum of the devices' values along mesh axes; NaN if one of them is.

    Not jax.lax.pmax, which a platform may compute without regard to NaN.
    """
    if jax.lax.axis_size(axes) == 1:
        return x
    return jnp.max(jax.lax.all_gather(x, axes, axis=0), axis=0)


def _joined(total: Any, term: Any) -> Any:
    if isinstance(total, Largest):
        return Largest(jax.tree.map(jnp.maximum, total.values, term.values))
    return total + term


def _in_order(
    parts: Any,
    part: collections.abc.Callable[[Any], Any],
    shapes: Any,
    zero: jax.Array | int,
) -> Any:
    """part(parts[0]) + part(parts[1]) + ..., from left to right; of Largest, the maximum."""

    def add(total: Any, this: Any) -> tuple[Any, None]:
        # On one device nothing is exchanged, so that a term may end in a product.
        term = jax.tree.map(lambda x: rounded(x, zero) if _is_floating(x) else x, part(this))
        return jax.tree.map(_joined, total, term, is_leaf=_is_largest), None

    return jax.lax.scan(add, jax.tree.map(_nothing, shapes, is_leaf=_is_largest), parts)[0]


def _nothing(shape: Any) -> Any:
    if isinstance(shape, Largest):
        return Largest(jax.tree.map(lambda s: jnp.full(s.shape, -jnp.inf, s.dtype), shape.values))
    return _no_term(shape)


def _is_largest(node: Any) -> bool:
    return isinstance(node, Largest)


@dataclasses.dataclass(frozen=True)
class Canonical:
    """Every sum in an order that belongs to the run."""

    lanes: int

    def over(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Sum of the devices' values along mesh axes; the same on all of them.

        Large values are added slice by slice, each on one device (an all-reduce's bytes).
        """
        if (size := jax.lax.axis_size(axes)) == 1:
            return x
        divisible = [dim for dim, length in enumerate(x.shape) if length % size == 0]
        if size > 2 and divisible and _is_floating(x) and x.size >= WORTH_SLICING:
            dim = divisible[0]
            part = self.scatter(x, axes, dim, x.dtype)
            return jax.lax.all_gather(part, axes, axis=dim, tiled=True)
        return _ordered(jax.lax.all_gather(x, axes, axis=0)).astype(x.dtype)

    def scatter(self, x: jax.Array, axis: Axes, dim: int, dtype: Any) -> jax.Array:
        """Sum of the devices' values along a mesh axis, of which each keeps its slice of `dim`.

        Each device sends every other one its slice as it is (a reduce-scatter's bytes), and
        adds what it receives in float32. The result is rounded to `dtype` once.
        """
        if (size := jax.lax.axis_size(axis)) == 1:
            return x.astype(dtype)
        received = jax.lax.all_to_all(x, axis, split_axis=dim, concat_axis=dim, tiled=True)
        by_sender = received.reshape(
            *x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :]
        )
        return _ordered(jnp.moveaxis(by_sender, dim, 0)).astype(dtype)

    def stream(
        self,
        one_pass: collections.abc.Callable[[Any], Any],
        passes: Any,
        zero: jax.Array | int,
    ) -> Any:
        """Sum of `one_pass` over the first axis of `passes`: a tree in a block, blocks in order.

        `one_pass` returns a pytree, float32 or integers, already summed over the devices. At most
        one partial sum a level of the tree is alive. What it marks as Largest is not added.

        Args:
          zero: as in rounding.rounded.
        """
        per_block = self.lanes // jax.lax.axis_size(DATA_PARALLEL)
        num_passes = jax.tree.leaves(passes)[0].shape[0]
        shapes = jax.eval_shape(one_pass, jax.tree.map(lambda x: x[0], passes))

        def subtree(passes: Any) -> Any:
            size = jax.tree.leaves(passes)[0].shape[0]
            if size == 1:
                return one_pass(jax.tree.map(lambda x: x[0], passes))
            halves = jax.tree.map(lambda x: x.reshape(2, size // 2, *x.shape[1:]), passes)
            return _in_order(halves, subtree, shapes, zero)

        blocks = jax.tree.map(
            lambda x: x.reshape(num_passes // per_block, per_block, *x.shape[1:]), passes
        )
        return _in_order(blocks, subtree, shapes, zero)

    def along_matrices(self, x: jax.Array, axes: str) -> jax.Array:
        """Sums of a stacked parameter's slice over all but its axes N and D, [D here, N].

        Every index along D is summed by itself first: a reduction of the same extent and
        order however many of them this device holds. On TPUs, where it is not known that a
        reduction's order depends on anything else, it is XLA's own. So it is for what is no
        floating number: counts up to 2^24 are exact.
        """
        summed = [dim for dim, letter in enumerate(axes) if letter not in "ND"]

        def folded(x: jax.Array) -> jax.Array:
            for dim in reversed(summed):  # so that those before it keep their places
                x = fold(x, dim)
            return x

        def by_xla(x: jax.Array) -> jax.Array:
            return jnp.sum(x, axis=summed, dtype=jnp.float32)

        if _is_floating(x):
            sums = jax.lax.platform_dependent(x, tpu=by_xla, default=folded)
        else:
            sums = by_xla(x)
        return sums.T if "D" in axes else sums[None]

    def along_width(self, sums: jax.Array) -> jax.Array:
        """Sum over D of sums [D here, n]: `lanes` slices by themselves, then their tree."""
        slices_here = self.lanes // jax.lax.axis_size("fsdp")
        by_slice = sums.reshape(slices_here, -1, sums.shape[1])
        by_slice = fold(by_slice.swapaxes(0, 1))
        return tree_sum(jax.lax.all_gather(by_slice, "fsdp", axis=0, tiled=True))

    def rows(self, x: jax.Array, axes: str) -> jax.Array:
        """Sums of a stacked matrix's slice over all but its axes N and D, [N, D here]."""
        return self.along_matrices(x, axes).T

    def columns(self, x: jax.Array, dim: int) -> jax.Array:
        """Sum over D, the axis `dim`, of which this device has a part.

        As `along_width` adds, but a tree on each device and then one over them, which is the same
        tree: what is left may be large.
        """
        slices_here = self.lanes // jax.lax.axis_size("fsdp")
        along = jnp.moveaxis(x, dim, 0)
        by_slice = along.reshape(slices_here, -1, *along.shape[1:])
        return self.over(tree_sum(fold(by_slice, axis=1)), "fsdp")


@dataclasses.dataclass(frozen=True)
class Fast:
    """Every sum in the order that XLA's collectives and reductions choose for this mesh."""

    def over(self, x: jax.Array, axes: Axes) -> jax.Array:
        return jax.lax.psum(x, axes)

    def scatter(self, x: jax.Array, axis: Axes, dim: int, dtype: Any) -> jax.Array:
        x = x.astype(dtype)
        if jax.lax.axis_size(axis) == 1:
            return x
        return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)

    def stream(
        self,
        one_pass: collections.abc.Callable[[Any], Any],
        passes: Any,
        zero: jax.Array | int,
    ) -> Any:
        first = jax.tree.map(lambda x: x[0], passes)
        if jax.tree.leaves(passes)[0].shape[0] == 1:
            return one_pass(first)
        return _in_order(passes, one_pass, jax.eval_shape(one_pass, first), 0)

    def along_matrices(self, x: jax.Array, axes: str) -> jax.Array:
        return jnp.sum(x, axis=range(1, x.ndim), dtype=jnp.float32)[None]

    def along_width(self, sums: jax.Array) -> jax.Array:
        return jax.lax.psum(sums[0], "fsdp")

    def rows(self, x: jax.Array, axes: str) -> jax.Array:
        others = [dim for dim, letter in enumerate(axes) if letter not in "ND"]
        return jnp.sum(x, axis=others)

    def columns(self, x: jax.Array, dim: int) -> jax.Array:
        return jax.lax.psum(jnp.sum(x, axis=dim), "fsdp")


Order = Canonical | Fast


def order_of(numerics: config.Numerics) -> Order:
    return Fast() if numerics.reduction == "fast" else Canonical(numerics.lanes)


# --- a parameter's gather, and the sum of its gradient ------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def gather(
    shard: jax.Array, probe: jax.Array | None, dim: int | None, dtype: Any, order: Order
) -> jax.Array:
    """A parameter made whole along D in its compute format, from this device's slice.

    Its backward rule is the one home of the gradient's sum over data-parallel devices. Where
    `dim` is None the parameter has no D, and is whole on each device.

    Args:
      probe: if given, f32[4] that is not used; its "gradient" are the words of `probed`, taken
        of this device's own gradient before it is added to the others'.
    """
    value = shard.astype(dtype)
    if dim is None or jax.lax.axis_size("fsdp") == 1:
        return value
    return jax.lax.all_gather(value, "fsdp", axis=dim, tiled=True)


def _gather_forward(
    shard: jax.Array, probe: jax.Array | None, dim: int | None, dtype: Any, order: Order
) -> tuple[jax.Array, bool]:
    return gather(shard, probe, dim, dtype, order), probe is not None


def _gather_backward(
    dim: int | None, dtype: Any, order: Order, is_probed: bool, gradient: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    words = _digest_as_floats(gradient) if is_probed else None
    if dim is None:
        return order.over(gradient.astype(jnp.float32), DATA_PARALLEL), words
    # Neighbours in a pass differ in their fsdp index first, so `data` is the upper tree.
    return order.over(order.scatter(gradient, "fsdp", dim, jnp.float32), "data"), words


gather.defvjp(_gather_forward, _gather_backward)


def _digest_as_floats(gradient: jax.Array) -> jax.Array:
    """A leaf's digest as four numbers below 2^16, which float32 holds exactly: f32[4]."""
    (words,) = digests.leaf_digests(gradient.astype(jnp.float32)).values()
    return jnp.stack([words >> 16, words & 0xFFFF], axis=-1).reshape(4).astype(jnp.float32)


def probes_for(params: Any) -> Any:
    """A probe for every gather of a tree of parameters: f32[4], or f32[N, 4] if stacked."""

    def probe(path: jax.tree_util.KeyPath, x: jax.Array) -> jax.Array:
        stacked = logical_axes(path, x.ndim).startswith("N")
        return jnp.zeros((x.shape[0], 4) if stacked else 4, jnp.float32)

    return jax.tree_util.tree_map_with_path(probe, params)


def probed(probes: Any) -> jax.Array:
    """The digest u32[2] of a whole gradient, from the probes' own gradients."""
    named = digests.named_leaves(probes)
    whole = jnp.zeros(2, jnp.uint32)
    for path, halves in sorted(named.items()):
        pairs = halves.reshape(-1, 2, 2).astype(jnp.uint32)
        words = (pairs[..., 0] << 16) | pairs[..., 1]  # u32[N or 1, 2]
        whole += digests.mixed_with_place(words, path)
    if (size := jax.lax.axis_size("tensor")) == 1:
        return whole
    # Tensor-parallel devices have parts of one microbatch's gradient.
    parts = jax.lax.all_gather(whole, "tensor", axis=0)
    return digests.mixed_with_place(parts, f"{size} parts")


# --- tensor parallelism -------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _whole(x: jax.Array, order: Order, axis: str) -> jax.Array:
    return jax.lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)


_whole.defvjp(
    lambda x, order, axis: (_whole(x, order, axis), None),
    lambda order, axis, saved, g: (order.scatter(g, axis, g.ndim - 1, g.dtype),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _summed(x: jax.Array, order: Order, axis: str) -> jax.Array:
    return order.scatter(x, axis, x.ndim - 1, x.dtype)


_summed.defvjp(
    lambda x, order, axis: (_summed(x, order, axis), None),
    lambda order, axis, saved, g: (jax.lax.all_gather(g, axis, axis=g.ndim - 1, tiled=True),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _total(x: jax.Array, order: Order, axis: str) -> jax.Array:
    return order.over(x, axis)


_total.defvjp(
    lambda x, order, axis: (_total(x, order, axis), None),
    lambda order, axis, saved, g: (order.over(g, axis),),
)


@dataclasses.dataclass(frozen=True)
class OverTensor:
    """model.Undivided's functions where the mesh axis `tensor` cuts heads, feed-forward,
    vocabulary, and the residual stream between blocks.

    Contractions are split into `size` parts, whose number belongs to the run.
    """

    size: int
    order: Order

    def index(self) -> jax.Array:
        return jax.lax.axis_index("tensor")

    def whole(self, x: jax.Array) -> jax.Array:
        return _whole(x, self.order, "tensor")

    def summed(self, x: jax.Array) -> jax.Array:
        return _summed(x, self.order, "tensor")

    def total(self, x: jax.Array) -> jax.Array:
        return _total(x, self.order, "tensor")

    def maximum(self, x: jax.Array) -> jax.Array:
        return jax.lax.pmax(x, "tensor")

    def part(self, x: jax.Array) -> jax.Array:
        size = x.shape[0] // self.size
        return jax.lax.dynamic_slice_in_dim(x, self.index() * size, size, axis=0)


def complete_over_tensor(gradient: Any, order: Order) -> Any:
    """Add up the gradients of parameters that tensor-parallel devices share.

    Each device has the part that came through its own heads, feed-forward and vocabulary.
    Called once all passes are added: in between, the order of sums would depend on the mesh.
    """
    if jax.lax.axis_size("tensor") == 1:
        return gradient

    def complete(path: jax.tree_util.KeyPath, g: jax.Array) -> jax.Array:
        cut = "tensor" in mesh_axes(logical_axes(path, g.ndim))
        return g if cut else order.over(g, "tensor")

    return jax.tree_util.tree_map_with_path(complete, gradient)


# --- sums over whole parameters -----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MatrixReductions:
    """Sums over whole parameters, of which this device may hold a slice.

    A stacked leaf is N matrices, and each has its own sum: scanning must not mix layers.
    """

    order: Order
    zero: jax.Array | int  # rounding.unknown_zero; 0 under `fast`

    def sums(self, tree: Any) -> list[jax.Array]:
        """For each leaf the sum of each of its matrices: f32[N] if stacked, else f32[1]."""
        sliced: dict[int, jax.Array] = {}  # f32[D here, N]
        totals: dict[int, jax.Array] = {}
        across_tensor: set[int] = set()
        for place, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
            axes = logical_axes(path, x.ndim)
            if not axes.startswith("N"):
                axes, x = "N" + axes, x[None]
            sums = self.order.along_matrices(x, axes)
            if "D" in axes:
                sliced[place] = sums
            else:
                totals[place] = sums[0]
            if "tensor" in mesh_axes(axes):
                across_tensor.add(place)
        if sliced:
            # All leaves have the same D, so that one gather serves them all.
            whole = self.order.along_width(jnp.concatenate(list(sliced.values()), axis=1))
            ends = np.cumsum([part.shape[1] for part in sliced.values()])
            totals |= dict(zip(sliced, jnp.split(whole, ends[:-1]), strict=True))
        if across_tensor and jax.lax.axis_size("tensor") > 1:
            places = sorted(across_tensor)
            whole = self.order.over(jnp.concatenate([totals[p] for p in places]), "tensor")
            ends = np.cumsum([totals[p].size for p in places])
            totals |= dict(zip(places, jnp.split(whole, ends[:-1]), strict=True))
        return [totals[place] for place in sorted(totals)]

    def mean_squares(self, tree: Any) -> Any:
        """Mean square of each matrix: f32[N, 1, ...] for a stacked leaf, f32[] for another."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        means = []
        for (path, x), total in zip(leaves, self.sums_of_squares(tree), strict=True):
            stacked = logical_axes(path, x.ndim).startswith("N")
            whole = whole_size(path, x) // (x.shape[0] if stacked else 1)
            mean = total * (1.0 / whole)
            means.append(mean.reshape((-1,) + (1,) * (x.ndim - 1)) if stacked else mean[0])
        return jax.tree.unflatten(structure, means)

    def row_and_column_means(self, x: jax.Array, axes: str) -> tuple[jax.Array, jax.Array]:
        """Of a slice of a matrix with axes D and others, stacked or not.

        Returns:
          Means over all axes but N and D, [N, D here]; over D, with the others' axes.
        """
        stacked = x.ndim > len(axes)
        letters = "N" + axes
        x = x if stacked else x[None]
        rows, columns = self.order.rows(x, letters), self.order.columns(x, letters.index("D"))
        cut = [axis for axis in mesh_axes(axes.replace("D", "")) if axis is not None]
        if jax.lax.axis_size("tensor") > 1 and "tensor" in cut:
            rows = self.order.over(rows, "tensor")
        num_rows = rows.shape[1] * jax.lax.axis_size("fsdp")
        num_columns = columns.size // x.shape[0] * int(np.prod([jax.lax.axis_size(a) for a in cut]))
        rows, columns = rows * (1.0 / num_columns), columns * (1.0 / num_rows)
        return (rows, columns) if stacked else (rows[0], columns[0])

    def mean_over_rows(self, rows: jax.Array) -> jax.Array:
        """Mean over D of [N, D here], f32[N, 1]."""
        whole = rows.shape[1] * jax.lax.axis_size("fsdp")
        return (self.order.columns(rows, 1) * (1.0 / whole))[:, None]

    def of_whole(
        self, function: collections.abc.Callable[[jax.Array], jax.Array], tree: Any
    ) -> Any:
        """`function` [I, O] -> [I, O] of every layer's kernel, made whole.

        As `of_layers`, which says who computes what.
        """

        def of_leaf(path: jax.tree_util.KeyPath, x: jax.Array) -> jax.Array:
            axes = logical_axes(path, x.ndim)
            kernels, _ = self.of_layers(
                lambda kernels, _: ({"x": function(kernels["x"])}, {}), axes, {"x": x}, {}
            )
            return kernels["x"]

        return jax.tree_util.tree_map_with_path(of_leaf, tree)

    def of_layers(
        self,
        function: collections.abc.Callable[[Arrays, Arrays], tuple[Arrays, Arrays]],
        axes: str,
        kernels: Arrays,
        squares: Arrays,
    ) -> tuple[Arrays, Arrays]:
        """`function` of every layer's matrices that belong together, made whole, as it returns.

        The layers are dealt out to the devices of `fsdp`: each exchanges its slices of all layers
        for some layers whole (a device's bytes stay what they are, but for a last layer or two),
        and each matrix is computed by one device, in one shape. So no sum crosses devices, and
        bits depend on no mesh. Devices along `data` and `tensor` do the same work again.

        Args:
          function: kernels [I, O] and squares [n, n], n of its own each, to such ones. Where
            devices do not divide the layers, of zeros, too.
          axes: of all kernels, given and returned.
          kernels: slices as stored.
          squares: [N, E here], rows of a square after each other.
        """
        # A kernel of a layer has D first or last, and so reads as [I, O] as it is.
        assert axes[0] == "N"
        assert "D" in (axes[1], axes[-1])
        cuts = mesh_axes(axes)
        cut = cuts.index("tensor") - 1 if "tensor" in cuts else None
        size, along = jax.lax.axis_size("fsdp"), axes.index("D")

        def whole(part: jax.Array) -> jax.Array:
            if cut is None:
                return part
            return jax.lax.all_gather(part, "tensor", axis=cut, tiled=True)

        def part_of(x: jax.Array) -> jax.Array:
            if cut is None:
                return x
            length = x.shape[cut] // jax.lax.axis_size("tensor")
            start = jax.lax.axis_index("tensor") * length
            return jax.lax.dynamic_slice_in_dim(x, start, length, axis=cut)

        def of_layer(parts: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            wholes = {name: whole(part) for name, part in parts[0].items()}
            shape = next(iter(wholes.values())).shape
            num_inputs = shape[0] if axes[1] == "D" else math.prod(shape[:-1])
            kernels, squares = function(
                {name: x.reshape(num_inputs, -1) for name, x in wholes.items()},
                {name: x.reshape(math.isqrt(x.size), -1) for name, x in parts[1].items()},
            )
            return (
                {name: part_of(x.reshape(shape)) for name, x in kernels.items()},
                {name: x.reshape(-1) for name, x in squares.items()},
            )

        if size == 1:
            return jax.lax.map(of_layer, (kernels, squares))
        num_layers = next(iter(kernels.values())).shape[0]
        missing = -num_layers % size

        def dealt(x: jax.Array, along: int) -> jax.Array:
            x = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
            return jax.lax.all_to_all(x, "fsdp", split_axis=0, concat_axis=along, tiled=True)

        def returned(x: jax.Array, along: int) -> jax.Array:
            x = jax.lax.all_to_all(x, "fsdp", split_axis=along, concat_axis=0, tiled=True)
            return x[:num_layers]

        kernels, squares = jax.lax.map(
            of_layer,
            (
                {name: dealt(x, along) for name, x in kernels.items()},
                {name: dealt(x, 1) for name, x in squares.items()},
            ),
        )
        return (
            {name: returned(x, along) for name, x in kernels.items()},
            {name: returned(x, 1) for name, x in squares.items()},
        )

    def norm(self, tree: Any) -> jax.Array:
        """Euclidean norm of all leaves together, f32[]."""
        return norm_of(self.sums_of_squares(tree))

    def sums_of_squares(self, tree: Any) -> list[jax.Array]:
        """`sums` of the squares of all elements."""
        return self.sums(jax.tree.map(lambda x: rounded(x * x, self.zero), tree))

    def num_elements(self, tree: Any) -> int:
        """Elements of all leaves, slices on other devices included."""
        return sum(whole_size(path, x) for path, x in jax.tree_util.tree_leaves_with_path(tree))


def norm_of(sums_of_squares: list[jax.Array]) -> jax.Array:
    """Euclidean norm f32[] of all leaves together, from MatrixReductions.sums_of_squares."""
    return jnp.sqrt(fold(jnp.concatenate(sums_of_squares)))


def whole_size(path: jax.tree_util.KeyPath, x: jax.Array) -> int:
    """Elements of a leaf of which `x` is this device's slice."""
    cuts = [axis for axis in mesh_axes(logical_axes(path, x.ndim)) if axis is not None]
    return x.size * int(np.prod([jax.lax.axis_size(axis) for axis in cuts], dtype=np.int64))
