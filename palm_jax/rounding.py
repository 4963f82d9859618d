"""Rounding where the program says, whatever the compiler fuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rounded(product: jax.Array, zero: jax.Array | int) -> jax.Array:
    """`product`, rounded to float32 before anything is added to it.

    LLVM may compute a x b + c with one rounding or with two. It chooses as it vectorised the
    loop, which depends on the size of a slice, and so on the number of devices. It cannot
    choose across an integer operation on the product's bits, nor leave that out while it
    does not know that `zero` is 0. A barrier is not enough, nor a factor that is 1 at run time:
    both are gone before LLVM chooses. (Minimal programs: docs/bits.md.)

    Args:
      product: float32.
      zero: i32[], 0, but not a constant: `unknown_zero`.
    """
    bits = jax.lax.bitcast_convert_type(product, jnp.int32)
    return jax.lax.bitcast_convert_type(bits ^ zero, jnp.float32)


def unknown_zero(step: jax.Array) -> jax.Array:
    """0 for any i32 step that is not negative, as the compiler cannot know."""
    return step >> 31
