"""What stands between the feed-forward's kernels: gated (Shazeer, 2020) or plain."""

from __future__ import annotations

import collections.abc

import flax.linen as nn
import jax
import jax.numpy as jnp

# Of the gate, whose result multiplies the second kernel's; float32 in and out.
GATES: dict[str, collections.abc.Callable[[jax.Array], jax.Array]] = {
    "swiglu": nn.silu,
    "geglu": nn.gelu,
}
# Of the only kernel into the feed-forward. GELU by its tanh form, as in GPT-2 and BLOOM.
PLAIN: dict[str, collections.abc.Callable[[jax.Array], jax.Array]] = {
    "gelu": nn.gelu,
    "relu": nn.relu,
}


def activated(name: str, gate_TF: jax.Array | None, up_TF: jax.Array) -> jax.Array:
    """What the kernel out of the feed-forward multiplies; the nonlinearity is float32."""
    dtype = up_TF.dtype
    if gate_TF is None:
        return PLAIN[name](up_TF.astype(jnp.float32)).astype(dtype)
    return GATES[name](gate_TF.astype(jnp.float32)).astype(dtype) * up_TF
