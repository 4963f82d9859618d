"""Runs whose time and chips were published, to hold a plan against."""

from __future__ import annotations

import dataclasses

from palm_jax import config
from palm_jax.plan import parameters


@dataclasses.dataclass(frozen=True)
class Phase:
    chips: int
    hours: float


@dataclasses.dataclass(frozen=True)
class Published:
    """A run as its paper tells it."""

    name: str
    parameters: int  # as our config of it counts them
    printed_parameters: float
    tokens: float  # as printed, rounded
    chips: int  # at which the rate was measured
    tokens_per_second: float
    peak_flops: float
    phases: tuple[Phase, ...]
    source: str
    hypotheses: tuple[str, ...]  # of what may explain the hours beyond the measured rate's

    @property
    def chip_hours(self) -> float:
        return sum(phase.chips * phase.hours for phase in self.phases)

    @property
    def measured_chip_hours(self) -> float:
        """Had all tokens been trained on at the measured rate."""
        return self.tokens / self.tokens_per_second * self.chips / 3600

    @property
    def ratio(self) -> float:
        return self.chip_hours / self.measured_chip_hours


PALM_540B = Published(
    name="PaLM 540B",
    parameters=540_356_456_448,
    printed_parameters=540.35e9,
    tokens=780e9,
    chips=6144,
    tokens_per_second=238.3e3,
    peak_flops=275e12,
    phases=(Phase(6144, 1200), Phase(3072, 336)),
    source="PaLM, section 4.1, table 3 and appendix B",
    hypotheses=(
        "the rate was measured at 2048 sequences; 24% of the tokens came at 512 and 1024, whose "
        "steps fill the chips less well",
        "about 20 spikes, each with some 100 steps computed again, and the control experiments",
        "failures of 6144 chips: steps computed again, restarts, and chips that wait for a spare",
        "saving, evaluation and compilation, which a rate of training steps leaves out",
        "the hours are of chips that were held, and may count trials before and during the run",
    ),
)

PUBLISHED = (PALM_540B,)


def of(model: config.Model) -> Published | None:
    """The published run of exactly this many parameters, if there is one."""
    count = parameters.number(model)
    return next((run for run in PUBLISHED if run.parameters == count), None)
