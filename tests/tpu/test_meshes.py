from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from palm_jax.errors import CannotDo, WrongInput
from palm_jax.tpu import meshes

# Prints, for each mesh, [data][fsdp][tensor] -> [slice, x, y, z].
LAY_OUT = """
import json, os, sys
from palm_jax.tpu import topologies
os.environ.update(topologies.environment())
from palm_jax.tpu import meshes
answers = []
for name, num_slices, shape in json.loads(sys.argv[1]):
    devices = topologies.parse(name, num_slices).devices()
    mesh = meshes.physical_mesh(devices, shape)
    place = lambda d: [getattr(d, "slice_index", 0), *d.coords]
    answers.append([[[place(d) for d in row] for row in rows] for rows in mesh.devices])
print(json.dumps(answers))
"""


def sizes(data: int, fsdp: int, tensor: int) -> dict[str, int]:
    return {"data": data, "fsdp": fsdp, "tensor": tensor}


MESHES = {
    "pod": ("v4:12x16x16", 1, sizes(1, 256, 12)),
    "small": ("v4:2x2x4", 1, sizes(1, 4, 4)),
    "split": ("v4:16x16x12", 1, sizes(1, 384, 8)),
    "two pods": ("v4:12x16x16", 2, sizes(2, 256, 12)),
    "two slices": ("v4:2x2x4", 2, sizes(4, 2, 4)),
    "flat": ("v5e:4x8", 1, sizes(2, 4, 4)),
}


@pytest.fixture(scope="module")
def laid_out():
    """Places [data, fsdp, tensor, (slice, x, y, z)] of each mesh."""
    if not importlib.util.find_spec("libtpu"):
        pytest.skip("libtpu is not installed (pip install 'palm-jax[tpu]')")
    answers = subprocess.run(
        [sys.executable, "-c", LAY_OUT, json.dumps(list(MESHES.values()))],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    return dict(zip(MESHES, json.loads(answers.stdout), strict=True))


def links(a: np.ndarray, b: np.ndarray, around: tuple[int, ...]) -> np.ndarray:
    """Links between places (x, y, z) of one slice whose axes close into rings."""
    apart = np.abs(a - b)
    return np.minimum(apart, np.asarray(around) - apart).sum(-1)


@pytest.mark.tpu_compiler
def test_every_chip_occurs_once(laid_out):
    for name, (_, _, shape) in MESHES.items():
        places = np.array(laid_out[name])
        assert places.shape == (*shape.values(), 4)
        assert len(np.unique(places.reshape(-1, 4), axis=0)) == np.prod(places.shape[:3])


@pytest.mark.tpu_compiler
def test_tensor_neighbours_on_a_pod_are_one_link_apart_in_a_closed_ring(laid_out):
    xyz = np.array(laid_out["pod"])[..., 1:]
    assert (links(xyz, np.roll(xyz, 1, axis=2), (12, 16, 16)) == 1).all()


@pytest.mark.tpu_compiler
def test_tensor_groups_on_sixteen_chips_are_squares(laid_out):
    xyz = np.array(laid_out["small"])[..., 1:]
    for group in xyz[0]:
        assert sorted(map(tuple, group[:, :2])) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert len(set(group[:, 2])) == 1
    # And a step along fsdp is one link.
    assert (np.abs(np.diff(xyz, axis=1)).sum(-1) == 1).all()


@pytest.mark.tpu_compiler
def test_an_axis_of_the_network_is_split_where_it_must_be(laid_out):
    xyz = np.array(laid_out["split"])[..., 1:]
    assert (np.abs(np.diff(xyz, axis=2)).sum(-1) == 1).all()


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(("name", "per_slice"), [("two pods", 1), ("two slices", 2)])
def test_slices_differ_along_data_alone_and_are_its_upper_part(laid_out, name, per_slice):
    places = np.array(laid_out[name])
    data = np.arange(places.shape[0])[:, None, None]
    assert (places[..., 0] == data // per_slice).all()
    # Each slice is laid out as the other one.
    assert (places[:per_slice, ..., 1:] == places[per_slice:, ..., 1:]).all()


def test_a_mesh_that_jax_does_not_find_is_refused_with_its_sizes(monkeypatch):
    def lost(*shape: object, **options: object) -> None:
        raise TypeError("int() argument must be a number, not 'NoneType'")

    monkeypatch.setattr(meshes.mesh_utils, "create_device_mesh", lost)
    devices = [types.SimpleNamespace(platform="tpu")] * 8
    with pytest.raises(CannotDo, match=r"= 1 x 4 x 2 in the network of these 8 devices"):
        meshes.physical_mesh(devices, sizes(1, 4, 2))


def test_emulated_devices_stay_in_order():
    mesh = meshes.physical_mesh(jax.devices(), sizes(2, 2, 2))
    order = [device.id for device in jax.devices()]
    for data, fsdp, tensor in np.ndindex(2, 2, 2):
        assert mesh.devices[data, fsdp, tensor].id == order[(data * 2 + fsdp) * 2 + tensor]
    assert mesh.axis_names == ("data", "fsdp", "tensor")
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_a_mesh_of_another_size_names_both_numbers():
    with pytest.raises(WrongInput, match=r"= 1 x 3 x 2 = 6, but there are 8 devices"):
        meshes.physical_mesh(jax.devices(), sizes(1, 3, 2))


def test_data_that_does_not_span_the_slices_names_both_numbers():
    devices = [types.SimpleNamespace(platform="tpu", slice_index=i // 4) for i in range(12)]
    with pytest.raises(WrongInput, match=r"mesh\.data=4 is no multiple of the 3 slices"):
        meshes.physical_mesh(devices, sizes(4, 3, 1))
