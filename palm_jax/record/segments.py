"""Segments: the unbroken stretches of a run's history, and what is in force in each.

A segment begins with the state before some step of its parent (or with step 0 of the config)
and runs on from there. Rolling back, promoting a branch and intervening each open one; going
on after a crash does not. Branches have the same form, in folders of their own.
"""

from __future__ import annotations

import json
import pathlib
from typing import Annotated, Any

import pydantic

from palm_jax import config
from palm_jax.errors import CannotDo, WrongInput

Natural = Annotated[int, pydantic.Field(ge=0)]
FILE_NAME = "segment.json"

# What an intervention may change in mid-run: numbers that the rule and its schedules take.
IN_MID_RUN = ("optimizer", "schedule", "model.z_loss")
# What a branch may change besides: how the same quantities are computed.
IN_A_BRANCH = (
    *IN_MID_RUN,
    "precision",
    "numerics.microbatch",
    "numerics.lanes",
    "numerics.reduction",
    "numerics.loss_chunk",
    "model.remat",
)
# The train state has the form that these give it.
FORM_OF_THE_STATE = ("optimizer.name",)


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)


class Departure(_Strict):
    """Where a segment's first state comes from: the state before `step` of a segment."""

    run: str | None = None  # folder of that run, relative to this one's; None: the same run
    segment: Natural
    step: Natural


class Intervention(_Strict):
    """Settings that are in force from step `at` on."""

    at: Natural
    changes: dict[str, Any]  # dotted settings
    reason: str


class Segment(_Strict):
    segment: Natural = 0
    parent: Departure | None = None
    start_step: Natural = 0
    reason: str = ""
    exclusions: tuple[tuple[Natural, Natural], ...] = ()  # positions [start, stop)
    interventions: tuple[Intervention, ...] = ()
    # The other clocks. Moments come with the state.
    data_offset: int = 0  # step s trains on the data of step s + data_offset
    schedule_step: Natural | None = None  # what the rate counts from, at the departure
    update_count: Natural | None = None  # what beta2 counts from, at the departure

    def data_step(self, step: int) -> int:
        """The step whose data `step` trains on."""
        return step + self.data_offset

    def settings_at(self, base: config.Config, step: int) -> config.Config:
        """The config in force at `step`: `base` and every intervention up to there."""
        settings = base.model_dump(mode="json")
        for intervention in self.interventions:
            if intervention.at <= step:
                _set(settings, intervention.changes)
        return config.from_dict(settings, f"segment {self.segment}")


def _set(settings: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        *sections, key = name.split(".")
        place = settings
        for section in sections:
            place = place[section]
        place[key] = value


def changes_of(
    base: config.Config, overrides: list[str], allowed: tuple[str, ...]
) -> dict[str, tuple[Any, Any]]:
    """`section.key=value` overrides as the dotted settings they change: {name: (old, new)}.

    Raises:
      WrongInput: a setting that does not exist, or is not `allowed` to change here.
    """
    changes = config.differences(base, config.override(base, overrides))
    for key in changes:
        if key in FORM_OF_THE_STATE or not any(
            key == name or key.startswith(f"{name}.") for name in allowed
        ):
            raise WrongInput(
                f"{key} cannot change in the middle of a run's history; these can: "
                f"{', '.join(allowed)}. For another {key}, start another run"
            )
    return changes


def read(folder: pathlib.Path) -> Segment:
    """The segment in RUN/segments/NNN.

    Raises:
      WrongInput: there is none.
      CannotDo: its description is damaged.
    """
    path = folder / FILE_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        numbers = sorted(p.name for p in folder.parent.glob("[0-9]*"))
        raise WrongInput(
            f"there is no segment {folder.name} in {folder.parent.parent}; there are: "
            f"{', '.join(numbers) or 'none'}"
        ) from None
    try:
        return Segment.model_validate_json(text)
    except (pydantic.ValidationError, json.JSONDecodeError) as error:
        raise CannotDo(f"{path} is damaged: {error}; restore it from a copy") from None
