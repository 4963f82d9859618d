"""A run's folder: who may continue it, and where its parts lie.

RUN/
  config.yaml          resolved and complete
  manifest.json        of the corpus, or of the corpora, as when the run began
  logbook/NNNN.jsonl   append-only
  segments/NNN/        segment.json, checkpoints/STEP/, tensorboard/
"""

from __future__ import annotations

import collections.abc
import dataclasses
import os
import pathlib
import re
import secrets
import shutil
from typing import Any

from palm_jax import config, files
from palm_jax.corpus import joint, manifest
from palm_jax.corpus.joint import Contents
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import segments

CONFIG, MANIFEST = "config.yaml", manifest.FILE_NAME
_NUMBER = re.compile(r"[0-9]{1,18}")


@dataclasses.dataclass(frozen=True)
class RunFolder:
    path: pathlib.Path

    def segment(self, number: int) -> pathlib.Path:
        return self.path / "segments" / segments.name_of(number)

    def segments(self) -> list[int]:
        """Their numbers, ascending; at least one. Raises CannotDo if there is none."""
        folder = self.path / "segments"
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        numbers = [int(name) for name in names if _NUMBER.fullmatch(name)]
        if not numbers:
            raise CannotDo(f"{self.path} is damaged: {folder} holds no segment; restore it")
        return sorted(numbers)

    def last_segment(self) -> int:
        return self.segments()[-1]

    def checkpoints(self, segment: int) -> pathlib.Path:
        return self.segment(segment) / "checkpoints"

    def tensorboard(self, segment: int) -> pathlib.Path:
        return self.segment(segment) / "tensorboard"

    def config(self) -> config.Config:
        return config.load(self.path / CONFIG)

    def manifest(self) -> Contents:
        if not (self.path / MANIFEST).is_file():
            raise CannotDo(f"{self.path} is damaged: it has no {MANIFEST}; restore it")
        return joint.read(self.path)


def check_own(run: str | os.PathLike[str]) -> None:
    """Raise CannotDo if a folder within the run's is a link, by which another would be written to.

    The run's own folder may be one.
    """
    if (link := _link_within(pathlib.Path(run), levels=4)) is not None:
        raise CannotDo(
            f"{link} is a link to a folder, and only the run's own are written to; move that "
            f"folder here, or keep all of {os.fspath(run)} elsewhere and link to it as a whole"
        )


def _link_within(folder: pathlib.Path, levels: int) -> pathlib.Path | None:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = pathlib.Path(entry.path)
        if entry.is_symlink() and path.is_dir():
            return path
        if levels > 1 and entry.is_dir(follow_symlinks=False):
            found = _link_within(path, levels - 1)
            if found is not None:
                return found
    return None


def is_run(path: str | os.PathLike[str]) -> bool:
    return (pathlib.Path(path) / CONFIG).is_file()


def open_run(
    path: str | os.PathLike[str], settings: config.Config, corpus: Contents
) -> tuple[RunFolder, dict[str, Any]]:
    """The folder of a new run, or of the one that `settings` continue.

    Returns:
      the folder, and the settings that changed since the run was last started (only those
      that may), as {"steps": (400, 800)}.
    Raises:
      WrongInput: the folder holds something else, or a run of another config or corpus.
      CannotDo: it cannot be written.
    """
    run = RunFolder(manifest.local_folder(path, "--run").absolute())
    if not is_run(run.path):
        create(run, settings, corpus, segments.Segment())
        return run, {}
    before = run.config()
    changes = config.differences(before, settings)
    if fixed := {key: both for key, both in changes.items() if not config.may_change(key, before)}:
        rows = "; ".join(f"{key} was {old!r}, now {new!r}" for key, (old, new) in fixed.items())
        raise WrongInput(
            f"{run.path} is a run of another config: {rows}. Continue it with its own settings, "
            "or name another folder with --run"
        )
    if (trained_on := run.manifest().digest) != corpus.digest:
        raise WrongInput(
            f"{run.path} was trained on the corpus {trained_on[:16]}, but "
            f"{settings.data.told} is {corpus.digest[:16]}; name the run's own corpus"
        )
    if changes:
        write_whole(run.path / CONFIG, config.to_yaml(settings))
    return run, changes


def create(
    run: RunFolder,
    settings: config.Config,
    corpus: Contents,
    first: segments.Segment,
) -> None:
    """Make the folder of a run, or of a branch, whose first segment is `first`.

    Raises:
      WrongInput: the folder exists and is not empty.
      CannotDo: it cannot be written.
    """
    # Complete under another name, then renamed: a killed start leaves no half run.
    path = run.path
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise WrongInput(f"--run {path} exists and is not a run; name a new or empty folder")
    whole = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        new = RunFolder(whole)
        new.segment(0).mkdir(parents=True)
        (whole / "logbook").mkdir()
        write_whole(whole / CONFIG, config.to_yaml(settings))
        write_whole(whole / MANIFEST, corpus.model_dump_json(indent=2) + "\n")
        write_whole(new.segment(0) / segments.FILE_NAME, first.model_dump_json(indent=2) + "\n")
        whole.rename(path)
    except OSError as error:
        reason = error.strerror
        raise CannotDo(f"cannot create the run folder {path}: {reason}; name another") from error
    finally:
        shutil.rmtree(whole, ignore_errors=True)  # renamed by now, or a failure


def open_segment(
    run: RunFolder,
    segment: segments.Segment,
    checkpoints: collections.abc.Sequence[pathlib.Path] = (),
) -> None:
    """Add a segment to a run, with copies of the given checkpoint folders.

    Raises:
      CannotDo: it cannot be written.
    """
    path = run.segment(segment.segment)
    whole = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        (whole / "checkpoints").mkdir(parents=True)
        for saved in checkpoints:
            files.check_all_plain(saved)
            shutil.copytree(saved, whole / "checkpoints" / saved.name)
        write_whole(whole / segments.FILE_NAME, segment.model_dump_json(indent=2) + "\n")
        whole.rename(path)
    except OSError as error:
        raise CannotDo(f"cannot open a segment in {run.path}: {error}") from error
    finally:
        shutil.rmtree(whole, ignore_errors=True)


def write_whole(path: pathlib.Path, text: str) -> None:
    """Replace a file as a whole, and wait until it is on the disk."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        try:
            # A name of its own, and none that is there: a link would lead elsewhere.
            with beside.open("x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise CannotDo(f"cannot write {path}: {error}") from error
