"""What the commands share: kinds of options, JSON on stdout, and starting JAX."""

from __future__ import annotations

import collections.abc
import json
import logging
import math
import os
import pathlib
import re
from typing import Annotated, Any

import typer

from palm_jax import config
from palm_jax.errors import WrongInput

DIFFERENT, DAMAGED, GAVE_UP, STOPPED_BY_SIGNAL = 1, 1, 1, 4

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to override.")
]
Run = Annotated[pathlib.Path, typer.Argument(metavar="RUN", help="The run's folder.")]
AllowEnvironment = Annotated[
    bool, typer.Option(help="Go on although the environment may give other bits.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def check_is_run(run: pathlib.Path) -> None:
    """Raise WrongInput if the folder has no run."""
    from palm_jax.record import folder

    if not folder.is_run(run):
        raise WrongInput(f"{run} is not a run's folder: it has no {folder.CONFIG}")


def interval(option: str, text: str) -> tuple[int, int]:
    """A:B as two numbers of steps; raises WrongInput for anything else."""
    found = re.fullmatch("([0-9]{1,10}):([0-9]{1,10})", text)
    if found is None or not int(found[1]) < int(found[2]) <= config.MOST_STEPS:
        raise WrongInput(
            f"{option} {text}: give A:B with whole numbers, 0 <= A < B <= {config.MOST_STEPS}"
        )
    return int(found[1]), int(found[2])


def moved(
    recorded: config.Config, overrides: collections.abc.Sequence[str], what: str
) -> config.Config:
    """A run's settings on another mesh, or with its corpus elsewhere.

    Raises:
      WrongInput: a setting that would change `what` is done to the run's steps.
    """
    settings = config.override(recorded, overrides)
    for key in config.differences(recorded, settings):
        if not config.is_within(key, ("mesh", *config.PLACES_OF_DATA)):
            raise WrongInput(
                f"{key} would change what is {what}; this takes mesh.* and "
                f"{' or '.join(config.PLACES_OF_DATA)}"
            )
    return settings


def prepare_jax(settings: config.Config) -> None:
    """Set what must be set before the parts that use JAX are imported."""
    from palm_jax import start as starting

    # Orbax tells of every file it writes, and of a failure in pages; it reaches us as an exception.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # A loss may be NaN; that is for the logbook and the curves to show.
    logging.getLogger("tensorboardX").setLevel(logging.ERROR)
    starting.start(settings)


def prepare_one_cpu(settings: config.Config) -> None:
    """As `prepare_jax`, for what only reads arrays: one CPU device, in this process alone."""
    from palm_jax import meeting

    # Whoever set these meant the processes that train; nobody comes to meet this one.
    for name in (meeting.COORDINATOR, meeting.NUM_PROCESSES, meeting.PROCESS):
        os.environ.pop(name, None)
    prepare_jax(settings.model_copy(update={"mesh": config.Mesh(emulated_devices=1)}))


def print_json(fields: dict[str, Any]) -> None:
    """One line of strict JSON; numbers that are not finite become text."""

    def strict(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, dict):
            return {key: strict(inner) for key, inner in value.items()}
        return [strict(v) for v in value] if isinstance(value, list | tuple) else value

    print(json.dumps(strict(fields), allow_nan=False))


def in_bytes(count: float) -> str:
    """A number of bytes for a person to read."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"
