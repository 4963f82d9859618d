"""Segments: the unbroken stretches of a run's history, and what is in force in each.

A segment begins with the state before some step of its parent (or with step 0 of the config)
and runs on from there. Rolling back, promoting a branch and intervening each open one; going
on after a crash does not. Branches have the same form, in folders of their own.
"""

from __future__ import annotations

import pathlib
from typing import Annotated, Any

import pydantic

from palm_jax import config, files, stream
from palm_jax.errors import CannotDo, WrongInput

_END = 2**53
Natural = Annotated[int, pydantic.Field(ge=0, lt=_END)]
Step = Annotated[int, pydantic.Field(ge=0, le=config.MOST_STEPS)]
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
FORM_OF_THE_STATE = ("optimizer.name", "optimizer.factored", "optimizer.largest_side")


def _form(exclusion: object) -> str:
    return "named" if isinstance(exclusion, list | tuple) and len(exclusion) == 3 else "alone"


# Positions [start, stop) of the run's only corpus, or with the name of one of several.
Exclusion = Annotated[
    Annotated[tuple[Natural, Natural], pydantic.Tag("alone")]
    | Annotated[tuple[Natural, Natural, str], pydantic.Tag("named")],
    pydantic.Discriminator(_form),
]


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)


class Departure(_Strict):
    """Where a segment's first state comes from: the state before `step` of a segment."""

    # Folder of that run, relative to this one's; None: the same run. Only upwards, so that
    # whoever follows departures comes to an end.
    run: Annotated[str, pydantic.Field(pattern=r"^\.\.(/\.\.)*$")] | None = None
    segment: Natural
    step: Step


class Intervention(_Strict):
    """Settings that are in force from step `at` on."""

    at: Step
    changes: dict[str, Any]  # dotted settings
    reason: str

    @pydantic.field_validator("changes")
    @classmethod
    def _may_change(cls, changes: dict[str, Any]) -> dict[str, Any]:
        for key in changes:
            if not _is_allowed(key, IN_A_BRANCH):
                raise ValueError(f"{key[:100]!r} is not a setting that may change in a history")
        return changes


class Segment(_Strict):
    segment: Natural = 0
    parent: Departure | None = None
    start_step: Step = 0
    reason: str = ""
    exclusions: tuple[Exclusion, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    # The other clocks. Moments come with the state.
    data_offset: Annotated[int, pydantic.Field(gt=-_END, lt=_END)] = (
        0  # step s trains on the data of step s + data_offset
    )
    schedule_step: Step | None = None  # what the rate counts from, at the departure
    update_count: Step | None = None  # what beta2 counts from, at the departure

    @pydantic.model_validator(mode="after")
    def _is_possible(self) -> Segment:
        parent = self.parent
        if parent is not None and parent.run is None and parent.segment >= self.segment:
            raise ValueError(
                f"segment {self.segment} cannot depart from segment {parent.segment}, which is "
                "not an earlier one"
            )
        if self.data_step(self.start_step) < 0:
            raise ValueError(f"data_offset={self.data_offset}: there is no data before step 0")
        for start, stop, *_ in self.exclusions:
            if start >= stop:
                raise ValueError(f"exclusions: {start}:{stop} is empty")
        return self

    def stream_of(self, base: config.Config) -> stream.Stream:
        """Where the steps of this segment, of a run of `base`, find their data.

        Raises:
          WrongInput: an exclusion is of no corpus of that run.
        """
        try:
            return stream.Stream.of(base.data, self.exclusions)
        except WrongInput as error:
            raise WrongInput(f"segment {self.segment}: {error}") from None

    def data_step(self, step: int) -> int:
        """The step whose data `step` trains on."""
        return step + self.data_offset

    def settings_at(self, base: config.Config, step: int) -> config.Config:
        """The config in force at `step`: `base` and every intervention up to there."""
        settings = base.model_dump(mode="json")
        for intervention in self.interventions:
            if intervention.at <= step:
                for name, value in intervention.changes.items():
                    self._set(settings, name, value)
                settings = config.without_other_kinds(settings)
        return config.from_dict(settings, f"segment {self.segment}")

    def _set(self, settings: dict[str, Any], name: str, value: Any) -> None:
        *sections, key = name.split(".")
        place: Any = settings
        for section in sections:
            place = place.get(section) if isinstance(place, dict) else None
        if not isinstance(place, dict):
            raise WrongInput(f"segment {self.segment} changes {name}, which is no setting")
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
        if not _is_allowed(key, allowed):
            raise WrongInput(
                f"{key} cannot change in the middle of a run's history; these can: "
                f"{', '.join(allowed)}. For another {key}, start another run"
            )
    return changes


def _is_allowed(key: str, allowed: tuple[str, ...]) -> bool:
    return config.is_within(key, allowed) and key not in FORM_OF_THE_STATE


def read(folder: pathlib.Path) -> Segment:
    """The segment in RUN/segments/NNN.

    Raises:
      WrongInput: there is none.
      CannotDo: its description is damaged.
    """
    path = folder / FILE_NAME
    try:
        found = files.described(path, Segment)
    except FileNotFoundError:
        numbers = sorted(p.name for p in folder.parent.glob("[0-9]*"))
        raise WrongInput(
            f"there is no segment {folder.name} in {folder.parent.parent}; there are: "
            f"{', '.join(numbers) or 'none'}"
        ) from None
    except (OSError, ValueError) as error:
        raise CannotDo(f"{path} is damaged: {error}; restore it from a copy") from None
    if folder.name != name_of(found.segment):
        raise CannotDo(
            f"{path} is damaged: it says segment={found.segment}; restore it from a copy"
        )
    return found


def name_of(segment: int) -> str:
    """Of a segment's folder."""
    return f"{segment:03d}"
