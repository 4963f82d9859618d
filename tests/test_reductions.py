"""Sums over microbatches, devices and parameters against NumPy loops in the documented order."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from palm_jax import config, precision, reductions, sharding

MESHES = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 8), (8, 1), (2, 4), (4, 2)]
D_P = sharding.DATA_PARALLEL
EIGHT = reductions.Canonical(lanes=8)


def mesh_of(data: int, fsdp: int, tensor: int = 1) -> jax.sharding.Mesh:
    return sharding.make_mesh(config.Mesh(data=data, fsdp=fsdp, tensor=tensor))


def on_mesh(mesh, function, in_specs, out_specs):
    return jax.jit(
        jax.shard_map(
            function,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        ),
        compiler_options=precision.compiler_options("cpu", "canonical"),
    )


def tree_by_hand(terms: list[np.ndarray]) -> np.ndarray:
    """Neighbours first, recursively: ((t0 + t1) + (t2 + t3)) + ..., in float32."""
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return tree_by_hand(terms[:half]) + tree_by_hand(terms[half:])


def uneven(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers of very different sizes, so that another order gives another sum."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 10.0 ** rng.uniform(-4, 4, shape)).astype(np.float32)


def test_the_tree_differs_from_adding_from_left_to_right():
    terms = uneven((8, 100), 0)
    in_order = functools.reduce(np.add, terms)
    assert tree_by_hand(list(terms)).tobytes() != in_order.tobytes()


@pytest.mark.parametrize("num_terms", [1, 2, 4, 8, 16])
def test_tree_sum_adds_neighbours_first(num_terms):
    terms = uneven((num_terms, 50), num_terms)
    total = np.asarray(reductions.tree_sum(jnp.asarray(terms)))
    assert total.tobytes() == tree_by_hand(list(terms)).tobytes()


@given(size=st.integers(1, 24), seed=st.integers(0, 9))
def test_fold_adds_every_term_once(size, seed):
    terms = np.random.default_rng(seed).integers(-1000, 1000, (size, 3)).astype(np.float32)
    # Integers below 2^24 add exactly in any order.
    np.testing.assert_array_equal(reductions.fold(jnp.asarray(terms)), terms.sum(axis=0))


@pytest.mark.parametrize(("data", "fsdp"), MESHES)
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_streamed_sum_is_one_tree_a_block_and_blocks_in_order(data, fsdp, num_blocks):
    lanes, width = 8, data * fsdp
    terms = uneven((num_blocks * lanes, 64), num_blocks)
    blocks = [tree_by_hand(list(block)) for block in terms.reshape(num_blocks, lanes, 64)]
    by_hand = functools.reduce(np.add, blocks)

    order = reductions.Canonical(lanes)

    def body(passes):  # f32[passes, 1, 64], this device's
        return order.stream(lambda x: order.over(x[0], D_P), passes, 0)

    summed = on_mesh(mesh_of(data, fsdp), body, PartitionSpec(None, D_P), PartitionSpec())(
        terms.reshape(-1, width, 64)
    )
    assert np.asarray(summed).tobytes() == by_hand.tobytes()


@pytest.mark.parametrize(("data", "fsdp"), [(4, 1), (8, 1), (2, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_sum_is_shared_out_among_devices_with_the_tree_s_bits(data, fsdp, dtype):
    terms = jnp.asarray(uneven((8, 3, 64, 400), 5), dtype)
    assert terms[0].size >= reductions.WORTH_SLICING > terms[0, 0].size
    axes = "data" if fsdp == 1 else D_P
    layout = PartitionSpec(axes)

    def body(terms):
        return EIGHT.over(terms[0], axes), EIGHT.over(terms[0, 0], axes)

    run = on_mesh(mesh_of(data, fsdp), body, layout, PartitionSpec())
    whole, small = run(terms[: data * fsdp])
    wide = list(np.asarray(terms[: data * fsdp], np.float32))
    by_hand = jnp.asarray(tree_by_hand(wide), dtype)
    assert np.asarray(whole).tobytes() == np.asarray(by_hand).tobytes()
    assert np.asarray(small).tobytes() == np.asarray(by_hand[0]).tobytes()
    assert "all-to-all" in run.lower(terms[: data * fsdp]).compile().as_text()


def test_streamed_sum_keeps_negative_zeros_and_counts_exactly():
    terms = np.full((8, 1, 4), -0.0, np.float32), np.full((8, 1), 2**24 + 1, np.int32)

    def body(passes):
        return reductions.Canonical(8).stream(lambda x: jax.tree.map(lambda y: y[0], x), passes, 0)

    zeros, count = on_mesh(mesh_of(1, 1), body, PartitionSpec(), PartitionSpec())(terms)
    assert np.asarray(zeros).tobytes() == np.full(4, -0.0, np.float32).tobytes()
    assert int(count) == 8 * (2**24 + 1)


@pytest.mark.parametrize(("data", "fsdp"), MESHES)
@pytest.mark.parametrize("axis", [0, 1, None])
def test_gradient_of_gather_is_the_tree_of_every_devices_gradient(data, fsdp, axis):
    width = data * fsdp
    whole = uneven((16, 8), 1)
    factors = uneven((width, 16, 8), 2)  # device i's gradient with respect to the parameter

    def body(shard, factor):
        return jax.grad(
            lambda p: jnp.sum(
                reductions.gather(p, None, axis, jnp.dtype(jnp.float32), EIGHT) * factor[0]
            )
        )(shard)

    layout = PartitionSpec(*("fsdp" if dim == axis else None for dim in range(2)))
    gradient = on_mesh(mesh_of(data, fsdp), body, (layout, PartitionSpec(D_P)), layout)(
        whole, factors
    )
    assert np.asarray(gradient).tobytes() == tree_by_hand(list(factors)).tobytes()


@pytest.mark.parametrize(("data", "fsdp"), [(1, 1), (2, 2), (1, 8)])
def test_gather_makes_the_parameter_whole_in_its_compute_format(data, fsdp):
    whole = uneven((16, 8), 3)

    def body(shard):
        return reductions.gather(shard, None, 0, jnp.dtype(jnp.bfloat16), EIGHT)

    gathered = on_mesh(mesh_of(data, fsdp), body, PartitionSpec("fsdp"), PartitionSpec())(whole)
    assert gathered.dtype == jnp.bfloat16
    assert np.asarray(gathered).tobytes() == np.asarray(whole.astype(jnp.bfloat16)).tobytes()


PARAMETERS = {
    "embedding_VD": uneven((24, 16), 0),
    "layers": {
        "norm_scale_D": uneven((3, 16), 1),
        "w_query_DHK": uneven((3, 16, 2, 4), 2),
        "w_attention_HKD": uneven((3, 2, 4, 16), 3),
        "w_gate_DF": uneven((3, 16, 1024), 4),
        "w_down_FD": uneven((3, 1024, 16), 5),
        "key_norm_scale_K": uneven((3, 4), 6),
    },
}


def reduced(data: int, fsdp: int):
    layout = jax.tree_util.tree_map_with_path(sharding.partition_spec, PARAMETERS)

    def body(tree, zero):
        matrices = reductions.MatrixReductions(EIGHT, zero)
        return matrices.mean_squares(tree), matrices.norm(tree)

    mesh = mesh_of(data, fsdp)
    return on_mesh(mesh, body, (layout, PartitionSpec()), PartitionSpec())(PARAMETERS, jnp.int32(0))


def test_mean_squares_are_of_each_layers_own_matrix_and_norm_of_all():
    mean_squares, norm = reduced(1, 8)
    # 3e-6: float32 sums of up to 16,384 positive terms against float64.
    for name, leaf in PARAMETERS["layers"].items():
        by_hand = [np.mean(np.square(layer, dtype=np.float64)) for layer in leaf]
        found = mean_squares["layers"][name]
        assert found.shape == (3, *(1,) * (leaf.ndim - 1))
        np.testing.assert_allclose(np.ravel(found), by_hand, rtol=3e-6)
    embedding = np.square(PARAMETERS["embedding_VD"], dtype=np.float64)
    np.testing.assert_allclose(np.ravel(mean_squares["embedding_VD"]), embedding.mean(), rtol=3e-6)
    everything = [np.square(x, dtype=np.float64).sum() for x in jax.tree.leaves(PARAMETERS)]
    np.testing.assert_allclose(norm, np.sqrt(sum(everything)), rtol=3e-6)


@pytest.mark.parametrize(("data", "fsdp"), MESHES[1:])
def test_reductions_over_parameters_have_the_same_bits_on_any_mesh(data, fsdp):
    for one, other in zip(
        jax.tree.leaves(reduced(1, 1)), jax.tree.leaves(reduced(data, fsdp)), strict=True
    ):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


# --- tensor parallelism ---


def over_tensor(size: int, function, in_specs, out_specs, order=EIGHT):
    split = reductions.OverTensor(size, order)
    return on_mesh(mesh_of(1, 1, size), functools.partial(function, split), in_specs, out_specs)


def test_parts_meet_as_their_names_say():
    x = uneven((5, 8), 0)  # four devices hold two columns each
    partial = uneven((4, 5, 8), 1)  # device i's term of a sum

    def body(split, x, partial):
        return split.whole(x), split.summed(partial[0]), split.total(partial[0])

    last, device = PartitionSpec(None, "tensor"), PartitionSpec("tensor")
    whole, summed, total = over_tensor(
        4, body, (last, device), (PartitionSpec(), last, PartitionSpec())
    )(x, partial)
    by_hand = tree_by_hand(list(partial))
    assert np.asarray(whole).tobytes() == x.tobytes()
    assert np.asarray(summed).tobytes() == by_hand.tobytes()
    assert np.asarray(total).tobytes() == by_hand.tobytes()


def test_twelve_parts_are_summed_like_any_other_number():
    """PaLM's 12-way split is no power of two; eight devices here stand in with six."""
    partial = uneven((6, 4, 12), 2)

    def body(split, partial):
        return split.summed(partial[0])

    summed = over_tensor(6, body, (PartitionSpec("tensor"),), PartitionSpec(None, "tensor"))(
        partial
    )
    assert (
        np.asarray(summed).tobytes() == np.asarray(reductions.fold(jnp.asarray(partial))).tobytes()
    )


