"""A folder that appears under its name only when it is complete."""

from __future__ import annotations

import collections.abc
import contextlib
import fcntl
import os
import pathlib
import shutil

from palm_jax.errors import CannotDo


@contextlib.contextmanager
def workplace(
    folder: pathlib.Path,
    worth_keeping: collections.abc.Callable[[pathlib.Path, BaseException], bool],
) -> collections.abc.Iterator[pathlib.Path]:
    """A locked folder beside `folder`, gone afterwards unless `finish` renamed it.

    What a process that was killed left there is found there; its lock went with it. After an
    error or an interruption it stays if it is `worth_keeping`.

    Raises:
      CannotDo: another process has it.
    """
    place = folder.parent / f".{folder.name}.preparing"
    place.mkdir(parents=True, exist_ok=True)
    # Not through a link: what lies there is removed.
    handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotDo(
                f"another process is preparing {folder} (in {place}); wait for it"
            ) from None
        # Had that process finished in between, the handle would be the finished folder.
        if not _is_still(place, handle):
            raise CannotDo(f"another process was preparing {folder}; try again")
        try:
            yield place
        except BaseException as error:
            if _is_still(place, handle) and not worth_keeping(place, error):
                shutil.rmtree(place)
            raise
        else:
            if _is_still(place, handle):
                shutil.rmtree(place)
    finally:
        os.close(handle)


def _is_still(place: pathlib.Path, handle: int) -> bool:
    return place.is_dir() and os.path.samestat(os.fstat(handle), place.stat())


def finish(place: pathlib.Path, folder: pathlib.Path) -> None:
    """All that is in `place` is on disk, and then it is `folder`."""
    for path in (*place.iterdir(), place):
        _sync(path)
    place.rename(folder)
    _sync(folder.parent)


def _sync(path: pathlib.Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
