"""What the narrow formats can and cannot hold; JAX's casts against ml_dtypes and NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from palm_jax import attention, precision

FORMATS = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
OPTIONS = precision.compiler_options("cpu", "canonical")


def compiled(function):
    return jax.jit(function, compiler_options=OPTIONS)


def as_unsigned(x: np.ndarray) -> np.ndarray:
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))


def awkward_values(dtype) -> np.ndarray:
    """Every value of a format, the middles between neighbours, and what lies beside those."""
    patterns = np.arange(2 ** (8 * np.dtype(dtype).itemsize), dtype=np.uint32)
    values = patterns.astype(f"u{np.dtype(dtype).itemsize}").view(dtype).astype(np.float32)
    finite = np.unique(values[np.isfinite(values)])
    middles = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(middles, np.float32(side)) for side in (-np.inf, np.inf)]
    random = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint64)
    return np.concatenate([finite, middles, *beside, random.astype(np.uint32).view(np.float32)])


@pytest.mark.parametrize("name", FORMATS)
def test_casts_agree_with_an_independent_library_bit_for_bit(name):
    values = awkward_values(FORMATS[name])
    with np.errstate(all="ignore"):
        wanted = values.astype(FORMATS[name])
    found = np.asarray(compiled(lambda x: x.astype(name))(values))
    both_nan = np.isnan(wanted.astype(np.float32)) & np.isnan(found.astype(np.float32))
    assert np.all((as_unsigned(found) == as_unsigned(wanted)) | both_nan)


@pytest.mark.parametrize(
    ("weight", "change", "result"),
    [
        (1.0, 0.001, 1.0),
        (1.0, 0.00390625, 1.0),  # half a spacing: a tie goes to even
        (1.0, 0.004, 1.0078125),
        (1.0, -0.002, 0.99609375),
        (257.0, 0.0, 256.0),
    ],
)
def test_bfloat16_swallows_small_changes(weight, change, result):
    add = compiled(lambda w, u: w + u)
    stored = add(jnp.bfloat16(weight), jnp.bfloat16(change))
    assert stored.dtype == jnp.bfloat16
    assert float(stored) == result
    # Float32, as master weights are, holds each of them.
    assert float(add(np.float32(weight), np.float32(change))) == np.float32(weight + change)


@pytest.mark.parametrize(
    ("name", "total"), [("float32", 1.0000535), ("float16", 0.25), ("bfloat16", 0.03125)]
)
def test_a_sum_stalls_where_its_spacing_is_twice_a_term(name, total):
    term = jnp.asarray(1e-4, name)
    found = compiled(lambda t: jax.lax.fori_loop(0, 10_000, lambda _, s: s + t, 0 * t))(term)
    assert float(found) == np.float32(total)
    alone, one = np.zeros((), term.dtype), np.asarray(term)
    for _ in range(10_000):
        alone = (alone + one).astype(term.dtype)
    assert as_unsigned(np.asarray(found)) == as_unsigned(alone)


@pytest.mark.parametrize(
    ("name", "value", "result"),
    [
        ("float16", 4e-8, 2.0**-24),
        ("float16", 1e-8, 0.0),
        ("float16", 1e-8 * 2**16, 6.551742553710938e-04),
        ("float16", 65519.0, 65504.0),
        ("float16", 65520.0, np.inf),
        ("float8_e4m3fn", 0.3, 0.3125),
        ("float8_e4m3fn", 464.0, 448.0),
        ("float8_e4m3fn", 465.0, np.nan),  # it has no infinity
        ("float8_e4m3fn", 2.0**-10, 0.0),
        ("float8_e5m2", 61439.0, 57344.0),
        ("float8_e5m2", 61440.0, np.inf),
        ("float8_e5m2", 1.1, 1.0),
    ],
)
def test_numbers_at_the_ends_of_formats(name, value, result):
    found = compiled(lambda x: x.astype(name))(np.float32(value))
    np.testing.assert_equal(np.float32(found), np.float32(result))


def test_exponentials_overflow_float16_early():
    exponential = compiled(jnp.exp)
    for power, value in [(12, 162754.8), (15, 3269017.0)]:
        assert np.isinf(exponential(jnp.float16(power)))
        np.testing.assert_allclose(exponential(jnp.float32(power)), value, rtol=1e-6)


@pytest.mark.parametrize(("name", "spacing"), [("bfloat16", 2.0**-12), ("float16", 2.0**-15)])
def test_spacing_of_usual_weights(name, spacing):
    weight = jnp.asarray(0.05, name)
    following = jnp.nextafter(weight, jnp.asarray(np.inf, name))
    assert float(following) - float(weight) == spacing


@pytest.mark.parametrize("name", FORMATS)
def test_matrix_products_add_in_float32(name):
    """In the format itself ones would stop adding at 2048, 256, 16 and 8."""
    row = jnp.ones((1, 4096), name)
    found = compiled(lambda a: jnp.matmul(a, a.T, preferred_element_type=jnp.float32))(row)
    assert float(found[0, 0]) == 4096
    if name.startswith(("float16", "bfloat16")):  # as the model multiplies
        assert float(compiled(lambda a: a @ a.T)(row)[0, 0]) == 4096


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_row_that_sees_nothing_gives_numbers_and_touches_no_other_row(name):
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.standard_normal((2, 4, 2, 8)), name)
    key, value = (jnp.asarray(rng.standard_normal((2, 4, 8)), name) for _ in range(2))
    causal = np.tril(np.ones((4, 4), np.bool_))
    visible = np.stack([causal, causal])
    masked = visible.copy()
    masked[0] = False

    def attend(visible):
        def total(*arrays):
            heads = attention.xla(*arrays, visible)
            return jnp.sum(heads.astype(jnp.float32) ** 2), heads

        return compiled(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(query, key, value)

    gradients, heads = attend(masked)
    for x in (*gradients, heads):
        assert np.all(np.isfinite(np.asarray(x, np.float32)))
    for one, other in zip((*gradients, heads), jax.tree.leaves(attend(visible)), strict=True):
        assert np.asarray(one)[1].tobytes() == np.asarray(other)[1].tobytes()
