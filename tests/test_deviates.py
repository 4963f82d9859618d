from __future__ import annotations

import statistics

import jax
import numpy as np
import pytest

from palm_jax import deviates


def deviates_of(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    make = jax.jit(deviates.normal, static_argnums=1)
    return np.asarray(make(jax.random.key(seed), shape, np.int32(0)))


def test_deviates_are_the_quantiles_of_their_random_bits():
    found = deviates_of(3, (4096,))
    bits = np.asarray(jax.random.bits(jax.random.key(3), (4096,), np.uint32))
    share = ((bits >> 9).astype(np.float64) + 0.5) / 2**23
    quantile = statistics.NormalDist().inv_cdf  # Wichura's algorithm, in float64
    expected = np.array([quantile(s) for s in share])
    # Some four units of the last place of float32; near 0 the number is as exact as its bits.
    np.testing.assert_allclose(found, expected, rtol=5e-7)


def test_the_outermost_deviates_are_finite_and_right():
    ends = np.array([-1 + 2.0**-23, -(2.0**-23), 2.0**-23, 1 - 2.0**-23], np.float32)
    found = np.asarray(jax.jit(deviates.inverse_error_function)(ends, np.int32(0))) * 2**0.5
    expected = [statistics.NormalDist().inv_cdf((1 + float(x)) / 2) for x in ends]
    np.testing.assert_allclose(found, expected, rtol=5e-7)
    assert 5.2 < found[3] < 5.3


def test_deviates_have_the_moments_of_a_normal_distribution():
    found = deviates_of(0, (1000, 1000)).astype(np.float64)
    # Standard errors of the first four moments over 10^6 draws, times five.
    for power, moment, error in ((1, 0, 1e-3), (2, 1, 1.42e-3), (3, 0, 3.9e-3), (4, 3, 9.8e-3)):
        assert abs((found**power).mean() - moment) < 5 * error


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_bits_do_not_depend_on_how_an_array_is_cut(width):
    # jax.lax.erf_inv fails here for a width of 4 with jax 0.12 on some processors.
    x = np.random.default_rng(0).uniform(-1, 1, (64, 16)).astype(np.float32)
    function = jax.jit(deviates.inverse_error_function)
    parts = [function(x[:, i : i + width], np.int32(0)) for i in range(0, 16, width)]
    whole = np.asarray(function(x, np.int32(0)))
    assert np.concatenate(parts, axis=1).tobytes() == whole.tobytes()
