"""Settings of number formats, of the order of sums, and of the mesh."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

from palm_jax.config.fields import NaturalInt, PositiveInt, PowerOfTwo, Section, power_of_two
from palm_jax.config.words import short


def _loss_scale(value: object) -> str | float:
    if isinstance(value, str) and value in ("dynamic", "none"):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return power_of_two(value)
    raise ValueError(f"{short(value)} must be dynamic, none or a power of two")


LossScale = Annotated[str | float, pydantic.BeforeValidator(_loss_scale)]


class Precision(Section):
    """Number formats (docs/precision.md). What begins with a policy's name is for it alone."""

    # bfloat16_pure stores what the others keep in float32, to show what that costs.
    policy: Literal["float32", "bfloat16", "bfloat16_pure", "float16", "float8"] = "float32"
    # Under float16: "dynamic", "none", or a number that stays. Multiplies the mean loss.
    loss_scale: LossScale = "dynamic"
    loss_scale_initial: PowerOfTwo = 2.0**16
    loss_scale_factor: PowerOfTwo = 2.0
    loss_scale_growth_interval: PositiveInt = 2000  # applied updates until it grows
    loss_scale_floor: PowerOfTwo = 1.0
    loss_scale_ceiling: PowerOfTwo = 2.0**32
    loss_scale_hysteresis: PositiveInt = 1  # overflows until it shrinks; refilled as it grows
    loss_scale_patience: PositiveInt = 20  # overflows in a row at the floor; then the run stops
    # "delayed": a scale per tensor, from the largest values of the last steps. "block": scales
    # of 1 x 128 activations and 128 x 128 weights, from the values themselves.
    float8_scaling: Literal["delayed", "block"] = "delayed"
    float8_history: PositiveInt = 1024  # steps
    float8_margin: NaturalInt = 0  # powers of two left free above the largest value

    @pydantic.model_validator(mode="after")
    def _loss_scale_is_usable(self) -> Precision:
        floor, ceiling = self.loss_scale_floor, self.loss_scale_ceiling
        if not floor <= self.loss_scale_initial <= ceiling:
            raise ValueError(
                f"loss_scale_initial={self.loss_scale_initial:g} must lie between "
                f"loss_scale_floor={floor:g} and loss_scale_ceiling={ceiling:g}"
            )
        if self.loss_scale_factor <= 1:
            raise ValueError(f"loss_scale_factor={self.loss_scale_factor:g} must be above 1")
        return self


class Numerics(Section):
    """What fixes the bits of a step (docs/bits.md). A change here is another run."""

    microbatch: PositiveInt = 1  # sequences; the unit of computation
    lanes: PositiveInt = 8  # the largest data-parallel width the run is meant for
    # "canonical": sums in one order whatever the data-parallel mesh. "fast": in XLA's.
    reduction: Literal["canonical", "fast"] = "canonical"
    # Positions of a sequence whose logits exist at once; null: all of them.
    loss_chunk: PositiveInt | None = None
    # Size of the pool of threads by which XLA:CPU splits contractions.
    threads: Annotated[int, pydantic.Field(gt=0, le=1024)] = 8

    @pydantic.model_validator(mode="after")
    def _lanes_are_apower_of_two(self) -> Numerics:
        if self.lanes & (self.lanes - 1):
            raise ValueError(f"lanes={self.lanes} must be a power of two (a binary tree's leaves)")
        return self


class Mesh(Section):
    data: PositiveInt = 1
    fsdp: PositiveInt = 1
    tensor: PositiveInt = 1
    emulated_devices: PositiveInt | None = None  # give a CPU machine this many devices

    @property
    def data_parallel(self) -> int:
        return self.data * self.fsdp
