"""Estimates of second derivatives: what they are on average, and where a step takes them."""

from __future__ import annotations

import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from palm_jax import config, curvature, loss, model, reductions, sharding, step
from palm_jax.decoder.split import UNDIVIDED

ORDER = reductions.Canonical(8)
EVERYWHERE = PartitionSpec()


def mapped(function: Any, mesh: dict[str, int], in_specs: Any, out_specs: Any) -> Any:
    return jax.jit(
        jax.shard_map(
            function,
            mesh=sharding.make_mesh(config.Mesh(**mesh)),
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )
    )


def layout_of(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(sharding.partition_spec, params)


# --- Gauss-Newton-Bartlett ---

draw_alone = jax.jit(lambda logits_BLV, key: curvature.drawn(logits_BLV, key, UNDIVIDED))


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(np.float64(logits) - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def test_labels_are_drawn_as_often_as_the_softmax_says():
    logits_V = np.float32([0, 1, -2, 3, loss.MASKED])
    num = 20_000
    logits = jnp.broadcast_to(logits_V, (2, num // 2, 5))
    labels = np.asarray(draw_alone(logits, jax.random.key(3)))
    p = softmax(logits_V)
    # Five standard deviations of a count.
    deviations = 5 * np.sqrt(num * p * (1 - p))
    assert (np.abs(np.bincount(labels.ravel(), minlength=5) - num * p) <= deviations).all()


def test_devices_that_share_the_vocabulary_draw_the_labels_that_one_would():
    logits = np.random.default_rng(0).normal(size=(2, 30, 8)).astype(np.float32)
    key = jax.random.key(5)
    split = reductions.OverTensor(4, ORDER)
    together = mapped(
        lambda part: curvature.drawn(part, key, split),
        {"tensor": 4},
        PartitionSpec(None, None, "tensor"),
        EVERYWHERE,
    )
    np.testing.assert_array_equal(together(logits), draw_alone(logits, key))


def test_chunks_draw_labels_of_their_own():
    hidden, table = jnp.ones((3, 20, 4)), jnp.zeros((64, 4))
    draw = jax.jit(curvature.drawn_labels, static_argnums=(2, 3, 4, 5))
    labels = np.asarray(draw(hidden, table, 50, UNDIVIDED, None, 5, jax.random.key(0)))
    assert labels.shape == (3, 20)
    assert labels.max() < 50
    stretches = labels.reshape(3, 4, 5).swapaxes(0, 1).reshape(4, -1)
    assert len(np.unique(stretches, axis=0)) == 4


def test_squared_gradients_of_drawn_labels_are_the_gauss_newton_diagonal_on_average():
    """Of logits x W': element (v, d) is the mean over tokens of x_d^2 p_v (1 - p_v)."""
    rng = np.random.default_rng(1)
    T, D, V, num_draws = 6, 3, 5, 4096
    x_TD, w_VD = (rng.normal(size=shape).astype(np.float32) for shape in ((T, D), (V, D)))

    def once(key: jax.Array) -> jax.Array:
        labels_BL = curvature.drawn((x_TD @ w_VD.T)[None], key, UNDIVIDED)

        def cross_entropy(w_VD: jax.Array) -> jax.Array:
            return jnp.sum(loss.token_losses((x_TD @ w_VD.T)[None], labels_BL)[0])

        def gradients(labels_drawn: bool) -> Any:
            assert labels_drawn
            return types.SimpleNamespace(gradient=jax.grad(cross_entropy)(w_VD))

        return curvature.estimate(
            gradients,
            w_VD,
            "gauss_newton_bartlett",
            seed=0,
            step=jnp.int32(0),
            num_targets=T,
            unscaled=1 / T,
            zero=0,
        )

    keys = jax.random.split(jax.random.key(0), num_draws)
    estimates = np.float64(jax.jit(jax.vmap(once))(keys))
    p_TV = softmax(x_TD @ w_VD.T)
    expected = np.einsum("tv,td->vd", p_TV * (1 - p_TV), np.float64(x_TD) ** 2) / T
    # Each estimate is off by some 1.4 of its mean; so many of them by five standard errors.
    errors = 5 * estimates.std(axis=0) / np.sqrt(num_draws)
    assert (np.abs(estimates.mean(axis=0) - expected) < errors).all()
    assert (errors < 0.25 * expected).all()


# --- Hutchinson ---


def test_directions_are_normal_and_have_the_same_bits_on_any_mesh():
    params = {"layers": {"w_gate_DF": np.zeros((3, 16, 90))}, "query_scale_K": np.zeros(5)}
    layout = layout_of(params)

    def draw(params: Any, data_step: jax.Array, zero: jax.Array) -> Any:
        return curvature.direction(params, 7, data_step, zero)

    def on(mesh: dict[str, int]) -> Any:
        return mapped(draw, mesh, (layout, EVERYWHERE, EVERYWHERE), layout)

    on_one = on({})
    alone, other_step = (jax.device_get(on_one(params, np.int32(k), np.int32(0))) for k in (3, 4))
    on_eight = on({"data": 2, "fsdp": 4})(params, np.int32(3), np.int32(0))
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(on_eight), strict=True):
        np.testing.assert_array_equal(one, other)
    u = alone["layers"]["w_gate_DF"]
    # Of 4,320 deviates the mean is off by 0.015, the mean square by 0.022: five times that.
    assert abs(u.mean()) < 0.08
    assert abs((u**2).mean() - 1) < 0.11
    assert len(np.unique(u)) > 0.99 * u.size
    assert np.mean(u == other_step["layers"]["w_gate_DF"]) < 0.01


@pytest.mark.parametrize("mesh", [{}, {"data": 2, "fsdp": 4}], ids=str)
def test_product_along_a_direction_is_that_of_the_hessian(mesh):
    rng = np.random.default_rng(2)
    # One parameter is cut along D, of the other every device has a copy.
    params = {"w_up_DF": rng.normal(size=(8, 3)), "scale_K": rng.normal(size=3)}
    params = jax.tree.map(np.float32, params)
    u = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), params)
    x_BD = rng.normal(size=(8, 8)).astype(np.float32)

    def objective(whole: Any, x_BD: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x_BD @ whole["w_up_DF"]) ** 2 * jnp.exp(whole["scale_K"]))

    def gathered(params: Any, x_BD: jax.Array) -> jax.Array:
        dims = {"w_up_DF": 0, "scale_K": None}
        whole = {
            name: reductions.gather(shard, None, dims[name], jnp.float32, ORDER)
            for name, shard in params.items()
        }
        return objective(whole, x_BD)

    def product(params: Any, u: Any, x_BD: jax.Array) -> Any:
        def backward(params: Any, x_BD: jax.Array) -> Any:
            return (jax.grad(gathered)(params, x_BD),), None

        (turned,), _ = curvature.along(backward, u)(params, x_BD)
        return turned

    layout = layout_of(params)
    rows = PartitionSpec(sharding.DATA_PARALLEL)
    found = mapped(product, mesh, (layout, layout, rows), layout)(params, u, x_BD)
    hessian = jax.hessian(objective)(params, x_BD)
    for name, blocks in hessian.items():
        wanted = sum(
            np.tensordot(block, u[other], u[other].ndim) for other, block in blocks.items()
        )
        # 1e-4: float32 sums in another order.
        np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=1e-4)


