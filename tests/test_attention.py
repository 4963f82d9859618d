"""Both ways of attention against NumPy loops in float64, and what the TPU compiler says.

Letters as in model.py.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from palm_jax import attention
from palm_jax.errors import CannotDo, WrongInput

# Compiles in half the time. For results compared within tolerances or with one another.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


class Arrays(NamedTuple):
    """Heads attended to, or their cotangent, and the three gradients."""

    heads_BLHK: Any
    query_BLHK: Any
    key_BSK: Any
    value_BSK: Any


def random_inputs(length: int, size: int, dtype: Any, batch: int = 2, heads: int = 2) -> Arrays:
    rng = np.random.default_rng(0)
    B, L, H, K = batch, length, heads, size
    shapes = Arrays((B, L, H, K), (B, L, H, K), (B, L, K), (B, L, K))
    cotangent, query, key, value = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    # Scores of about 2, so that a row of the softmax is neither flat nor a single one.
    return Arrays(cotangent, query * jnp.asarray(2 * size**-0.5, dtype), key, value)


def documents(length: int, starts: tuple[int, ...]) -> np.ndarray:
    """Row 0 has documents that start at these positions, row 1 is one document."""
    numbers_BL = np.zeros((2, length), np.int32)
    for start in starts:
        numbers_BL[0, start:] += 1
    return numbers_BL


def numpy_attention(inputs: Arrays, documents_BL: np.ndarray | None) -> Arrays:
    """One query of one head at a time, in float64; gradients by the chain rule."""
    cotangent, query, key, value = (np.asarray(x, np.float64) for x in inputs)
    found = Arrays(*(np.zeros_like(x) for x in (cotangent, query, key, value)))
    for b, t, h in np.ndindex(query.shape[:3]):
        seen = np.arange(t + 1)
        if documents_BL is not None:
            seen = seen[documents_BL[b, : t + 1] == documents_BL[b, t]]
        weights = np.exp(key[b, seen] @ query[b, t, h])
        weights /= weights.sum()
        found.heads_BLHK[b, t, h] = weights @ value[b, seen]
        found.value_BSK[b, seen] += np.outer(weights, cotangent[b, t, h])
        from_weights = value[b, seen] @ cotangent[b, t, h]
        from_scores = weights * (from_weights - weights @ from_weights)
        found.query_BLHK[b, t, h] = from_scores @ key[b, seen]
        found.key_BSK[b, seen] += np.outer(from_scores, query[b, t, h])
    return found


@functools.partial(quick_jit, static_argnames="kind")
def attended(inputs: Arrays, documents_BL: jax.Array | None, *, kind: attention.Kind) -> Arrays:
    def attend(query_BLHK: jax.Array, key_BSK: jax.Array, value_BSK: jax.Array) -> jax.Array:
        return attention.attention(
            query_BLHK,
            key_BSK,
            value_BSK,
            attention.Given(documents_BL),
            kind=kind,
            interpret=True,
        )

    heads_BLHK, backward = jax.vjp(attend, *inputs[1:])
    return Arrays(heads_BLHK, *backward(inputs.heads_BLHK))


def assert_near(found: Arrays, expected: Arrays, tolerance: float) -> None:
    """Each array within `tolerance` of its own largest value."""
    for name in Arrays._fields:
        array = np.asarray(getattr(expected, name))
        atol = tolerance * max(1, np.abs(array).max())
        np.testing.assert_allclose(getattr(found, name), array, rtol=0, atol=atol, err_msg=name)


CASES = [
    # kind, length, head size, starts of documents (None: not isolated)
    ("xla", 1, 6, None),
    ("xla", 9, 6, None),
    ("xla", 9, 6, (4, 5)),
    ("xla", 128, 128, (70,)),
    ("splash", 128, 128, None),
    ("splash", 128, 64, (70,)),
    ("splash", 256, 128, None),
    # One document ends with a block, and one starts inside a block: its last queries see
    # nothing of the first.
    ("splash", 256, 128, (40, 128, 200)),
]


@pytest.fixture
def blocks_of_128(monkeypatch):
    """Several blocks in a short sequence."""
    monkeypatch.setattr(attention, "LARGEST_BLOCK", 128)
    attended.clear_cache()


@pytest.mark.usefixtures("blocks_of_128")
@pytest.mark.parametrize(("kind", "length", "size", "starts"), CASES)
def test_attention_and_its_gradients_are_those_of_the_formula(kind, length, size, starts):
    inputs = random_inputs(length, size, jnp.float32)
    documents_BL = None if starts is None else documents(length, starts)
    found = attended(inputs, documents_BL, kind=kind)
    expected = numpy_attention(inputs, documents_BL)
    # Float32 is good to 6e-8; sums have up to 256 terms, the key's twice as many.
    assert_near(found, expected, 2e-6)


@pytest.mark.usefixtures("blocks_of_128")
@pytest.mark.parametrize("kind", ["xla", "splash"])
def test_bfloat16_attention_stays_near_the_formula(kind):
    inputs = random_inputs(256, 128, jnp.bfloat16)
    documents_BL = documents(256, (100,))
    found = attended(inputs, documents_BL, kind=kind)
    expected = numpy_attention(inputs, documents_BL)
    for name in Arrays._fields:
        result, array = getattr(found, name), getattr(expected, name)
        assert result.dtype == jnp.bfloat16
        error = np.linalg.norm(np.asarray(result, np.float64) - array) / np.linalg.norm(array)
        # Rounding to eight bits errs by 2^-9 at most and about half of that in the mean; weights
        # and their gradients are rounded before the products, and products after them.
        # XLA:CPU of jax 0.12 keeps some sums of products in bfloat16 where B > 1.
        assert 2**-11 < error < (2**-8 if kind == "splash" else 2**-6)


def test_one_block_gives_what_several_do(monkeypatch):
    inputs = random_inputs(384, 128, jnp.float32, batch=1, heads=1)
    results = []
    for largest in (128, 512):
        monkeypatch.setattr(attention, "LARGEST_BLOCK", largest)
        assert attention.block_size(384) == min(largest, 384)
        attended.clear_cache()
        results.append(attended(inputs, None, kind="splash"))
    assert_near(*results, 2e-6)


def test_blocks_divide_the_sequence_and_are_multiples_of_128():
    found = {length: attention.block_size(length) for length in (128, 256, 640, 768, 2048, 8064)}
    assert found == {128: 128, 256: 256, 640: 128, 768: 384, 2048: 512, 8064: 384}


def test_splash_refuses_what_it_cannot_compute():
    attention.check("splash", "tpu", 2048, 256)
    attention.check("splash", "tpu", 128, 64)
    attention.check("xla", "cpu", 9, 512)
    with pytest.raises(WrongInput, match=r"model\.sequence_length=2112 .* 128 .* model\.attention"):
        attention.check("splash", "tpu", 2112, 256)
    with pytest.raises(WrongInput, match=r"model\.head_size=258 .* 256 .* model\.attention"):
        attention.check("splash", "tpu", 2048, 258)
    with pytest.raises(CannotDo, match=r"model\.attention=splash .* TPUs.* cpu; set model\.att"):
        attention.check("splash", "cpu", 2048, 256)


# --- what a query sees --------------------------------------------------------------------


def test_a_document_keeps_its_end_token_and_the_next_one_starts_after_it():
    ids_BL = jnp.array([[5, 0, 7, 0, 0, 3], [0, 1, 2, 3, 4, 0], [1, 1, 1, 1, 1, 1]])
    expected_BL = [[0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]
    assert attention.document_numbers(ids_BL, 0).tolist() == expected_BL


def test_visible_keys_are_the_past_of_the_same_document():
    assert attention.visible(None, 3).astype(int).tolist() == [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]
    seen = attention.visible(jnp.array([[0, 0, 1], [0, 1, 1]]), 3).astype(int).tolist()
    assert seen == [[[1, 0, 0], [1, 1, 0], [0, 0, 1]], [[1, 0, 0], [0, 1, 0], [0, 1, 1]]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_query_that_sees_nothing_gives_numbers_and_leaves_other_rows_alone(dtype):
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.normal(size=shape), dtype) for shape in ((2, 4, 2, 6), (2, 4, 6), (2, 4, 6))
    )
    all_seen = np.array(attention.visible(jnp.zeros((2, 4), jnp.int32), 4))
    first_blind = all_seen.copy()
    first_blind[0] = False

    @quick_jit
    def run(visible_BLS):
        def total(query, key, value):
            out = attention.xla(query, key, value, visible_BLS)
            return jnp.sum(out.astype(jnp.float32) ** 2), out

        return jax.grad(total, argnums=(0, 1, 2), has_aux=True)(query, key, value)

    for full, blind in zip(
        jax.tree.leaves(run(all_seen)), jax.tree.leaves(run(first_blind)), strict=True
    ):
        assert np.isfinite(np.asarray(blind, np.float32)).all()
        assert np.asarray(full[1]).tobytes() == np.asarray(blind[1]).tobytes()


# --- softmax ------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def both_ways(softmax, scores, cotangent):
    probabilities, backward = jax.vjp(softmax, scores)
    return probabilities, backward(cotangent)[0]


@given(seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([0.1, 3.0, 100.0]))
@settings(max_examples=10)
def test_softmax_is_jaxs_forwards_and_backwards(seed, spread):
    rng = np.random.default_rng(seed)
    scores, cotangent = (rng.normal(size=(3, 2, 7)).astype(np.float32) for _ in range(2))
    scores *= spread
    found, found_gradient = both_ways(attention.softmax, scores, cotangent)
    expected, expected_gradient = both_ways(jax.nn.softmax, scores, cotangent)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found_gradient, expected_gradient, rtol=0, atol=1e-6)


def test_softmax_gradient_is_the_slope_of_the_formula():
    rng = np.random.default_rng(0)
    scores, cotangent, direction = (rng.normal(size=(3, 2, 7)) for _ in range(3))

    def value(scores):
        exponentials = np.exp(scores)
        return (exponentials / exponentials.sum(axis=-1, keepdims=True) * cotangent).sum()

    slope = (value(scores + 1e-6 * direction) - value(scores - 1e-6 * direction)) / 2e-6
    _, gradient = both_ways(
        attention.softmax, scores.astype(np.float32), cotangent.astype(np.float32)
    )
    assert (np.asarray(gradient) * direction).sum() == pytest.approx(slope, abs=1e-6)


def test_softmax_of_hidden_and_of_huge_scores_is_finite():
    rows = jnp.array([[attention.MASKED] * 3, [1e30, 0.0, -1e30], [attention.MASKED, 2.0, 2.0]])
    expected = [[1 / 3] * 3, [1, 0, 0], [0, 0.5, 0.5]]
    np.testing.assert_allclose(attention.softmax(rows), expected, rtol=1e-6)


# --- on a mesh, in a scan of rematerialised layers ----------------------------------------

DATA_PARALLEL = ("data", "fsdp")
LAYOUT = Arrays(
    *[PartitionSpec(DATA_PARALLEL, None, "tensor")] * 2, *[PartitionSpec(DATA_PARALLEL)] * 2
)


def stacked(mesh: jax.sharding.Mesh, kind: attention.Kind, interpret: bool = False) -> Any:
    """Three layers of attention, each to the heads of the one before, and their gradients."""

    def attend(query_BLHK: Any, key_BSK: Any, value_BSK: Any, documents_BL: Any) -> jax.Array:
        def layer(heads_BLHK: jax.Array, _: None) -> tuple[jax.Array, None]:
            given = attention.Given(documents_BL)
            seen_BLHK = attention.attention(
                heads_BLHK, key_BSK, value_BSK, given, kind=kind, interpret=interpret
            )
            return heads_BLHK + seen_BLHK * seen_BLHK.shape[-1] ** -0.5, None

        policy = jax.checkpoint_policies.nothing_saveable
        layer = jax.checkpoint(layer, prevent_cse=False, policy=policy)
        return jax.lax.scan(layer, query_BLHK, length=3)[0]

    def on_device(inputs: Arrays, documents_BL: jax.Array) -> Arrays:
        heads_BLHK, backward = jax.vjp(lambda *x: attend(*x, documents_BL), *inputs[1:])
        query_BLHK, key_BSK, value_BSK = backward(inputs.heads_BLHK)
        # All heads share key and value, and this device has some of the heads.
        key_BSK, value_BSK = jax.lax.psum((key_BSK, value_BSK), "tensor")
        return Arrays(heads_BLHK, query_BLHK, key_BSK, value_BSK)

    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(LAYOUT, PartitionSpec(DATA_PARALLEL)),
        out_specs=LAYOUT,
        check_vma=False,
    )


def mesh_of(devices: Any, *shape: int) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.reshape(devices, shape), ("data", "fsdp", "tensor"))


def test_splash_on_a_mesh_gives_what_xla_gives_on_one_device():
    inputs = random_inputs(128, 128, jnp.float32)
    documents_BL = documents(128, (50,))
    devices = jax.devices()
    alone = stacked(mesh_of(devices[:1], 1, 1, 1), "xla")
    divided = stacked(mesh_of(devices[:4], 1, 2, 2), "splash", interpret=True)
    results = (quick_jit(run)(inputs, documents_BL) for run in (divided, alone))
    # Three layers, each good to about 1e-6.
    assert_near(*results, 5e-6)


# --- the TPU compiler ---------------------------------------------------------------------

ROOT = pathlib.Path(__file__).parents[1]
TOPOLOGIES = {"v4": ("v4:2x2x1", "megacore"), "v5e": ("v5e:2x2", "default")}


def compiled_by_tpu(kind: attention.Kind = "splash") -> dict[str, dict[str, Any]]:
    """What three layers of PaLM 8B's attention become; in a process that was started for this."""
    from jax.experimental import topologies

    heads, keys = ((2, 2048, 32, 256), jnp.bfloat16), ((2, 2048, 256), jnp.bfloat16)
    arguments = [heads, heads, keys, keys, ((2, 2048), jnp.int32)]
    specs = [*LAYOUT, PartitionSpec(DATA_PARALLEL)]
    found = {}
    for name, (topology, chip) in TOPOLOGIES.items():
        described = topologies.get_topology_desc(topology, platform="tpu", chip_config_name=chip)
        mesh = mesh_of(described.devices, 1, 2, 2)
        shapes = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
            for (shape, dtype), spec in zip(arguments, specs, strict=True)
        ]
        run = jax.jit(stacked(mesh, kind))
        program = run.lower(Arrays(*shapes[:-1]), shapes[-1]).compile()
        text = program.as_text()
        found[name] = {
            "temporaries": program.memory_analysis().temp_size_in_bytes,
            "kernels": [name for name in ("fwd", "dq", "dkv") if f"splash_mqa_{name}" in text],
        }
    return found


@pytest.mark.tpu_compiler
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, of the extra `tpu`"
)
def test_splash_compiles_for_tpus_and_keeps_no_scores():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "PYTHONPATH": str(ROOT),
    }
    ran = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found.keys() == TOPOLOGIES.keys()
    # One sequence and half of the heads are a device's; float32. XLA's way takes more than this.
    scores = 16 * 2048 * 2048 * 4
    for program in found.values():
        assert program["kernels"] == ["fwd", "dq", "dkv"]
        assert program["temporaries"] < scores / 4


if __name__ == "__main__":
    json.dump(compiled_by_tpu(), sys.stdout)
