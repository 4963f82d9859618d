"""Reading what somebody else may have written: plain files, of a size that can be expected.

A folder that was sent may hold anything under any name. A FIFO would wait for its writer for
ever, a link to a device has no end, and a few bytes of JSON can be nested deeper than Python
goes. All of that is an OSError or a ValueError here, and so an error message of the caller.
"""

from __future__ import annotations

import errno
import io
import json
import os
import pathlib
import stat
from typing import Any, NoReturn, TypeVar

import pydantic

Model = TypeVar("Model", bound=pydantic.BaseModel)
MOST_BYTES = 64 * 2**20  # of a file that describes others
_DEEPEST = 50  # lists and objects within each other


def opened(path: str | os.PathLike[str]) -> io.BufferedReader:
    """A plain file, or a link to one, open for reading.

    Raises:
      OSError: it cannot be opened, or is something else.
      ValueError: no file can have this name.
    """
    # O_NONBLOCK, for a FIFO; reads of plain files do not know it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file", os.fspath(path))
    return os.fdopen(descriptor, "rb")


def text(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> str:
    """The content of a file in UTF-8.

    Raises:
      OSError: as `opened`, or it is larger than `most_bytes`.
      ValueError: as `opened`, or it is not UTF-8.
    """
    with opened(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes:,} bytes", os.fspath(path))
    return content.decode("utf-8")


def parsed(content: str) -> Any:
    """Strict JSON.

    Raises:
      ValueError: it is none; Python's NaN and Infinity are none either; or it is nested deeper
        than anything written here.
    """
    try:
        found = _DECODER.decode(content)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if content.count("[") + content.count("{") > _DEEPEST and _is_deeper(found, _DEEPEST):
        raise ValueError(_TOO_DEEP)
    return found


def described(path: str | os.PathLike[str], model: type[Model]) -> Model:
    """A file of JSON, as `model` has it.

    Raises:
      OSError: as `text`.
      ValueError: as `text`, or an entry is not as the model says; the message names the first.
    """
    content = text(path)
    try:
        return model.model_validate_json(content)
    except pydantic.ValidationError as error:
        raise ValueError(first_problem(error)) from None


def first_problem(error: pydantic.ValidationError) -> str:
    """The first wrong entry, and what is wrong with it, in a line."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"])) or "the file"
    return f"{where[:200]}: {first['msg']}"


def check_all_plain(folder: pathlib.Path) -> None:
    """Raise OSError unless a folder holds only plain files and folders: what can be copied
    without reading anything outside it, or something that has no end."""
    for path in (folder, *folder.rglob("*")):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise OSError(errno.EINVAL, "it is neither a plain file nor a folder", str(path))


def _refuse(token: str) -> NoReturn:
    raise ValueError(f"{token} is not JSON")


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, list | dict):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(one, levels - 1) for one in inner)


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_TOO_DEEP = f"it is nested deeper than {_DEEPEST} levels"
