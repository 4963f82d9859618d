"""A digest tells any two arrays of bits apart, and never how they lie on the devices."""

from __future__ import annotations

import functools
import hashlib
import json
from typing import Any, NamedTuple

import flax.struct
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from palm_jax.record import digests

# Written from the description, in Python's unbounded integers.
CONSTANTS = [
    (0x9E3779B9, (16, 13, 16), (0x85EBCA6B, 0xC2B2AE35)),
    (0x3C6EF372, (16, 15, 16), (0x7FEB352D, 0x846CA68B)),
]


def mix(word: int, shifts: tuple[int, ...], multipliers: tuple[int, ...]) -> int:
    word ^= word >> shifts[0]
    word = word * multipliers[0] % 2**32
    word ^= word >> shifts[1]
    word = word * multipliers[1] % 2**32
    return word ^ (word >> shifts[2])


def expected_hex(x: np.ndarray) -> str:
    last = x.shape[-1] if x.shape else 1
    size = x.dtype.itemsize
    text = ""
    for seed, shifts, multipliers in CONSTANTS:
        total = 0
        for index in range(x.size):
            raw = x.reshape(-1)[index].tobytes()
            row, column = divmod(index, last)
            word = mix(mix(row ^ seed, shifts, multipliers) ^ column, shifts, multipliers)
            for start in range(0, size, 4):  # little-endian: the low word first
                pattern = int.from_bytes(raw[start : start + 4], "little")
                word = mix(word ^ pattern, shifts, multipliers)
            total += word
        text += f"{total % 2**32:08x}"
    return text


def leaf_hex(x: Any) -> str:
    return digests.digest({"x": x}).leaves["x"]


DTYPES = [
    np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
    np.int32, np.uint32, np.int16, np.uint16, np.int8, np.uint8,
]  # fmt: skip


def random_bits(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return raw.view(dtype).reshape(shape)


SHAPES = [(), (7,), (3, 5), (2, 1, 3, 2), (3, 0)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_words_equal_a_loop_over_the_elements(dtype):
    tree = {str(shape): random_bits(dtype, shape) for shape in SHAPES}
    expected = {path: expected_hex(x) for path, x in tree.items()}
    assert digests.digest(jax.tree.map(jnp.asarray, tree)).leaves == expected
    assert digests.digest(tree).leaves == expected  # host arrays as well


def test_booleans_count_as_zero_and_one():
    x = np.array([[True, False, True], [False, False, True]])
    assert leaf_hex(jnp.asarray(x)) == expected_hex(x.view(np.uint8))


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint64])
def test_64_bit_elements_count_with_both_words(dtype):
    x = random_bits(dtype, (3, 4))
    with jax.enable_x64(True):
        assert leaf_hex(jnp.asarray(x)) == expected_hex(x)
    # Elsewhere JAX would halve them without a word.
    with pytest.raises(TypeError, match=r"leaf 'x' is .*64"):
        leaf_hex(x)
    with pytest.raises(TypeError, match=r"leaf 'x' is .*64"):
        digests.leaf_digests({"x": x})


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int4])
def test_dtypes_without_a_digest_are_refused_by_leaf(dtype):
    with pytest.raises(TypeError, match="no digest for leaf 'x'"):
        leaf_hex(jnp.zeros(3, dtype))


def test_typed_keys_count_by_their_data():
    keys = jax.random.split(jax.random.key(3), 4)
    assert leaf_hex(keys) == expected_hex(np.asarray(jax.random.key_data(keys)))
    assert digests.digest({"x": keys}) != digests.digest({"x": jax.random.key_data(keys)})


SHARDINGS = [
    ((8,), ("a",), ("a", None, None)),
    ((8,), ("a",), (None, None, "a")),
    ((4, 2), ("a", "b"), ("b", "a", None)),
    ((4, 2), ("a", "b"), (None, ("b", "a"), None)),
    ((2, 4), ("a", "b"), (None, None, "b")),
    ((2, 2), ("a", "b"), ()),
]


