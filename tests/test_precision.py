"""What bfloat16 can and cannot hold, and why master weights are float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from palm_jax import precision


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
    options = precision.compiler_options("cpu", "canonical")
    add = jax.jit(lambda w, u: w + u, compiler_options=options)
    stored = add(jnp.bfloat16(weight), jnp.bfloat16(change))
    assert stored.dtype == jnp.bfloat16
    assert float(stored) == result
    # Float32, as master weights are, holds each of them.
    assert float(add(np.float32(weight), np.float32(change))) == np.float32(weight + change)
