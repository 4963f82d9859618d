"""Products of matrices in eight bits: E4M3 values forward, E5M2 gradients, float32 sums.

Values are multiplied by a scale so that the largest of those that share it is the largest number
of the format, rounded to eight bits, multiplied, and the scales divided out again. Which values
share a scale is the difference between two recipes:

- `delayed`: a whole tensor. Its scale comes from the largest values of earlier steps, so that
  a tensor is read once; those are part of the train state.
- `block`: 128 values along the contraction, or 128 x 128 of a kernel. Their scale comes from
  the values themselves; nothing is remembered.

A scale is a function of a maximum, which is the same in any order, over any mesh.

T tokens, I inputs (contracted), O outputs of a product; b blocks along a contraction.

Source: Micikevicius et al., 2022 (formats); Transformer Engine's delayed scaling; DeepSeek-V3,
section 3.3, whose backward pass is in E4M3, too.
"""

from __future__ import annotations

import collections.abc
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from palm_jax import config

# Products in eight bits are config.Model.products. Embedding, logits, norms and the core of
# attention keep the compute format, as in DeepSeek-V3. So do one key and one value that all heads
# share: a small part of the work, and every head reads its errors.

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
OF_TENSORS = (FORWARD, FORWARD, BACKWARD)  # inputs, kernel, gradient of the outputs
BLOCK = 128
SMALLEST_AMAX = 1e-4  # of a block; as in DeepSeek-V3's kernels

# (name, inputs [T, I], kernel [I, O]) -> [T, O] in the inputs' format.
Product = collections.abc.Callable[[str, jax.Array, jax.Array], jax.Array]


def largest(dtype: Any) -> float:
    return float(jnp.finfo(dtype).max)


