"""What a step needs beside its arguments: the compiler's word, and how it grows."""

from __future__ import annotations

import pathlib

import pytest

from palm_jax import config, sharding
from palm_jax.plan import activations, memory

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
GIB = 2**30


def planned(name: str, *overrides: str) -> float:
    """GiB of arguments and temporaries on a device."""
    run = config.load(CONFIGS / f"{name}.yaml", [*overrides, "mesh.emulated_devices=null"])
    kept = memory.on_each_device(run, sharding.RULES).arguments
    return (kept + activations.on_each_device(run, sharding.RULES).total) / GIB


ON_16 = (
    *("mesh.fsdp=4", "mesh.tensor=4", "numerics.lanes=4", "numerics.microbatch=4"),
    *("model.remat=full", "data.ramp.starts=[0]", "data.ramp.sizes=[64]"),
)


@pytest.mark.parametrize(
    ("name", "overrides", "told"),
    [
        ("palm_8b", (), 0.386 + 5.236),
        ("palm_8b", ("model.remat=full",), 0.386 + 2.441),
        ("palm_8b", ON_16, 6.170 + 9.720),
        ("palm_62b", (), 1.382 + 15.596),
        ("palm_62b", ("model.remat=full",), 1.382 + 6.845),
    ],
)
def test_palms_sizes_are_within_a_tenth_of_the_compilers_word(name, overrides, told):
    """Arguments and temporaries as libtpu 0.0.42 allots them; a slow test asks it about 540B."""
    assert planned(name, *overrides) == pytest.approx(told, rel=0.1)


def test_less_is_kept_where_more_is_computed_again():
    kept = [
        activations.kept_of_layer(config.load(CONFIGS / "palm_8b.yaml", [f"model.remat={remat}"]))
        for remat in ("none", "attention", "dots", "full")
    ]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 4
    # The stream alone: 2048 tokens of 4096 numbers of two bytes, over four devices.
    assert kept[-1] == 2048 * 4096 * 2 // 4


def test_chunks_of_the_loss_and_the_layout_change_what_they_should():
    whole = planned("palm_8b", *ON_16)
    # Three float32 arrays of 4 x 2048 tokens by a quarter of the vocabulary.
    logits = 3 * 4 * 4 * 2048 * 64_000 / GIB
    chunked = planned("palm_8b", *ON_16, "numerics.loss_chunk=256")
    assert whole - logits < chunked < whole - logits / 2
    assert planned("palm_8b", *ON_16, "numerics.reduction=fast") <= whole
    # A tree of two levels keeps as many sums more.
    lanes = planned("palm_8b", *ON_16, "numerics.lanes=16")
    stored = 4 * 8_632_532_992 / 16 / GIB
    # Keys and values, which every tensor-parallel device holds, are 2.3% of what is stored.
    assert lanes - whole == pytest.approx(2 * stored, rel=0.03)
