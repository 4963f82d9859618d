"""Settings of the learning rate's schedules, a class each."""

from __future__ import annotations

from typing import Literal

import pydantic

from palm_jax.config.fields import (
    BatchSize,
    NaturalInt,
    NotNegative,
    PositiveFloat,
    PositiveInt,
    Section,
)

# Sequences: the rate of a batch of B is multiplied by sqrt(B / reference). Null: by nothing.
BatchSizeReference = BatchSize | None


class PalmSchedule(Section):
    """peak until update `hold_steps`, then peak * sqrt(hold_steps / k); k counts from 1."""

    kind: Literal["palm"] = "palm"
    peak: PositiveFloat = 0.01
    hold_steps: PositiveInt = 10_000
    batch_size_reference: BatchSizeReference = None


class CosineSchedule(Section):
    """Linear warm-up to `peak`, half a cosine to `final` at `decay_steps`, then constant."""

    kind: Literal["cosine"]
    peak: PositiveFloat
    final: NotNegative = 0.0
    warmup_steps: NaturalInt = 0
    # Not `steps`: lengthening a run must not change the steps already made.
    decay_steps: PositiveInt
    batch_size_reference: BatchSizeReference = None

    @pydantic.model_validator(mode="after")
    def _is_possible(self) -> CosineSchedule:
        _check_decay("warmup_steps", self.warmup_steps, self.decay_steps)
        _check_final(self.final, self.peak)
        return self


class LinearSchedule(Section):
    """Linear warm-up to `peak`, a line to `final` at `decay_steps`, then constant."""

    kind: Literal["linear"]
    peak: PositiveFloat
    final: NotNegative = 0.0
    warmup_steps: NaturalInt = 0
    decay_steps: PositiveInt
    batch_size_reference: BatchSizeReference = None

    @pydantic.model_validator(mode="after")
    def _is_possible(self) -> LinearSchedule:
        _check_decay("warmup_steps", self.warmup_steps, self.decay_steps)
        _check_final(self.final, self.peak)
        return self


class WsdSchedule(Section):
    """Warm-up, stable, decay: `peak` until update `hold_steps`, `final` from `decay_steps` on.

    Both null: stable for ever, until a branch or an intervention sets them.
    """

    kind: Literal["wsd"]
    peak: PositiveFloat
    final: NotNegative = 0.0
    warmup_steps: NaturalInt = 0
    hold_steps: PositiveInt | None = None
    decay_steps: PositiveInt | None = None
    decay: Literal["linear", "1-sqrt", "cosine"] = "1-sqrt"
    batch_size_reference: BatchSizeReference = None

    @pydantic.model_validator(mode="after")
    def _is_possible(self) -> WsdSchedule:
        _check_final(self.final, self.peak)
        if (self.hold_steps is None) != (self.decay_steps is None):
            raise ValueError(
                f"hold_steps={self.hold_steps} and decay_steps={self.decay_steps} are the two ends "
                "of the decay; set both, or neither for a rate that stays"
            )
        if self.hold_steps is not None and self.decay_steps is not None:
            _check_decay("hold_steps", self.hold_steps, self.decay_steps)
            if self.hold_steps < self.warmup_steps:
                raise ValueError(
                    f"hold_steps={self.hold_steps} is before the end of "
                    f"warmup_steps={self.warmup_steps}; make hold_steps larger"
                )
        return self


class InverseSquareRootSchedule(Section):
    """Linear warm-up to `peak`, then peak * sqrt(warmup_steps / k)."""

    kind: Literal["inverse_square_root"]
    peak: PositiveFloat
    warmup_steps: PositiveInt
    batch_size_reference: BatchSizeReference = None


class ConstantSchedule(Section):
    """Linear warm-up to `peak`, which stays."""

    kind: Literal["constant"]
    peak: PositiveFloat
    warmup_steps: NaturalInt = 0
    batch_size_reference: BatchSizeReference = None


Schedule = (
    PalmSchedule
    | CosineSchedule
    | LinearSchedule
    | WsdSchedule
    | InverseSquareRootSchedule
    | ConstantSchedule
)


def _check_decay(start: str, first: int, last: int) -> None:
    if first >= last:
        raise ValueError(
            f"{start}={first} leaves nothing of decay_steps={last}; make decay_steps larger"
        )


def _check_final(final: float, peak: float) -> None:
    if final > peak:
        raise ValueError(f"final={final} is above peak={peak}")
