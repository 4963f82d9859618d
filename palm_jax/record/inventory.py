"""What lies in a folder of checkpoints, as its files tell: no array is read, no device touched.

FOLDER/STEP is a checkpoint if it has all that one is completed with. What a save or a removal
leaves behind when its process dies is a leftover; it is never taken for a checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

import pydantic
from etils import epath

from palm_jax import files

Folder: TypeAlias = pathlib.Path | epath.Path  # a bucket is the latter

_STEP = re.compile(r"0|[1-9][0-9]*")
TEMPORARY = ".orbax-checkpoint-tmp"
# A checkpoint that is to go is moved here first, in one rename: a process killed while deleting
# leaves no step that looks complete and has lost its arrays.
REMOVED = "removed"
# Present in every checkpoint that was completed.
_MARKS = (
    "commit_success.txt",
    "_CHECKPOINT_METADATA",
    "state/_METADATA",
    "state/manifest.ocdbt",
    "record/metadata",
)


class _StoredDigest(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)

    whole: str
    leaves: dict[str, str]


class _Stored(pydantic.BaseModel):
    """The content of record/metadata, but for its checksum."""

    model_config = pydantic.ConfigDict(strict=True)

    record: dict[str, Any]
    step: int
    held_out_loss: float | None
    leaves: dict[str, str]  # as digests.describe has them
    digest: _StoredDigest


@dataclasses.dataclass(frozen=True)
class Entry:
    """A checkpoint; what its record tells is None where that is damaged."""

    step: int
    bytes: int  # of its files
    held_out_loss: float | None  # nats; None also if it was not evaluated
    digest: str | None  # of the whole state
    problem: str | None  # of the record; None does not say that the arrays are sound


def missing(checkpoint: Folder) -> list[str]:
    """The files that a completed checkpoint has and this one lacks."""
    return [mark for mark in _MARKS if not (checkpoint / mark).exists()]


def named_steps(folder: Folder) -> list[int]:
    """Steps after which something in the folder is named, complete or not, ascending."""
    return sorted(int(path.name) for path in _inside(folder) if _STEP.fullmatch(path.name))


def steps(folder: Folder) -> list[int]:
    """Steps that have a complete checkpoint, ascending. The folder need not exist."""
    return [step for step in named_steps(folder) if not missing(folder / str(step))]


def leftovers(folder: Folder) -> list[str]:
    """Names left by a save that never ended or a removal that did not; or by one that is still
    going on."""
    return sorted(
        path.name
        for path in _inside(folder)
        if TEMPORARY in path.name
        or path.name == REMOVED
        or (_STEP.fullmatch(path.name) and missing(path))
    )


def stored(folder: Folder, step: int) -> dict[str, Any]:
    """The JSON of a checkpoint's record, without its checksum.

    Raises:
      OSError, ValueError: it cannot be read; it is damaged.
    """
    path = folder / str(step) / "record" / "metadata"
    is_url = "://" in os.fspath(path)
    found = files.parsed(path.read_text(encoding="utf-8") if is_url else files.text(path))
    if not isinstance(found, dict) or found.pop("checksum", None) != checksum(found):
        raise ValueError("its checksum does not fit")
    try:  # whoever changes it on purpose gives it a checksum that fits
        _Stored.model_validate(found)
    except pydantic.ValidationError as error:
        raise ValueError(files.first_problem(error)) from None
    if found["step"] != step:
        raise ValueError(f"it is the record of step {found['step']}")
    return found


def checksum(record: dict[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def entries(folder: Folder) -> list[Entry]:
    """The complete checkpoints, ascending, also while a process saves and removes some."""
    return [found for step in steps(folder) if (found := _entry(folder, step)) is not None]


def _entry(folder: Folder, step: int) -> Entry | None:
    """None if it was removed in the meantime."""
    size = bytes_of(folder / str(step))
    try:
        record = stored(folder, step)
    except (OSError, ValueError) as error:
        if missing(folder / str(step)):
            return None
        return Entry(step, size, None, None, f"its record is unreadable ({error})")
    return Entry(step, size, record["held_out_loss"], record["digest"]["whole"], None)


def bytes_of(path: Folder) -> int:
    """Bytes of a file, or of all files in a folder; one that vanishes meanwhile counts nothing."""
    try:
        if path.is_dir():
            return sum(bytes_of(inner) for inner in path.iterdir())
        return epath.Path(path).stat().length
    except FileNotFoundError:
        return 0


def set_aside(folder: Folder, step: int) -> None:
    """Make a checkpoint a leftover, as a whole, for `remove` to delete.

    Raises:
      OSError: it stays what it was.
    """
    (folder / REMOVED).mkdir(exist_ok=True)
    (folder / str(step)).rename(folder / REMOVED / str(step))


def remove(folder: Folder, names: Iterable[str]) -> None:
    """Delete leftovers. Raises OSError; a part that is gone by then is still a leftover."""
    for name in names:
        path = epath.Path(folder) / name
        if path.is_dir():
            path.rmtree()
        else:
            path.unlink()


def _inside(folder: Folder) -> list[Folder]:
    return list(folder.iterdir()) if folder.exists() else []