def test_bfloat16_parts_are_added_in_float32_and_rounded_once():
    # 256 + 1 is 256 in bfloat16: adding there would lose every one of the ones.
    partial = np.array([256, 1, 1, 1], np.float32).reshape(4, 1, 1).repeat(4, axis=2)

    def body(split, partial):
        terms = partial[0].astype(jnp.bfloat16)
        return split.summed(terms), split.total(terms)

    specs = (PartitionSpec(None, "tensor"), PartitionSpec())
    for found in over_tensor(4, body, (PartitionSpec("tensor"),), specs)(partial):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(found, np.float32), jnp.bfloat16(259))


@pytest.mark.parametrize("order", [EIGHT, reductions.Fast()])
def test_split_products_have_the_gradients_of_whole_ones(order):
    """y = (x W1) W2 with W1 cut by columns, W2 by rows, as feed-forward and attention are."""
    rng = np.random.default_rng(3)
    x, w1, w2, g = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in [(5, 8), (8, 12), (12, 8), (5, 8)]
    )

    def body(split, x, w1, w2, g):
        def objective(x, w1, w2):
            y = split.summed(split.whole(x) @ w1 @ w2)
            return jnp.sum(y * g)

        return jax.grad(objective, argnums=(0, 1, 2))(x, w1, w2)

    columns, rows = PartitionSpec(None, "tensor"), PartitionSpec("tensor")
    specs = (columns, columns, rows)
    found = over_tensor(4, body, (*specs, columns), specs, order)(x, w1, w2, g)
    by_hand = (g @ w2.T @ w1.T, x.T @ g @ w2.T, (x @ w1).T @ g)
    for one, other in zip(found, by_hand, strict=True):
        # 1e-4: float32 products of at most twelve terms in another order.
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
