"""Bytes on each device: what the arithmetic says is what the devices hold."""

from __future__ import annotations

import collections
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_jax import config, sharding, step
from palm_jax.plan import memory, parameters
from palm_jax.record.checkpoints import bytes_of

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
# Every kind of leaf: two tables, and scales that no mesh cuts.
ALL_LEAVES = {"model.qk_norm": True, "model.tied_embedding": False}
POLICIES = ("float32", "bfloat16", "bfloat16_pure", "float16", "float8")
GROUP = {"embedding": "embedding", "unembedding": "embedding", "norm_scale": "norms"}
GROUP |= {"query_norm_scale": "norms", "key_norm_scale": "norms"}
GROUP |= dict.fromkeys(("w_query", "w_key", "w_value", "w_attention"), "attention")
GROUP |= dict.fromkeys(("w_gate", "w_up", "w_down"), "feed_forward")
# Of an architecture with all that PaLM's has not.
OTHER_LEAVES = {
    "model.num_key_value_heads": 2,
    "model.block": "serial",
    "model.norm": "layernorm",
    "model.biases": True,
    "model.positions": "learned",
    "model.embedding_norm": True,
    "model.final_norm_scale": True,
}
GROUP |= {"position_embedding": "embedding"}
GROUP |= {f"{name}_bias": "attention" for name in ("query", "key", "value", "attention")}
GROUP |= {f"{name}_bias": "feed_forward" for name in ("gate", "up", "down")}
GROUP |= {
    f"{name}_norm_{kind}": "norms"
    for name in ("attention", "feed_forward", "embedding", "final")
    for kind in ("scale", "bias")
}


def on(mesh: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("mesh.data", "mesh.fsdp", "mesh.tensor"), mesh, strict=True))


def bytes_by_device(tree) -> dict[jax.Device, dict[str, int]]:
    """Of the shards that devices have, by group; what no parameter's name is on is a counter."""
    found = collections.defaultdict(lambda: collections.defaultdict(int))
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        name = names[-1].rpartition("_")[0] if names else ""
        for shard in leaf.addressable_shards:
            found[shard.device][GROUP.get(name, "counters")] += shard.data.nbytes
    return {device: dict(groups) for device, groups in found.items()}


@pytest.mark.parametrize(
    ("mesh", "optimizer", "policy"),
    [
        ((1, 8, 1), "adafactor", "float32"),
        ((1, 4, 2), "adamw", "bfloat16"),
        ((2, 2, 2), "adamw of another architecture", "float32"),
        ((2, 2, 2), "adafactor", "bfloat16_pure"),
        ((2, 2, 2), "adamw", "float16"),
        ((1, 4, 2), "soap", "float32"),
        pytest.param((1, 4, 2), "adafactor", "float8", marks=pytest.mark.slow),
    ],
)
def test_planned_bytes_are_those_of_every_devices_shards(small, mesh, optimizer, policy):
    optimizer, _, other = optimizer.partition(" of ")
    settings = small(
        optimizer={"name": optimizer},
        **{"precision.policy": policy, "precision.float8_history": 5},
        **ALL_LEAVES,
        **(OTHER_LEAVES if other else {}),
        **on(mesh),
    )
    program = step.make_program(settings, sharding.make_mesh(settings.mesh), 256)
    state = program.init()
    if optimizer == "adafactor":
        kept = {
            "momentum": state.optimizer["momentum"].ema,
            "second_moment": state.optimizer["second_moment"].v,
        }
    else:
        moments = state.optimizer["moments"]
        kept = {"first_moment": moments.mu, "second_moment": moments.nu}
    if optimizer == "soap":
        kept["second_moment"] = moments.nu, moments.eigen_nu
        kept["covariances"] = moments.left, moments.right
        kept["eigenbases"] = moments.left_basis, moments.right_basis
    planned = memory.on_each_device(settings, sharding.RULES)
    assert set(planned.arrays) == {"parameters", "gradient", *kept}
    for name, tree in {"parameters": state.params, **kept}.items():
        devices = bytes_by_device(tree)
        assert len(devices) == 8
        wanted = {group: size for group, size in planned.arrays[name].items() if size}
        assert all(groups == wanted for groups in devices.values())
    for groups in bytes_by_device(state).values():
        assert groups["counters"] == planned.counters
        assert sum(groups.values()) == planned.state


