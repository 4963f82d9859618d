"""A model in a folder that others can read: parameters, settings, tokenizer, and where it is from.

DIR/
  model.safetensors   parameters by path, as the run stores them
  config.yaml         every setting in force at the step
  manifest.json       of the corpus that it was trained on
  tokenizer.model     where the tokenizer is SentencePiece
  model.json          step, clocks, and digests of the parameters (`Origin`)
  README.md           the model card
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
import safetensors
import safetensors.numpy

from palm_jax import config, files
from palm_jax.corpus import joint, manifest, tokenizers
from palm_jax.corpus.joint import Contents
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import digests, folder, segments
from palm_jax.record.checkpoints import Checkpoints
from palm_jax.record.folder import RunFolder
from palm_jax.use import tokenizer_file

WEIGHTS, ORIGIN, CARD = "model.safetensors", "model.json", "README.md"
_PARAMETERS = "params/"

Weights = dict[str, np.ndarray]  # by path, such as layers/w_gate_DF


class Origin(pydantic.BaseModel):
    """Which moment of a run it is."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    step: Annotated[int, pydantic.Field(ge=0, le=config.MOST_STEPS)]  # the next one
    schedule_step: Annotated[int, pydantic.Field(ge=0, le=config.MOST_STEPS)]
    fingerprint: str  # of the settings
    corpus_digest: str
    state_digest: str  # of the checkpoint, the optimizer's state with it
    digest: str  # of the parameters
    leaves: dict[str, str]  # their digests, by path


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, in memory."""

    origin: Origin
    settings: config.Config
    contents: Contents
    weights: Weights
    tokenizer: pathlib.Path | None  # a SentencePiece model's file


def take(
    run: RunFolder, recorded: config.Config, step: int | None = None, segment: int | None = None
) -> Model:
    """The model of a checkpoint, by default the segment's newest.

    Args:
      recorded: the run's settings, perhaps with its corpus elsewhere.
    Raises:
      WrongInput: there is no such checkpoint or segment, or a tokenizer is not where the corpus is.
      CannotDo: the checkpoint is damaged.
    """
    number = run.last_segment() if segment is None else segment
    described = segments.read(run.segment(number))
    with Checkpoints(run.checkpoints(number), config.Checkpoint()) as saved:
        there = saved.steps()
        if not there or (step is not None and step not in there):
            listed = ", ".join(map(str, there)) or "none"
            raise WrongInput(
                f"--step {step}: only checkpoints can be exported, and segment {number} of "
                f"{run.path} has: {listed}"
            )
        step = there[-1] if step is None else step
        record = saved.record(step)
        weights = dict(saved.read(step, _PARAMETERS))
        ((_, schedule_step),) = saved.read(step, "schedule_step")
    contents = run.manifest()
    tokenizer = None
    if contents.tokenizer.model is not None:
        tokenizer_file.opened(run, recorded, contents.tokenizer)  # it is the one described
        tokenizer = tokenizer_file.found_in(run, recorded, contents.tokenizer)
        tokenizer /= contents.tokenizer.model.file
    settings = described.settings_at(recorded, max(step - 1, described.start_step))
    digest = _digest(weights)
    return Model(
        Origin(
            step=step,
            schedule_step=int(schedule_step),
            fingerprint=config.fingerprint(settings),
            corpus_digest=contents.digest,
            state_digest=record["digest"]["whole"],
            digest=digest.whole,
            leaves=digest.leaves,
        ),
        settings,
        contents,
        weights,
        tokenizer,
    )


def _digest(weights: Weights) -> digests.Digest:
    return digests.joined(
        {path: digests.digest(leaf).leaves[""] for path, leaf in weights.items()}, weights
    )


def write(
    model: Model,
    out: pathlib.Path,
    card: str,
) -> None:
    """Write a model's folder.

    Args:
      card: the text of its README.md.
    Raises:
      CannotDo: it cannot be written.
    """
    with new_folder(out) as place:
        save_weights(place / WEIGHTS, model.weights, "palm_jax")
        (place / folder.CONFIG).write_text(config.to_yaml(model.settings), encoding="utf-8")
        described = model.contents.model_dump_json(indent=2) + "\n"
        (place / manifest.FILE_NAME).write_text(described, encoding="utf-8")
        (place / ORIGIN).write_text(model.origin.model_dump_json(indent=2) + "\n")
        (place / CARD).write_text(card, encoding="utf-8")
        if model.tokenizer is not None:
            shutil.copyfile(model.tokenizer, place / model.tokenizer.name)


def save_weights(path: pathlib.Path, weights: Weights, form: str) -> None:
    """
    Args:
      form: whose names and layouts these are; readers look for it.
    """
    # A transposed view would be written in the order of what it is a view of.
    whole = {name: np.ascontiguousarray(leaf) for name, leaf in weights.items()}
    safetensors.numpy.save_file(whole, path, metadata={"format": form})


def read(path: pathlib.Path) -> Model:
    """A model that `write` wrote, with the bits that it had.

    Raises:
      WrongInput: the folder is none.
      CannotDo: something in it is damaged.
    """
    if not (path / ORIGIN).is_file():
        raise WrongInput(
            f"{path} is no exported model: it has no {ORIGIN}; make one with `palm-jax export RUN "
            f"--format safetensors --out {path}`"
        )
    try:
        origin = files.described(path / ORIGIN, Origin)
        with safetensors.safe_open(path / WEIGHTS, framework="np") as file:
            weights = {name: file.get_tensor(name) for name in origin.leaves}
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CannotDo(f"{path} is damaged: {error}; copy it again") from None
    recorded, found = digests.Digest(origin.leaves, origin.digest), _digest(weights)
    if wrong := recorded.differing(found):
        raise CannotDo(f"{path / WEIGHTS} has other bits than were exported in {wrong[0]}")
    if found.whole != origin.digest:
        raise CannotDo(f"{path / WEIGHTS} has other arrays than were exported; copy it again")
    contents = joint.read(path)
    file = None if contents.tokenizer.model is None else path / contents.tokenizer.model.file
    if file is not None:
        tokenizers.open_tokenizer(path, contents.tokenizer)
    return Model(origin, config.load(path / folder.CONFIG), contents, weights, file)


@dataclasses.dataclass
class new_folder:
    """A folder that appears as a whole, or not at all."""

    out: pathlib.Path

    def __enter__(self) -> pathlib.Path:
        if self.out.exists():
            raise WrongInput(f"--out {self.out} exists; name a new folder")
        self._place = self.out.with_name(f".{self.out.name}.new")
        try:
            shutil.rmtree(self._place, ignore_errors=True)
            self._place.mkdir(parents=True)
        except OSError as error:
            raise CannotDo(f"cannot write {self.out}: {error}; name another") from error
        return self._place

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        if error is None:
            self._place.rename(self.out)
            return
        shutil.rmtree(self._place, ignore_errors=True)
        if isinstance(error, OSError | safetensors.SafetensorError):
            raise CannotDo(f"cannot write {self.out}: {error}") from error
