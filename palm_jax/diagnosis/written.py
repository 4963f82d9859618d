"""The files of a diagnosis, as whoever reads them may rely on them.

They may come from another machine. Of a verdict there is only what a report shows.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic

from palm_jax.diagnosis.arms import Arm
from palm_jax.record import logbook


def _number(value: Any) -> float:
    found = logbook.number(value)
    if found is None:
        raise ValueError("it is no number")
    return found


Natural = Annotated[int, pydantic.Field(ge=0, lt=2**53)]
Number = Annotated[float, pydantic.BeforeValidator(_number)]  # "nan", "inf" and "-inf", too
Step = Annotated[str, pydantic.Field(pattern=r"^[0-9]{1,16}$")]


class _Written(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, strict=True)


class Result(_Written):
    """arms/NAME.json"""

    arm: Arm
    begin: Number
    probe: list[Number]
    loss: list[Number]
    gradient_norm: list[Number]
    rate: list[Number]  # of the first and the last step
    applied: Natural  # updates
    bits: dict[Step, dict[str, Any]]
    state_digests: dict[Step, str]
    state_digest: str
    damaged: list[str]
    seconds: Number

    @pydantic.model_validator(mode="after")
    def _has_all_steps(self) -> Result:
        if len(self.probe) != self.arm.stop - self.arm.scored_from:
            raise ValueError(f"probe: {len(self.probe)} losses are not those of the arm's steps")
        return self


class Suspect(_Written):
    step: Natural
    row: Natural
    sequence: Natural
    loss: Number
    gradient_norm: Number | None
    text: Any
    unusual: dict[str, Number]
    sources: list[str]
    excerpt: str


class StepGradient(_Written):
    step: Natural
    norm: Number
    cosine: Number | None
    kurtosis: Number


class Forensics(_Written):
    """forensics.json"""

    window_loss: Number
    reference_loss: Number
    window_gradient_norm: Number | None
    reference_gradient_norm: Number | None
    suspects: list[Suspect]
    num_unusual: Natural
    gradients: list[StepGradient]


class Votes(_Written):
    spiked: Natural
    of: Natural
    interval: tuple[Number, Number]


class FirstVital(_Written):
    vital: str
    step: Natural
    before_loss: int


class Recommendation(_Written):
    treatment: str
    why: str
    commands: list[str]


class Verdict(_Written):
    """verdict.json"""

    verdict: str
    because: str
    onset: Natural
    fork: Natural
    stop: Natural
    votes: dict[Literal["N", "C", "B", "E", "half rate"], Votes]
    first_vitals: list[FirstVital]
    forensics: Forensics | None
    recommendation: Recommendation
