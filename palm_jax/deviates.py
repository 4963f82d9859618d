"""Normal deviates whose bits depend on the key alone, not on how an array is cut.

`jax.random.normal` inverts the error function by polynomials, whose products and sums LLVM
rounds once or twice depending on the size of a device's slice (minimal program: docs/bits.md).
Here there are only operations that IEEE 754 defines to the last bit, and every product is
`rounded` before something is added to it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from palm_jax.rounding import rounded

# Of log(1 + f) - f + f^2/2 = f^3 P(f) for sqrt(1/2) <= 1 + f < sqrt(2), highest power first
# (S. L. Moshier, Cephes, logf.c).
_LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
# Of the inverse error function over x, by w = -log(1 - x^2): in w - 2.5 below w = 5, in
# sqrt(w) - 3 from there (M. Giles, Approximating the erfinv function, 2010, single precision).
_CENTRE = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)
_TAIL = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)


def _polynomial(coefficients: tuple[float, ...], x: jax.Array, zero: jax.Array | int) -> jax.Array:
    value = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = rounded(value * x, zero) + np.float32(coefficient)
    return value


def _log(x: jax.Array, zero: jax.Array | int) -> jax.Array:
    """Natural logarithm of positive normal float32 numbers, to some two units of the last place."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    # The exponent is taken so that the mantissa lies between sqrt(1/2) and sqrt(2).
    root_half = np.float32(0.5**0.5).view(np.int32)
    exponent = (bits - root_half) >> 23
    mantissa = jax.lax.bitcast_convert_type(bits - (exponent << 23), jnp.float32)
    f, e = mantissa - 1.0, exponent.astype(jnp.float32)
    square = rounded(f * f, zero)
    cubic = rounded(rounded(_polynomial(_LOG, f, zero) * f, zero) * square, zero)
    # log 2 in two parts, of which the first times any exponent is exact.
    low = rounded(e * np.float32(-2.12194440e-4), zero)
    return (f + ((cubic + low) - rounded(square * np.float32(0.5), zero))) + rounded(
        e * np.float32(0.693359375), zero
    )


def inverse_error_function(x: jax.Array, zero: jax.Array | int) -> jax.Array:
    """erfinv of float32 numbers in (-1, 1), to some three units of the last place."""
    w = -_log((1.0 - x) * (1.0 + x), zero)
    centre = _polynomial(_CENTRE, w - 2.5, zero)
    tail = _polynomial(_TAIL, jnp.sqrt(w) - 3.0, zero)
    return x * jnp.where(w < 5.0, centre, tail)


# The share of a normal deviate's probability that lies within two standard deviations.
_WITHIN_TWO = 0.9544997361036416


def _uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Odd multiples of 2^-23 in (-1, 1), exact."""
    odd = (jax.random.bits(key, shape, jnp.uint32) >> 9).astype(jnp.int32) * 2 + (1 - 2**23)
    return odd.astype(jnp.float32) * np.float32(2.0**-23)


# Compiled on its own, so that Linen's check of a parameter's shape traces it once.
@functools.partial(jax.jit, static_argnums=1)
def normal(key: jax.Array, shape: tuple[int, ...], zero: jax.Array | int) -> jax.Array:
    """Deviates from N(0, 1), float32, between -5.3 and 5.3.

    Args:
      key: a jax.random key.
      zero: i32[], 0, but not known to the compiler, as in `rounded`.
    """
    return inverse_error_function(_uniform(key, shape), zero) * np.float32(2**0.5)


@functools.partial(jax.jit, static_argnums=1)
def truncated_normal(key: jax.Array, shape: tuple[int, ...], zero: jax.Array | int) -> jax.Array:
    """Deviates from N(0, 1) within two of its standard deviations; arguments as in `normal`."""
    x = rounded(_uniform(key, shape) * np.float32(_WITHIN_TWO), zero)
    return inverse_error_function(x, zero) * np.float32(2**0.5)
