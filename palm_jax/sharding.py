"""The device mesh, where each array lives on it, and sums whose bits no mesh can change.

Mesh axes: `data` (replicas of the parameters), `fsdp` (parameters, gradients and optimizer
state cut into slices) and `tensor` (matrices cut along heads, feed-forward and vocabulary).

A microbatch is the unit of computation. A batch is blocks of `lanes` microbatches; within a
block sums follow one binary tree in index order, and blocks are added in order. A pass takes
as many neighbouring microbatches as there are data-parallel devices, one a device: the
lowest levels of the tree cross devices (`tree_over_devices`, and the gradient of `gather`),
the upper ones are streamed (`streamed_sum`). Data parallelism and accumulation are then one
thing, and neither changes the bits of a sum.

Letters as in model.py.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from palm_jax import config
from palm_jax.errors import CannotDo
from palm_jax.rounding import rounded

DATA_PARALLEL = ("data", "fsdp")  # device i of a pass = data index x fsdp size + fsdp index

# Logical axis (the letter at the end of a parameter's name) -> mesh axis.
RULES: dict[str, str | None] = {
    "N": None,  # layers are scanned, never cut
    "D": "fsdp",
    "H": "tensor",
    "K": None,
    "F": "tensor",
    "V": "tensor",
}


def make_mesh(settings: config.Mesh) -> jax.sharding.Mesh:
    """Mesh of data x fsdp x tensor devices.

    Raises:
      CannotDo: there are fewer devices, or more (an accelerator would stand idle; emulated
        devices of a CPU may).
    """
    shape = (settings.data, settings.fsdp, settings.tensor)
    needed, devices = int(np.prod(shape)), jax.devices()
    if len(devices) < needed or (len(devices) > needed and devices[0].platform != "cpu"):
        raise CannotDo(
            f"mesh.data x mesh.fsdp x mesh.tensor = {' x '.join(map(str, shape))} = {needed} "
            f"devices, but this machine has {len(devices)} ({devices[0].platform}); change "
            f"the mesh, or emulate it on a CPU with mesh.emulated_devices={needed}"
        )
    # Auto axes: make_mesh's default in this JAX is Explicit, another programming model.
    axis_types = (jax.sharding.AxisType.Auto,) * 3
    return jax.make_mesh(
        shape, ("data", "fsdp", "tensor"), axis_types=axis_types, devices=devices[:needed]
    )


def logical_axes(path: jax.tree_util.KeyPath, num_dims: int) -> str:
    """Axis letters of a leaf of the train state, from the names on its path.

    Moments carry the path of their parameter. Counters have no axes: "".
    """
    names = [str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    if not names:
        return ""
    letters = names[-1].rpartition("_")[2]
    axes = ("N" if "layers" in names else "") + letters
    return axes if num_dims == len(axes) and set(axes) <= set(RULES) else ""


def partition_spec(path: jax.tree_util.KeyPath, leaf: Any) -> PartitionSpec:
    return PartitionSpec(*(RULES[letter] for letter in logical_axes(path, np.ndim(leaf))))


def manual_spec(path: jax.tree_util.KeyPath, leaf: Any) -> PartitionSpec:
    """The part of a leaf's layout that the step handles itself; `tensor` is XLA's."""
    return PartitionSpec(
        *(axis if axis in DATA_PARALLEL else None for axis in partition_spec(path, leaf))
    )


def shardings(mesh: jax.sharding.Mesh, tree: Any) -> Any:
    """NamedSharding of every leaf of a train state (or of its shapes)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, partition_spec(path, leaf)), tree
    )


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Of tokens [passes, devices, microbatch, L+1]."""
    return NamedSharding(mesh, PartitionSpec(None, DATA_PARALLEL))


def local_slots(mesh: jax.sharding.Mesh) -> list[int]:
    """Which devices of a pass (data index x fsdp size + fsdp index) this process has."""
    by_slot = mesh.devices.reshape(-1, mesh.devices.shape[-1])
    here = jax.process_index()
    return [
        slot
        for slot, devices in enumerate(by_slot)
        if any(device.process_index == here for device in devices)
    ]


# --- sums ---------------------------------------------------------------------------------


def tree_sum(terms: jax.Array) -> jax.Array:
    """Sum over the first axis, whose size is a power of two, by a binary tree in index order.

    Elementwise additions of slices, so that no compiler may choose another order.
    """
    while terms.shape[0] > 1:
        terms = terms[0::2] + terms[1::2]
    return terms[0]


def fold(terms: jax.Array) -> jax.Array:
    """Sum over the first axis, of any size, in an order that depends on its size alone."""
    while (size := terms.shape[0]) > 1:
        half = size // 2
        sums = terms[:half] + terms[half : 2 * half]
        terms = jnp.concatenate([sums, terms[2 * half :]]) if size % 2 else sums
    return terms[0]


def tree_over_devices(value: jax.Array) -> jax.Array:
    """Sum of each data-parallel device's value, in tree order; the same on all of them."""
    return tree_sum(jax.lax.all_gather(value, DATA_PARALLEL, axis=0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(shard: jax.Array, axis: int | None, dtype: Any) -> jax.Array:
    """A parameter made whole in its compute format, from the slice that this device holds.

    Its backward rule is the one home of the gradient's sum over devices: each device sends
    every other one its slice of this microbatch's gradient (about a reduce-scatter's bytes),
    and adds what it receives in float32 by the tree. Where `axis` is None the parameter is
    whole on each device.
    """
    value = shard.astype(dtype)
    if axis is None or jax.lax.axis_size("fsdp") == 1:
        return value
    return jax.lax.all_gather(value, "fsdp", axis=axis, tiled=True)


def _gather_forward(shard: jax.Array, axis: int | None, dtype: Any) -> tuple[jax.Array, None]:
    return gather(shard, axis, dtype), None


def _gather_backward(axis: int | None, dtype: Any, saved: None, gradient: jax.Array) -> Any:
    gradient = gradient.astype(jnp.float32)
    if axis is None:
        return (tree_over_devices(gradient),)
    if (size := jax.lax.axis_size("fsdp")) > 1:
        slices = jnp.stack(jnp.split(gradient, size, axis=axis))
        gradient = tree_sum(jax.lax.all_to_all(slices, "fsdp", split_axis=0, concat_axis=0))
    # Neighbours in a pass differ in their fsdp index first, so `data` is the upper tree.
    if jax.lax.axis_size("data") > 1:
        gradient = tree_sum(jax.lax.all_gather(gradient, "data", axis=0))
    return (gradient,)


gather.defvjp(_gather_forward, _gather_backward)


def _no_term(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """What leaves every number's bits as they are when it is added: -0.0, or the integer 0."""
    return jnp.full(
        shape.shape, -0.0 if jnp.issubdtype(shape.dtype, jnp.floating) else 0, shape.dtype
    )


def streamed_sum(one_pass: collections.abc.Callable[[Any], Any], passes: Any, lanes: int) -> Any:
    """Sum of `one_pass` over the first axis of `passes`: a tree within a block, blocks in order.

    Must run where the data-parallel mesh axes are bound. `one_pass` returns a pytree already
    summed over the devices. At most one partial sum a level of the tree is alive.
    """
    per_block = lanes // jax.lax.axis_size(DATA_PARALLEL)
    num_passes = jax.tree.leaves(passes)[0].shape[0]

    def in_order(parts: Any, part: collections.abc.Callable[[Any], Any]) -> Any:
        """part(parts[0]) + part(parts[1]) + ..., from left to right."""
        shapes = jax.eval_shape(part, jax.tree.map(lambda x: x[0], parts))

        def add(total: Any, this: Any) -> tuple[Any, None]:
            # Without the barrier the sums of losses differ by a rounding between device counts.
            term = jax.lax.optimization_barrier(part(this))
            return jax.tree.map(jnp.add, total, term), None

        return jax.lax.scan(add, jax.tree.map(_no_term, shapes), parts)[0]

    def subtree(passes: Any) -> Any:
        size = jax.tree.leaves(passes)[0].shape[0]
        if size == 1:
            return one_pass(jax.tree.map(lambda x: x[0], passes))
        halves = jax.tree.map(lambda x: x.reshape(2, size // 2, *x.shape[1:]), passes)
        return in_order(halves, subtree)

    blocks = jax.tree.map(
        lambda x: x.reshape(num_passes // per_block, per_block, *x.shape[1:]), passes
    )
    return in_order(blocks, subtree)


@dataclasses.dataclass(frozen=True)
class MatrixReductions:
    """Sums over whole parameters, of which this device may hold a slice.

    A parameter is cut into `lanes` slices along D however many devices there are; each
    slice is summed by itself and the slices' sums by the tree. A stacked leaf is N
    matrices, and each has its own sum: scanning must not mix layers.
    """

    lanes: int
    zero: jax.Array  # rounding.unknown_zero

    def sums(self, tree: Any) -> list[jax.Array]:
        """For each leaf the sum of each of its matrices: f32[N] if stacked, else f32[1]."""
        sliced: dict[int, jax.Array] = {}  # f32[D here, N]
        totals: dict[int, jax.Array] = {}
        for place, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
            axes = logical_axes(path, x.ndim)
            if not axes.startswith("N"):
                axes, x = "N" + axes, x[None]
            # Every index along D is summed by itself first: a reduction of the same extent
            # and order however many of them this device holds.
            keep = [dim for dim, letter in enumerate(axes) if letter in "ND"]
            sums = jnp.sum(x, axis=[dim for dim in range(x.ndim) if dim not in keep])
            if "D" in axes:
                sliced[place] = sums.T
            else:
                totals[place] = sums
        if sliced:
            # All leaves have the same D, so that one gather serves them all.
            together = jnp.concatenate(list(sliced.values()), axis=1)
            slices_here = self.lanes // jax.lax.axis_size("fsdp")
            by_slice = together.reshape(slices_here, -1, together.shape[1])
            by_slice = fold(by_slice.swapaxes(0, 1))
            whole = tree_sum(jax.lax.all_gather(by_slice, "fsdp", axis=0, tiled=True))
            ends = np.cumsum([part.shape[1] for part in sliced.values()])
            totals |= dict(zip(sliced, jnp.split(whole, ends[:-1]), strict=True))
        return [totals[place] for place in sorted(totals)]

    def mean_squares(self, tree: Any) -> Any:
        """Mean square of each matrix: f32[N, 1, ...] for a stacked leaf, f32[] for another."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        means = []
        for (path, x), total in zip(leaves, self._sums_of_squares(tree), strict=True):
            stacked = logical_axes(path, x.ndim).startswith("N")
            mean = total * (1.0 / self._matrix_size(path, x))
            means.append(mean.reshape((-1,) + (1,) * (x.ndim - 1)) if stacked else mean[0])
        return jax.tree.unflatten(structure, means)

    def norm(self, tree: Any) -> jax.Array:
        """Euclidean norm of all leaves together, f32[]."""
        return jnp.sqrt(fold(jnp.concatenate(self._sums_of_squares(tree))))

    def num_elements(self, tree: Any) -> int:
        """Elements of all leaves, slices on other devices included."""
        fsdp = jax.lax.axis_size("fsdp")
        return sum(
            x.size * (fsdp if "D" in logical_axes(path, x.ndim) else 1)
            for path, x in jax.tree_util.tree_leaves_with_path(tree)
        )

    def _sums_of_squares(self, tree: Any) -> list[jax.Array]:
        return self.sums(jax.tree.map(lambda x: rounded(x * x, self.zero), tree))

    @staticmethod
    def _matrix_size(path: jax.tree_util.KeyPath, x: jax.Array) -> int:
        axes = logical_axes(path, x.ndim)
        held = int(np.prod(x.shape[1:] if axes.startswith("N") else x.shape))
        return held * (jax.lax.axis_size("fsdp") if "D" in axes else 1)