# --- in a step ---


def tokens_of(settings: config.Config, index: int) -> np.ndarray:
    shape = (settings.data.ramp.sizes[0], settings.model.sequence_length + 1)
    return np.random.default_rng((7, index)).integers(0, 257, shape).astype(np.int32)


def expected_estimate(params: Any, tokens: np.ndarray, settings: config.Config) -> Any:
    """B g * g of the first eight microbatches, all at once and without gathers."""
    inputs, m = tokens[:8, :-1], settings.model

    def hidden(params: Any) -> jax.Array:
        return model.hidden(params, inputs, settings=m, dtype=jnp.dtype(jnp.float32))

    def labels_of(row_and_number: tuple[jax.Array, jax.Array]) -> jax.Array:
        row_LD, number = row_and_number
        key = curvature.labels_key(settings.seed, jnp.int32(0), number)
        of_logits = row_LD[None], params["embedding_VD"], m.vocabulary_size
        return curvature.drawn_labels(*of_logits, UNDIVIDED, m.output_scale, None, key)[0]

    labels = jax.lax.map(labels_of, (hidden(params), jnp.arange(8)))

    def cross_entropy(params: Any) -> jax.Array:
        table = params["embedding_VD"]
        logits = loss.logits(hidden(params), table, m.vocabulary_size, scale=m.output_scale)
        log_p = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(log_p, labels[..., None], axis=-1))

    return jax.tree.map(lambda g: inputs.size * g * g, jax.grad(cross_entropy)(params))


