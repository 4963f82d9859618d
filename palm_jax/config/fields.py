"""The kinds of values that settings have, and the section they stand in."""

from __future__ import annotations

import math
from typing import Annotated

import pydantic

from palm_jax.config.words import short

MOST_STEPS = 2**31 - 1
# Whatever is worked out from a few of them still is a number.
END = 2**53
PositiveInt = Annotated[int, pydantic.Field(gt=0, lt=END)]
NaturalInt = Annotated[int, pydantic.Field(ge=0, lt=END)]
# A batch is a list of its sequences' numbers before it is read.
BatchSize = Annotated[int, pydantic.Field(gt=0, le=2**20)]
PositiveFloat = Annotated[float, pydantic.Field(gt=0)]
NotNegative = Annotated[float, pydantic.Field(ge=0)]
# What timers take.
Seconds = Annotated[float, pydantic.Field(gt=0, le=1e7)]
WholeSeconds = Annotated[int, pydantic.Field(gt=0, le=10**7)]
Fraction = Annotated[float, pydantic.Field(ge=0, lt=1)]


def power_of_two(value: float) -> float:
    """Scaling by these is exact, and their products with gradients stay within float32."""
    if not 2.0**-40 <= value <= 2.0**40 or math.frexp(value)[0] != 0.5:
        raise ValueError(f"{short(value)} must be a power of two from 2^-40 to 2^40")
    return float(value)


PowerOfTwo = Annotated[float, pydantic.AfterValidator(power_of_two)]


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"{short(text)} is no name of a file")
    return text


Place = Annotated[str, pydantic.AfterValidator(_without_nul)]


class Section(pydantic.BaseModel):
    # Strict: YAML's `true` is not the integer 1, and "12" is not twelve.
    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )
