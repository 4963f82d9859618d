"""Bytes of a run's arrays on each device, from its config and the rules that cut axes.

Letters as in model.py. Counts are exact Python integers. They hold what a step takes, and the
gradient; not activations, nor the parameters that it makes whole or compute in another format,
nor the partial sums while it adds up gradients: only a compiled step tells those.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import math

from palm_jax import config
from palm_jax.plan.flops import FLOAT32_BYTES

Rules = collections.abc.Mapping[str, str | None]  # letter -> the mesh axis that cuts it
Groups = dict[str, int]  # group of parameters -> bytes

INT32_BYTES = 4


def sizes(model: config.Model) -> dict[str, int]:
    """Size of each logical axis of the parameters."""
    return {
        "N": model.num_layers,
        "D": model.width,
        "H": model.num_heads,
        "K": model.head_size,
        "F": model.feed_forward_size,
        "V": model.padded_vocabulary_size,
    }


def sizes_on_device(settings: config.Config, rules: Rules) -> dict[str, int]:
    """The same, where the mesh cuts them; a config is refused if they do not divide."""
    mesh = settings.mesh
    devices = {None: 1, "data": mesh.data, "fsdp": mesh.fsdp, "tensor": mesh.tensor}
    return {axis: size // devices[rules[axis]] for axis, size in sizes(settings.model).items()}


def parameter_axes(model: config.Model) -> dict[str, tuple[str, ...]]:
    """Axes of every parameter, by group.

    Source: PaLM, section 2.
    """
    scales = ("ND", "NK", "NK") if model.qk_norm else ("ND",)
    return {
        "embedding": ("VD",) if model.tied_embedding else ("VD", "VD"),
        "attention": ("NDHK", "NDK", "NDK", "NHKD"),  # queries, one key, one value, output
        "feed_forward": ("NDF", "NDF", "NFD"),  # SwiGLU has two kernels in, one out
        "norms": scales,
    }


def moments(optimizer: config.Adafactor | config.AdamW) -> tuple[str, str]:
    """Names of what the optimizer keeps of every parameter, in its own form, float32."""
    match optimizer:
        case config.Adafactor():
            return "momentum", "second_moment"
        case config.AdamW():
            return "first_moment", "second_moment"


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
    """Bytes on one device; on every other one they are the same."""

    arrays: dict[str, Groups]  # parameters, each moment, and the gradient
    counters: int  # the state's: step, updates for the rate, updates for the optimizer
    batch: int  # tokens of the largest batch
    controls: int

    @property
    def state(self) -> int:
        kept = (sum(groups.values()) for name, groups in self.arrays.items() if name != "gradient")
        return sum(kept) + self.counters

    @property
    def arguments(self) -> int:
        """Of the compiled step."""
        return self.state + self.batch + self.controls

    @property
    def total(self) -> int:
        """Arguments and gradient."""
        return self.arguments + sum(self.arrays["gradient"].values())


def on_each_device(settings: config.Config, rules: Rules) -> DeviceBytes:
    """What lies on each device of `settings.mesh`.

    Args:
      rules: sharding.RULES.
    """
    here = sizes_on_device(settings, rules)
    parameters = {
        group: FLOAT32_BYTES * sum(math.prod(here[letter] for letter in axes) for axes in leaves)
        for group, leaves in parameter_axes(settings.model).items()
    }
    names = ("parameters", *moments(settings.optimizer), "gradient")
    rows = max(settings.data.ramp.sizes) // settings.mesh.data_parallel
    return DeviceBytes(
        arrays={name: dict(parameters) for name in names},
        counters=3 * INT32_BYTES,
        batch=INT32_BYTES * rows * (settings.model.sequence_length + 1),
        controls=2 * FLOAT32_BYTES,
    )