def test_step_averages_an_estimate_of_its_first_block_at_every_kth_update(small):
    settings = small(
        optimizer={"name": "sophia", "refresh_every": 2},
        **{"data.ramp": {"sizes": [16]}, "model.num_layers": 1},
    )
    program = step.make_program(settings, sharding.make_mesh(settings.mesh), 256)
    state = program.init()
    params = jax.device_get(state.params)
    averages = [jax.device_get(state.optimizer["moments"].curvature)]
    for index, skip_above in enumerate([np.inf, np.inf, 0.0, np.inf]):
        controls = step.controls(skip_above=skip_above)
        state, _ = program.step(state, program.put(tokens_of(settings, index)), controls)
        averages.append(jax.device_get(state.optimizer["moments"].curvature))
    estimate = jax.jit(expected_estimate, static_argnums=2)(
        params, tokens_of(settings, 0), settings
    )
    for found, wanted in zip(jax.tree.leaves(averages[1]), jax.tree.leaves(estimate), strict=True):
        # 1e-3: squares of float32 sums in another order, some of which nearly cancel.
        wanted = 0.01 * np.asarray(wanted)
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5 * wanted.max())
    changed = [
        not np.array_equal(one["embedding_VD"], other["embedding_VD"])
        for one, other in itertools.pairwise(averages)
    ]
    # The third update was skipped: the step after it makes it, with an estimate of its own.
    assert changed == [True, False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"model.qk_norm": True},
        {"model.dropout": 0.1, "model.remat": "full", "numerics.loss_chunk": 4},
    ],
    ids=str,
)
def test_product_of_a_steps_hessian_is_the_slope_of_its_gradient(small, options):
    settings = small(
        optimizer={"name": "sophia", "estimator": "hutchinson"},
        **options,
        **{"mesh.data": 2, "mesh.fsdp": 2, "data.ramp": {"sizes": [8]}},
    )
    program = step.make_program(settings, sharding.make_mesh(settings.mesh), 256)
    params = program.init().params
    layout = layout_of(params)
    batch = PartitionSpec(None, sharding.DATA_PARALLEL)
    given: Any = settings, 256, jnp.int32(0)

    def product(params: Any, tokens: jax.Array, u: Any) -> Any:
        return step.gradients(params, tokens, *given, direction=u).gradient

    def gradient(params: Any, tokens: jax.Array) -> Any:
        return step.gradients(params, tokens, *given).gradient

    mesh = {"data": 2, "fsdp": 2}
    tokens = program.put(tokens_of(settings, 0)[program.rows_here(8)])
    rng = np.random.default_rng(4)
    u = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), params)
    found = mapped(product, mesh, (layout, batch, layout), layout)(params, tokens, u)
    of = mapped(gradient, mesh, (layout, batch), layout)
    small_step = 2.0**-12
    ahead = of(jax.tree.map(lambda p, u: p + small_step * u, params, u), tokens)
    behind = of(jax.tree.map(lambda p, u: p - small_step * u, params, u), tokens)
    for one, up, down in zip(*map(jax.tree.leaves, (found, ahead, behind)), strict=True):
        slope = (np.float64(up) - np.float64(down)) / (2 * small_step)
        # What the third derivatives and the roundings of the gradient leave.
        np.testing.assert_allclose(one, slope, rtol=0, atol=5e-3 * np.abs(slope).max())
