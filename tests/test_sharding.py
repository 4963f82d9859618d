"""Where arrays live, and meshes that cannot be."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from palm_jax import config, sharding
from palm_jax.errors import CannotDo


def test_axes_of_a_leaf_come_from_its_name_also_inside_the_optimizer_state():
    state = {"mu": {"layers": {"w_gate_DF": np.zeros((2, 3, 4)), "count": np.zeros(())}}}
    axes = jax.tree_util.tree_map_with_path(
        lambda path, leaf: sharding.logical_axes(path, leaf.ndim), state
    )
    assert axes == {"mu": {"layers": {"w_gate_DF": "NDF", "count": ""}}}


def test_wrong_mesh_product_names_both_numbers():
    with pytest.raises(CannotDo, match=r"2 x 8 x 1 = 16 .* has 8"):
        sharding.make_mesh(config.Mesh(data=2, fsdp=8))
