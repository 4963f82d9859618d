"""A mesh whose axes follow the network that joins the devices."""

from __future__ import annotations

import collections.abc
import math

import jax
import numpy as np
from jax.experimental import mesh_utils

from palm_jax.errors import CannotDo, WrongInput


def physical_mesh(
    devices: collections.abc.Sequence[jax.Device], shape: dict[str, int]
) -> jax.sharding.Mesh:
    """Mesh of Auto axes over all of `devices`, real or a topology's.

    On TPUs the last axis, which communicates most, gets the best links: whole axes of the
    network where sizes allow, several of them (2 x 2 chips rather than a line of 4) where they
    can be had. Slices are joined by a slower network, so they differ along the first axis only
    and are the most significant part of its index. Devices of other platforms stay in order.

    Args:
      shape: devices along each mesh axis, the one that communicates least first: {"data": 2,
        "fsdp": 256, "tensor": 12}.
    Raises:
      WrongInput: the sizes do not multiply to the number of devices, or the first of them is no
        multiple of the number of slices.
      CannotDo: JAX finds no such mesh in the network.
    """
    sizes, product = tuple(shape.values()), " x ".join(f"mesh.{name}" for name in shape)
    if math.prod(sizes) != len(devices):
        raise WrongInput(
            f"{product} = {' x '.join(map(str, sizes))} = {math.prod(sizes)}, but there are "
            f"{len(devices)} devices"
        )
    # Devices of a topology with one slice have no index.
    is_tpu = devices[0].platform == "tpu"
    num_slices = len({getattr(device, "slice_index", 0) for device in devices}) if is_tpu else 1
    across = next(iter(shape))
    if sizes[0] % num_slices:
        raise WrongInput(
            f"mesh.{across}={sizes[0]} is no multiple of the {num_slices} slices that it must span"
        )
    try:
        if not is_tpu:
            grid = np.asarray(devices).reshape(sizes)
        elif num_slices == 1:
            grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        else:
            grid = mesh_utils.create_hybrid_device_mesh(
                (sizes[0] // num_slices, *sizes[1:]),
                (num_slices,) + (1,) * len(sizes[1:]),
                devices,
                allow_split_physical_axes=True,
            )
    except (TypeError, ValueError) as error:
        # JAX 0.10 loses factors of sizes such as 10, 14 and 28 when it must split an axis.
        raise CannotDo(
            f"JAX does not find {product} = {' x '.join(map(str, sizes))} in the network of "
            f"these {len(devices)} devices; sizes that are products of its axes are always found"
        ) from error
    # jax.make_mesh makes Explicit axes by default (another programming model), splits no
    # axis of the network except on v5e, and refuses several slices.
    axis_types = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.sharding.Mesh(grid, tuple(shape), axis_types=axis_types)