def test_planned_arguments_are_those_of_the_compiled_step(small):
    settings = small(**on((2, 2, 2)), **{"data.ramp": {"sizes": [8]}})
    program = step.make_program(settings, sharding.make_mesh(settings.mesh), 256)
    batch = program.put(np.zeros((8, 9), np.int32))
    compiled = program.traceable_step.lower(program.state_shapes, batch, step.controls()).compile()
    planned = memory.on_each_device(settings, sharding.RULES)
    assert compiled.memory_analysis().argument_size_in_bytes == planned.arguments
    assert planned.total - planned.arguments == sum(planned.arrays["parameters"].values())


def test_one_device_holds_the_whole_state(small):
    settings = small(**ALL_LEAVES)
    planned = memory.on_each_device(settings, sharding.RULES)
    # Parameters and two moments, float32.
    num = parameters.number(settings.model, padded=True)
    assert planned.state - planned.counters == 12 * num
    assert memory.optimizer_bytes_per_parameter(settings) == 8


@pytest.mark.parametrize("policy", POLICIES)
def test_planned_state_is_that_of_the_program(small, policy):
    settings = small(**ALL_LEAVES, **{"precision": {"policy": policy}}, **on((1, 4, 2)))
    shapes = step.make_program(settings, sharding.make_mesh(settings.mesh), 256).state_shapes
    assert memory.state_bytes(settings) == bytes_of(shapes)


def test_numbers_by_hand():
    """The 540B on its mesh, whose 6,144 devices nobody needs for this."""
    settings = config.load(CONFIGS / "palm_540b.yaml")
    planned = memory.on_each_device(settings, sharding.RULES)
    D, H, F, V, N, K = 18432 // 256, 48 // 12, 73728 // 12, 256512 // 12, 118, 256
    assert planned.arrays["gradient"] == {
        "embedding": 4 * V * D,
        "attention": 4 * N * (2 * D * H * K + 2 * D * K),
        "feed_forward": 4 * N * 3 * D * F,
        "norms": 4 * N * D,
    }
    assert planned.batch == 4 * 2048 // 512 * 2049


@given(
    data=st.sampled_from([1, 2, 4]),
    fsdp=st.sampled_from([1, 2, 4, 8]),
    tensor=st.integers(1, 6),
    untied=st.booleans(),
    qk_norm=st.booleans(),
)
def test_devices_hold_the_parameters_and_their_copies(data, fsdp, tensor, untied, qk_norm):
    """Cut by both axes, by fsdp alone, or whole: (copies) x (a device's part) is the whole."""
    settings = config.from_dict(
        {
            "steps": 1,
            "model": {
                "num_layers": 3,
                "width": 32 * tensor,
                "num_heads": 2 * tensor,
                "head_size": 4,
                "feed_forward": 5 * tensor,
                "vocabulary_size": 7 * tensor,
                "vocabulary_multiple": 1,
                "sequence_length": 2,
                "tied_embedding": not untied,
                "qk_norm": qk_norm,
            },
            "data": {"corpus": "c", "ramp": {"sizes": [32]}},
            "numerics": {"lanes": 32},
            "mesh": {"data": data, "fsdp": fsdp, "tensor": tensor},
        }
    )
    parts = memory.on_each_device(settings, sharding.RULES).arrays["parameters"]
    m, devices = settings.model, data * fsdp * tensor
    key_and_value = 2 * 3 * m.width * 4
    head_scales = 2 * 3 * 4 if qk_norm else 0
    whole = parameters.number(m, padded=True)
    copies_of_all = whole * data
    copies_of_key_value_and_scale = (tensor - 1) * data * (key_and_value + 3 * m.width)
    copies_of_head_scales = (devices - data) * head_scales
    assert sum(parts.values()) * devices == 4 * (
        copies_of_all + copies_of_key_value_and_scale + copies_of_head_scales
    )


def test_planning_memory_does_not_start_jax():
    program = "import sys, palm_jax.plan.memory; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_70_billion_parameters_over_64_devices_keep_8_75_gigabytes_of_adamws_moments():
    """Lion's are half of it; parameters, gradient and AdamW's take 16 bytes each, 1120 GB."""
    run = config.load(CONFIGS / "palm_8b.yaml", ["optimizer={name: adamw}"])
    each = memory.optimizer_bytes_per_parameter(run)
    assert each * 70e9 / 64 == 8.75e9
    lion = config.load(CONFIGS / "palm_8b.yaml", ["optimizer={name: lion}"])
    assert memory.optimizer_bytes_per_parameter(lion) * 70e9 / 64 == 4.375e9
    over_64 = config.override(run, ["mesh={data: 1, fsdp: 64, tensor: 1}"])
    arrays = memory.on_each_device(over_64, sharding.RULES).arrays
    whole = sum(sum(groups.values()) for groups in arrays.values()) * 64
    assert whole == 16 * parameters.number(run.model, padded=True)