@pytest.mark.parametrize(("mesh_shape", "axes", "spec"), SHARDINGS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_any_sharding_gives_the_same_words(mesh_shape, axes, spec, dtype):
    x = random_bits(dtype, (8, 16, 8))
    devices = np.array(jax.devices()[: int(np.prod(mesh_shape))]).reshape(mesh_shape)
    sharding = NamedSharding(Mesh(devices, axes), PartitionSpec(*spec))
    words = digests.digest_tree({"x": jax.device_put(x, sharding)})["x"]
    assert words.is_fully_replicated  # every process of several can read them
    assert words.sharding.mesh == sharding.mesh
    first, second = np.asarray(words)
    assert f"{first:08x}{second:08x}" == whole_array_hex(dtype)


@functools.cache
def whole_array_hex(dtype: Any) -> str:
    return expected_hex(random_bits(dtype, (8, 16, 8)))


def test_digest_of_a_sharded_array_gathers_nothing():
    mesh = Mesh(np.array(jax.devices()), ("a",))
    x = jax.device_put(jnp.zeros((64, 32)), NamedSharding(mesh, PartitionSpec("a")))
    compiled = jax.jit(digests.leaf_digests).lower({"x": x}).compile().as_text()
    assert "all-reduce" in compiled
    assert "all-gather" not in compiled


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=40, deadline=None)
def test_any_flipped_bit_changes_both_words(data):
    dtype = np.dtype(data.draw(st.sampled_from([np.float32, ml_dtypes.bfloat16, np.int8])))
    x = random_bits(dtype, (4, 6), seed=1)
    changed = x.copy()
    raw = changed.view(np.uint8).reshape(-1)
    raw[data.draw(st.integers(0, raw.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    before, after = leaf_hex(x), leaf_hex(changed)
    assert before[:8] != after[:8]
    assert before[8:] != after[8:]


@hypothesis.given(st.permutations(range(6)), st.integers(0, 2))
@hypothesis.settings(max_examples=40, deadline=None)
def test_any_permutation_of_elements_changes_it(order, dim):
    x = random_bits(np.float32, (6, 6, 6), seed=2)
    moved = np.take(x, order, axis=dim)
    assert (leaf_hex(moved) == leaf_hex(x)) == (list(order) == list(range(6)))


def test_swapped_elements_and_dims_change_it():
    x = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    swapped = x.copy()
    swapped[0, 0, 0], swapped[1, 2, 3] = x[1, 2, 3], x[0, 0, 0]
    variants = [x, swapped, *(x.transpose(axes) for axes in [(1, 0, 2), (0, 2, 1), (2, 1, 0)])]
    assert len({leaf_hex(v) for v in variants}) == len(variants)


def test_what_compares_equal_or_unordered_is_told_apart_by_bits():
    patterns = [0x00000000, 0x80000000, 0x7FC00000, 0x7FC00001, 0xFFC00000, 0x00000001]
    arrays = [np.array([pattern], np.uint32).view(np.float32) for pattern in patterns]
    assert arrays[0] == arrays[1]  # 0.0 and -0.0
    assert len({leaf_hex(jnp.asarray(a)) for a in arrays}) == len(arrays)  # NaN payloads, too


@flax.struct.dataclass
class State:
    step: Any
    params: Any
    moments: Any


class Moments(NamedTuple):
    mu: Any


def example(w: Any = 1.5) -> State:
    return State(
        step=jnp.int32(7),
        params={"layers": {"w_gate_DF": jnp.full((2, 3), w, jnp.float32)}},
        moments=(Moments(mu=[jnp.ones(2, jnp.bfloat16)]), None, ()),
    )


def test_leaves_are_named_by_their_path():
    digest = digests.digest(example())
    assert list(digest.leaves) == ["moments/0/mu/0", "params/layers/w_gate_DF", "step"]
    assert digest.leaves["step"] == expected_hex(np.array(7, np.int32))


def test_whole_covers_paths_dtypes_shapes_and_leaves():
    digest = digests.digest(example())
    rows = [
        ["moments/0/mu/0", "bfloat16", [2], expected_hex(np.ones(2, ml_dtypes.bfloat16))],
        ["params/layers/w_gate_DF", "float32", [2, 3], expected_hex(np.full((2, 3), 1.5, "f4"))],
        ["step", "int32", [], expected_hex(np.array(7, np.int32))],
    ]
    text = json.dumps(rows, separators=(",", ":"))
    assert digest.whole == hashlib.sha256(text.encode()).hexdigest()[:16]
    zeros = jnp.zeros(4)
    trees = [
        {"a": zeros},
        {"b": zeros},
        {"a": zeros.astype(jnp.int32)},
        {"a": zeros.reshape(4, 1)},
        {"a": zeros.reshape(1, 4)},
        {"a": {"a": zeros}},
        {"a": zeros, "b": jnp.zeros(0)},
        zeros,
    ]
    assert len({digests.digest(tree).whole for tree in trees}) == len(trees)


def test_differing_names_changed_missing_and_new_leaves():
    old = digests.digest(example())
    assert old.differing(digests.digest(example())) == []
    assert old.differing(digests.digest(example(w=2.5))) == ["params/layers/w_gate_DF"]
    other = digests.digest({"step": jnp.int32(7), "new": jnp.int32(0)})
    missing = ["moments/0/mu/0", "new", "params/layers/w_gate_DF"]
    assert old.differing(other) == other.differing(old) == missing


def test_two_leaves_never_share_a_path():
    with pytest.raises(AssertionError, match="share a path"):
        digests.digest({"a/b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}})


def test_it_compiles_once_for_each_structure(monkeypatch):
    traced = []
    bit_words = digests._bit_words
    monkeypatch.setattr(
        digests, "_bit_words", lambda path, x: traced.append(path) or bit_words(path, x)
    )
    for value in range(3):
        digests.digest({"only_here": jnp.full((3, 2), value, jnp.float32)})
    assert traced == ["only_here"]


def test_it_runs_inside_a_jitted_step():
    @jax.jit
    def step(x: jax.Array) -> dict[str, jax.Array]:
        return digests.leaf_digests({"y": x + 1})

    first, second = np.asarray(step(jnp.arange(5))["y"])
    assert f"{first:08x}{second:08x}" == expected_hex(np.arange(1, 6, dtype=np.int32))