def amax(x: jax.Array) -> jax.Array:
    """The largest magnitude, f32[]; NaN if any element is."""
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def quantised(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """x times its scale in an eight-bit format.

    What is too large becomes the largest number. What was not finite is not hidden: E4M3 has
    no infinity, and the result is NaN.
    """
    scaled = x.astype(jnp.float32) * scale
    clipped = jnp.clip(scaled, -largest(dtype), largest(dtype))
    return jnp.where(jnp.isfinite(x), clipped, jnp.nan).astype(dtype)


def _dot(a: jax.Array, b: jax.Array, contracted: tuple[int, int] = (1, 0)) -> jax.Array:
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


# --- delayed: a scale per tensor, from earlier steps --------------------------------------


class Scaling(NamedTuple):
    """Of the three tensors of one product in every layer: its inputs, kernel and gradient."""

    history: jax.Array  # f32[N, 3, steps]: largest magnitudes; the first place is empty
    scale: jax.Array  # f32[N, 3]: what the next step multiplies by


Scalings = dict[str, Scaling]


def init(precision: config.Precision, settings: config.Model) -> Scalings | None:
    """The state at step 0, as Transformer Engine has it: scales of one. None: nothing is kept."""
    if precision.policy != "float8" or precision.float8_scaling != "delayed":
        return None
    return {
        name: Scaling(
            history=jnp.zeros((settings.num_layers, 3, precision.float8_history), jnp.float32),
            scale=jnp.ones((settings.num_layers, 3), jnp.float32),
        )
        for name in settings.products
    }


def after(
    scalings: Scalings, amaxes: dict[str, jax.Array], precision: config.Precision
) -> Scalings:
    """The state after a step whose largest magnitudes over all devices were f32[N, 3] each."""
    return {
        name: _after(scaling, amaxes[name], precision.float8_margin)
        for name, scaling in scalings.items()
    }


def _after(scaling: Scaling, now: jax.Array, margin: int) -> Scaling:
    history = scaling.history.at[..., 0].set(now)
    highest = jnp.max(history, axis=-1)
    ends = jnp.asarray([largest(dtype) for dtype in OF_TENSORS], jnp.float32)
    scale = (ends / highest) * 2.0**-margin
    usable = (highest > 0) & jnp.isfinite(highest) & jnp.isfinite(scale)
    return Scaling(
        history=jnp.roll(history, -1, axis=-1).at[..., 0].set(0),
        scale=jnp.where(usable, scale, scaling.scale),
    )


def slots(scalings: Scalings) -> dict[str, jax.Array]:
    """Places in which a backward pass leaves what it saw: f32[N, 3], for `delayed`."""
    return {name: jnp.zeros_like(scaling.scale) for name, scaling in scalings.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def delayed(
    x_TI: jax.Array, w_IO: jax.Array, scales_3: jax.Array, slot_3: jax.Array, dtype: Any
) -> jax.Array:
    """x @ w in E4M3.

    Args:
      scales_3: f32[3], of inputs, kernel and gradient; not differentiated.
      slot_3: not used; its "gradient" are the largest magnitudes of the three.
    """
    return _delayed_forward(x_TI, w_IO, scales_3, slot_3, dtype)[0]


def _delayed_forward(
    x_TI: jax.Array, w_IO: jax.Array, scales_3: jax.Array, slot_3: jax.Array, dtype: Any
) -> tuple[jax.Array, Any]:
    q_TI, q_IO = quantised(x_TI, scales_3[0], FORWARD), quantised(w_IO, scales_3[1], FORWARD)
    back_3 = 1.0 / scales_3
    y_TO = _dot(q_TI, q_IO) * (back_3[0] * back_3[1])
    return y_TO.astype(dtype), (q_TI, q_IO, scales_3, amax(x_TI), amax(w_IO))


def _delayed_backward(dtype: Any, saved: Any, gradient_TO: jax.Array) -> tuple[jax.Array, ...]:
    q_TI, q_IO, scales_3, amax_x, amax_w = saved
    q_TO, back_3 = quantised(gradient_TO, scales_3[2], BACKWARD), 1.0 / scales_3
    x_TI = _dot(q_TO, q_IO, (1, 1)) * (back_3[2] * back_3[1])
    w_IO = _dot(q_TI, q_TO, (0, 0)) * (back_3[0] * back_3[2])
    seen_3 = jnp.stack([amax_x, amax_w, amax(gradient_TO)])
    return x_TI.astype(dtype), w_IO.astype(dtype), jnp.zeros_like(scales_3), seen_3


delayed.defvjp(_delayed_forward, _delayed_backward)


# --- block: a scale per 128 values, from the values ---------------------------------------


class Blocks(NamedTuple):
    """A matrix cut along its contraction; values times `back` are what they stand for."""

    values: jax.Array  # eight bits[b, 128, M]: contracted axis second
    back: jax.Array  # f32[b, M]


def _scales(highest: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """What to multiply by, and what to multiply by to come back."""
    highest = jnp.maximum(highest.astype(jnp.float32), SMALLEST_AMAX)
    return largest(dtype) / highest, highest * (1.0 / largest(dtype))


def _cut(x: jax.Array, dim: int) -> jax.Array:
    """[..., size, ...] -> [..., b, 128, ...]; zeros fill the last block up.

    A contraction of less than 128 is one block. Where the mesh axis `tensor` cuts it, blocks
    end at the cut.
    """
    size = x.shape[dim]
    block = min(BLOCK, size)
    if missing := -size % block:
        x = jnp.pad(x, [(0, missing if d == dim else 0) for d in range(x.ndim)])
    return x.reshape(*x.shape[:dim], -1, block, *x.shape[dim + 1 :])


def lines(x_CM: jax.Array, dtype: Any) -> Blocks:
    """128 neighbours along the contraction C share a scale."""
    x_bCM = _cut(x_CM, 0)
    scale_bM, back_bM = _scales(jnp.max(jnp.abs(x_bCM), axis=1), dtype)
    return Blocks(quantised(x_bCM, scale_bM[:, None], dtype), back_bM)


def tiles(w_CM: jax.Array, dtype: Any) -> Blocks:
    """128 x 128 neighbours share a scale."""
    num_columns = w_CM.shape[1]
    w_bCaM = _cut(_cut(w_CM, 0), 2)
    scale_ba, back_ba = _scales(jnp.max(jnp.abs(w_bCaM), axis=(1, 3)), dtype)
    values = quantised(w_bCaM, scale_ba[:, None, :, None], dtype)
    back_bM = jnp.repeat(back_ba, w_bCaM.shape[3], axis=1)[:, :num_columns]
    return Blocks(values.reshape(*values.shape[:2], -1)[..., :num_columns], back_bM)


def contracted(a: Blocks, b: Blocks) -> jax.Array:
    """The product f32[Ma, Mb]; each block's is scaled in float32 and added to the last one's."""

    def add(sum_MM: jax.Array, block: tuple[Blocks, Blocks]) -> tuple[jax.Array, None]:
        (a_CM, back_a), (b_CM, back_b) = block
        return sum_MM + _dot(a_CM, b_CM, (0, 0)) * back_a[:, None] * back_b[None, :], None

    zeros = jnp.zeros((a.values.shape[2], b.values.shape[2]), jnp.float32)
    return jax.lax.scan(add, zeros, (a, b))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def block(x_TI: jax.Array, w_IO: jax.Array, dtype: Any) -> jax.Array:
    """x @ w in E4M3."""
    return contracted(lines(x_TI.T, FORWARD), tiles(w_IO, FORWARD)).astype(dtype)


def _block_forward(x_TI: jax.Array, w_IO: jax.Array, dtype: Any) -> tuple[jax.Array, Any]:
    return block(x_TI, w_IO, dtype), (x_TI, w_IO)


def _block_backward(dtype: Any, saved: Any, gradient_TO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_TI, w_IO = saved
    x_gradient_TI = contracted(lines(gradient_TO.T, BACKWARD), tiles(w_IO.T, FORWARD))
    # Cut along the tokens, which this product contracts.
    w_gradient_IO = contracted(lines(x_TI, FORWARD), lines(gradient_TO, BACKWARD))
    return x_gradient_TI.astype(dtype), w_gradient_IO.astype(dtype)


block.defvjp(_block_forward, _block_backward)


# --- in a layer ---------------------------------------------------------------------------

# Of all layers, or of one: by product, a scale and a slot. Empty for `block`, which has none.
LayerScales = dict[str, tuple[jax.Array, jax.Array]]


def product(scales: LayerScales, precision: config.Precision, dtype: Any) -> Product:
    """How one layer multiplies."""

    def multiply(name: str, x_TI: jax.Array, w_IO: jax.Array) -> jax.Array:
        if precision.float8_scaling == "block":
            return block(x_TI, w_IO, dtype)
        scales_3, slot_3 = scales[name]
        return delayed(x_TI, w_IO, scales_3, slot_3, dtype)

    return multiply
