"""Products in eight bits against loops in NumPy and ml_dtypes."""

from __future__ import annotations

import functools
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.linen import fp8_ops
from hypothesis import given
from hypothesis import strategies as st

from palm_jax import config, precision, reductions
from palm_jax.precision import float8

OPTIONS = precision.compiler_options("cpu", "canonical")
DELAYED = config.Precision(policy="float8", float8_history=3)


def compiled(function):
    return jax.jit(function, compiler_options=OPTIONS)


def e4m3(x) -> np.ndarray:
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def e5m2(x) -> np.ndarray:
    return np.clip(x, -57344, 57344).astype(ml_dtypes.float8_e5m2).astype(np.float32)


def matrices(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


# --- one scale for all, or one for 128 ---


def outliers() -> np.ndarray:
    x = np.ones(256, np.float32)
    x[0], x[5], x[200] = 1000, 0.001, 0.001
    return x


def test_one_scale_for_all_loses_what_is_small_beside_the_largest():
    x, scale = outliers(), np.float32(448) / np.float32(1000)
    found = np.asarray(
        compiled(functools.partial(float8.quantised, dtype=float8.FORWARD))(x, scale)
    )
    back = found.astype(np.float32) / scale
    np.testing.assert_allclose(back[0], 1000, rtol=1e-6)
    assert np.all(back[[5, 200]] == 0)
    others = np.delete(back, [0, 5, 200])
    np.testing.assert_allclose(others, 0.9765625, rtol=1e-6)


def test_blocks_keep_what_is_small_away_from_the_largest():
    blocks = compiled(functools.partial(float8.lines, dtype=float8.FORWARD))(outliers()[:, None])
    back = (np.asarray(blocks.values, np.float32) * np.asarray(blocks.back)[:, None]).reshape(-1)
    assert back[5] == 0
    assert back[200] == np.float32(0.0009765625)
    assert np.all(np.delete(back[128:], 200 - 128) == 1)


def test_what_is_too_large_saturates_and_what_is_not_finite_shows():
    x = np.array([449.0, -1e30, np.inf, -np.inf, np.nan, 0.0], np.float32)
    found = np.asarray(float8.quantised(x, np.float32(1), float8.FORWARD), np.float32)
    np.testing.assert_equal(found, np.float32([448, -448, np.nan, np.nan, np.nan, 0]))


# --- delayed ---


def delayed_by_hand(x, w, g, scales):
    """Values that eight bits hold, multiplied in float64."""
    sx, sw, sg = (np.float32(s) for s in scales)
    qx, qw, qg = e4m3(x * sx), e4m3(w * sw), e5m2(g * sg)
    qx, qw, qg = (q.astype(np.float64) for q in (qx, qw, qg))
    return qx @ qw / (sx * sw), qg @ qw.T / (sg * sw), qx.T @ qg / (sx * sg)


def test_delayed_product_and_gradients_are_those_of_the_rounded_values():
    x, w, g = matrices((24, 40), (40, 16), (24, 16))
    scales = jnp.float32([100.0, 31.7, 2000.0])

    def pull(x, w, slot, g):
        y, backward = jax.vjp(
            lambda x, w, slot: float8.delayed(x, w, scales, slot, jnp.float32), x, w, slot
        )
        return y, *backward(g)

    y, x_gradient, w_gradient, seen = compiled(pull)(x, w, jnp.zeros(3), g)
    wanted = delayed_by_hand(x, w, g, scales)
    for found, by_hand in zip((y, x_gradient, w_gradient), wanted, strict=True):
        # 1e-6: float32 sums of 16 to 40 terms.
        np.testing.assert_allclose(found, by_hand, atol=1e-6 * np.abs(by_hand).max())
    np.testing.assert_array_equal(seen, [np.abs(x).max(), np.abs(w).max(), np.abs(g).max()])


def history_by_hand(amaxes: list[float], steps: int, end: float, margin: int) -> list[float]:
    """Scales after each step: of the largest of the last `steps` values."""
    scale, scales = np.float32(1), []
    for now in range(len(amaxes)):
        recent = np.float32(amaxes[max(0, now - steps + 1) : now + 1])
        highest = recent.max()
        if np.isfinite(highest) and highest > 0:
            with np.errstate(over="ignore"):
                candidate = np.float32(end) / highest
            if np.isfinite(candidate):
                scale = np.float32(candidate * np.float32(2.0**-margin))
        scales.append(float(scale))
    return scales


CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
ONE_LAYER = config.load(CONFIGS / "tiny.yaml", ["model.num_layers=1"]).model


@given(
    amaxes=st.lists(
        st.one_of(
            st.floats(2.0**-20, 2.0**20, width=32), st.sampled_from([0.0, np.inf, 2.0**-126])
        ),
        min_size=1,
        max_size=8,
    ),
    margin=st.integers(0, 3),
)
def test_delayed_scales_follow_the_largest_of_the_last_steps(amaxes, margin):
    settings = DELAYED.model_copy(update={"float8_margin": margin})
    scalings, found = {"up": float8.init(settings, ONE_LAYER)["up"]}, []
    for now in amaxes:
        scalings = float8.after(scalings, {"up": jnp.full((1, 3), now)}, settings)
        found.append(np.asarray(scalings["up"].scale)[0])
    for role, end in enumerate((448, 448, 57344)):
        wanted = history_by_hand(amaxes, 3, end, margin)
        np.testing.assert_array_equal([s[role] for s in found], np.float32(wanted))


@pytest.mark.parametrize("amax", [0.0, 0.3, 17.0, 1e20, np.inf])
def test_delayed_scales_are_those_of_flax(amax):
    """Flax keeps the reciprocal."""
    reciprocal = fp8_ops.compute_scale(jnp.float32(amax), jnp.float32(1 / 8.0), 448.0)
    before = float8.Scaling(jnp.zeros((1, 3, 4)), jnp.full((1, 3), 8.0))
    scaling = float8.after({"up": before}, {"up": jnp.full((1, 3), amax)}, DELAYED)["up"]
    np.testing.assert_allclose(scaling.scale[0, 0], 1 / reciprocal, rtol=3e-7)


# --- block ---


def blocks_by_hand(a, b, a_back, b_back, block=128):
    """Sum over blocks of the contraction of (a / a_back) (b / b_back) a_back b_back."""
    total = np.zeros((a.shape[0], b.shape[1]))
    for start in range(0, a.shape[1], block):
        span = slice(start, start + block)
        sa, sb = a_back(a[:, span]), b_back(b[span])
        total += (
            (sa[0](a[:, span] / sa[1])).astype(np.float64)
            @ sb[0](b[span] / sb[1])
            * (sa[1] * sb[1])
        )
    return total


def line_scales(rounded, end, axis):
    def scales(x):
        return rounded, np.maximum(np.abs(x).max(axis=axis, keepdims=True), 1e-4) / end

    return scales


def tile_scales(x):
    back = np.empty((1, x.shape[1]), np.float32)
    for start in range(0, x.shape[1], 128):
        back[:, start : start + 128] = max(np.abs(x[:, start : start + 128]).max(), 1e-4) / 448
    return e4m3, back


@pytest.mark.parametrize("shape", [(130, 300, 260), (5, 16, 24), (128, 256, 128)])
def test_block_product_and_gradients_are_those_of_the_rounded_values(shape):
    T, I, O = shape  # noqa: E741
    x, w, g = matrices((T, I), (I, O), (T, O), seed=1)
    x *= np.exp(2 * matrices((T, I), seed=2)[0])  # values of very different sizes
    g *= 1e-3

    def pull(x, w, g):
        y, backward = jax.vjp(lambda x, w: float8.block(x, w, jnp.float32), x, w)
        return y, *backward(g)

    inputs = line_scales(e4m3, 448, 1), tile_scales
    to_inputs = line_scales(e5m2, 57344, 1), tile_scales
    to_kernel = line_scales(e4m3, 448, 1), line_scales(e5m2, 57344, 0)
    wanted = (
        blocks_by_hand(x, w, *inputs),
        blocks_by_hand(g, np.ascontiguousarray(w.T), *to_inputs),
        blocks_by_hand(np.ascontiguousarray(x.T), g, *to_kernel),
    )
    for found, by_hand in zip(compiled(pull)(x, w, g), wanted, strict=True):
        # A value on the edge between two numbers of eight bits may fall to either side, as it
        # is divided by a scale or multiplied by its reciprocal.
        error = np.abs(found - by_hand) / np.abs(by_hand).max()
        assert np.mean(error > 1e-6) < 0.02
        assert np.max(error) < 0.01


def test_blocks_are_nearer_than_one_scale_where_sizes_differ():
    """A column a hundred thousand times the others, as activations have them."""
    x, w = matrices((64, 256), (256, 32))
    x[:, 3] *= 1e5
    w[3] *= 1e-5
    exact = x.astype(np.float64) @ w
    scales = jnp.float32([448 / np.abs(x).max(), 448 / np.abs(w).max(), 1])
    tensor = compiled(lambda: float8.delayed(x, w, scales, jnp.zeros(3), jnp.float32))()
    blocks = compiled(lambda: float8.block(x, w, jnp.float32))()
    errors = [np.linalg.norm(y - exact) / np.linalg.norm(exact) for y in (tensor, blocks)]
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_block_with_a_value_that_is_not_finite_gives_none_that_is(value):
    x, w = matrices((4, 256), (256, 8))
    x[1, 7] = value
    found = np.asarray(compiled(lambda x: float8.block(x, w, jnp.float32))(x))
    assert np.all(np.isnan(found[1]))
    assert np.all(np.isfinite(found[[0, 2, 3]]))


# --- over a batch ---


def test_a_stream_keeps_the_maximum_of_what_is_marked():
    order = reductions.Canonical(lanes=4)
    values = np.random.default_rng(0).uniform(0, 9, (8, 3)).astype(np.float32)

    def run(values):
        def one_pass(x):
            return x, reductions.Largest({"a": x * 2})

        return order.stream(one_pass, values, 0)

    mesh = jax.make_mesh((1, 1), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    nothing = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(run, mesh=mesh, in_specs=nothing, out_specs=nothing, check_vma=False)
    sums, largest = jax.jit(mapped)(values)
    np.testing.assert_array_equal(largest.values["a"], 2 * values.max(axis=0))
    np.testing.assert_allclose(sums, values.sum(axis=0), rtol=1e-6)
