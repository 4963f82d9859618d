"""Parameters, FLOPs, utilisation and tokens of a configured run.

L layers, D model, H heads, Q head size, F feed-forward, V vocabulary, T sequence length.
Counts are exact Python integers.
"""

from __future__ import annotations

import dataclasses

from palm_jax import config
from palm_jax.plan import parameters

# Peak bfloat16 FLOP/s of one device, by `jax.Device.device_kind`.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,  # v5p
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
}

FLOAT32_BYTES = 4

# What model.remat computes a second time, of the forward pass's 2N and 4LHQT. "full" is PaLM's own
# policy and its own count: a layer's last products are needed by nobody in the backward pass.
# Source: PaLM, section 4.1 and appendix B.
RECOMPUTED = {
    "none": (0.0, 0.0),
    "attention": (0.0, 1.0),
    "dots": (0.0, 1.0),  # products without weights are attention's
    "full": (0.75, 1.0),
}


def peak_flops(device_kind: str) -> float | None:
    """Peak FLOP/s of one device; None where it is not known, as for any CPU."""
    return PEAK_FLOPS.get(device_kind)


def flops_per_token(
    num_parameters: int,
    num_layers: int,
    num_heads: int,
    head_size: int,
    sequence_length: int,
    *,
    recomputed_dense: float = 0.0,
    recomputed_attention: float = 0.0,
) -> float:
    """Matrix-product FLOPs of one token, forward and backward: 6N + 12LHQT.

    Args:
      recomputed_dense: the fraction of the forward pass's 2N that rematerialization does
        again. With it the result counts what the hardware does, not what the model needs.
      recomputed_attention: the same for the forward pass's 4LHQT.
    Source: PaLM, appendix B.
    """
    attention = num_layers * num_heads * head_size * sequence_length
    return (6 + 2 * recomputed_dense) * num_parameters + (12 + 4 * recomputed_attention) * attention


def train_flops_per_token(
    model: config.Model, *, recomputed_dense: float = 0.0, recomputed_attention: float = 0.0
) -> float:
    """`flops_per_token` of a configured model; its padded rows do not count."""
    return flops_per_token(
        parameters.number(model),
        model.num_layers,
        model.num_heads,
        model.head_size,
        model.sequence_length,
        recomputed_dense=recomputed_dense,
        recomputed_attention=recomputed_attention,
    )


def model_flops_utilisation(
    tokens_per_second: float, model: config.Model, num_devices: int, peak_flops: float
) -> float:
    """The fraction of the devices' peak that went into FLOPs the model needs.

    Args:
      tokens_per_second: of all devices together.
      peak_flops: of one device.
    Source: PaLM, appendix B.
    """
    return tokens_per_second * train_flops_per_token(model) / (num_devices * peak_flops)


def hardware_flops_per_token(model: config.Model) -> float:
    """With what model.remat computes again, as PaLM counts it."""
    dense, attention = RECOMPUTED[model.remat]
    return train_flops_per_token(model, recomputed_dense=dense, recomputed_attention=attention)


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Of so many chips: what a rate of tokens makes of their peak, and of a budget of tokens."""

    flops_per_token: float
    hardware_flops_per_token: float
    tokens_per_second: float
    chips: int
    peak_flops: float  # of one chip
    tokens: float | None = None  # the budget

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: recomputation is no use to anybody."""
        return self.tokens_per_second * self.flops_per_token / (self.chips * self.peak_flops)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: all that the chips computed."""
        return self.mfu * self.hardware_flops_per_token / self.flops_per_token

    @property
    def seconds(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.tokens_per_second

    @property
    def chip_hours(self) -> float | None:
        return None if self.seconds is None else self.seconds * self.chips / 3600


def rate_at(mfu: float, flops_per_token: float, chips: int, peak_flops: float) -> float:
    """Tokens a second at which chips reach a utilisation."""
    return mfu * chips * peak_flops / flops_per_token


def tokens_by_stage(run: config.Config) -> tuple[int, ...]:
    """Tokens that each stage of the batch ramp trains on; 0 for one never reached."""
    ramp = run.data.ramp
    ends = [*ramp.starts[1:], run.steps]
    return tuple(
        max(0, min(end, run.steps) - start) * size * run.model.sequence_length
        for start, end, size in zip(ramp.starts, ends, ramp.sizes, strict=True)
    )
