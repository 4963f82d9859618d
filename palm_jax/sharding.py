"""The device mesh, and where each array lives on it.

Mesh axes: `data` (replicas of the parameters), `fsdp` (parameters, gradients and optimizer
state cut into slices along D) and `tensor` (matrices cut along heads, feed-forward and
vocabulary; the residual stream along D). Letters as in model.py.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from palm_jax import config
from palm_jax.errors import CannotDo
from palm_jax.tpu.meshes import physical_mesh

DATA_PARALLEL = ("data", "fsdp")  # device i of a pass = data index x fsdp size + fsdp index

# Logical axis (the letter at the end of a parameter's name) -> mesh axis.
RULES: dict[str, str | None] = {
    "N": None,  # layers are scanned, never cut
    "D": "fsdp",
    "L": None,
    "H": "tensor",
    "G": "tensor",
    "K": None,
    "F": "tensor",
    "V": "tensor",
    "E": "fsdp",  # elements of an optimizer's square matrix, row by row
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
    return physical_mesh(
        devices[:needed], dict(zip(("data", "fsdp", "tensor"), shape, strict=True))
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


def mesh_axes(axes: str) -> tuple[str | None, ...]:
    """The mesh axis that cuts each of some logical axes, None for those left whole."""
    return tuple(RULES[letter] for letter in axes)


def partition_spec(path: jax.tree_util.KeyPath, leaf: Any) -> PartitionSpec:
    return PartitionSpec(*mesh_axes(logical_axes(path, np.ndim(leaf))))


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
