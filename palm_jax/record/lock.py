"""Who writes to a run: one process at a time, on one machine or on several that share a disk.

The system locks the run's folder for a process and lets go when it ends, however it ends; but
many network file systems keep such a lock within one machine. So the owner also leaves a file
that names it, and touches it now and then: what a machine that is gone left behind grows old.
"""

from __future__ import annotations

import collections.abc
import contextlib
import fcntl
import json
import os
import pathlib
import socket
import sys
import threading
from typing import Any

from palm_jax import files
from palm_jax.errors import CannotDo
from palm_jax.record import folder

FILE_NAME = "owner.json"
TOUCH_S = 30
STALE_S = 300  # of the file system's own clock


@contextlib.contextmanager
def held(run: pathlib.Path) -> collections.abc.Iterator[None]:
    """Keep others from writing to the run, as long as this process does.

    Raises:
      CannotDo: another process holds it, and it is named; it cannot be locked; or as
        `folder.check_own`.
    """
    folder.check_own(run)
    descriptor = os.open(run, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotDo(
                f"another process is writing to {run}{_named(_owner(run))}; wait for it, or name "
                "another folder"
            ) from None
        except OSError as error:  # some network file systems
            raise CannotDo(
                f"{run} lies where a folder cannot be locked ({error.strerror}); put the run "
                "on another disk"
            ) from error
        with _owned(run):
            yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _owned(run: pathlib.Path) -> collections.abc.Iterator[None]:
    path = run / FILE_NAME
    owner = {"host": socket.gethostname(), "process": os.getpid()}
    try:
        _take(path, owner)
    except OSError as error:
        raise CannotDo(f"cannot write {path}: {error.strerror}; the run needs a disk") from error
    is_over = threading.Event()
    toucher = threading.Thread(target=_touch, args=(path, owner, is_over), daemon=True)
    toucher.start()
    try:
        yield
    finally:
        is_over.set()
        toucher.join()
        if _owner(run) == owner:
            path.unlink(missing_ok=True)


def _take(path: pathlib.Path, owner: dict[str, Any]) -> None:
    try:
        _write(path, owner)  # touches the folder's clock, too
    except FileExistsError:
        before = _owner(path.parent)
        if before is not None and before["host"] != owner["host"] and not _is_stale(path):
            raise CannotDo(
                f"another machine is writing to {path.parent}{_named(before)}; wait for it. If it "
                f"is gone, wait until {path} is {STALE_S} seconds old, or remove that file"
            ) from None
        # Its process has ended: the system's lock on this machine was free.
        path.unlink(missing_ok=True)
        _write(path, owner)


def _write(path: pathlib.Path, owner: dict[str, Any]) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(_text(owner))


def _text(owner: dict[str, Any]) -> str:
    return json.dumps(owner) + "\n"


def _touch(path: pathlib.Path, mine: dict[str, Any], is_over: threading.Event) -> None:
    while not is_over.wait(TOUCH_S):
        now = _owner(path.parent)
        if now not in (None, mine):
            # Paused for so long that this process was taken for dead. Nothing of it may be saved.
            print(f"error: {path.parent} was taken over{_named(now)}", file=sys.stderr)
            os._exit(CannotDo.exit_code)
        # Written anew, because not every mounted bucket lets a time be set.
        with contextlib.suppress(OSError):  # a disk that is away; the run's own writes tell
            beside = path.with_name(f".{path.name}.{os.getpid()}")
            beside.unlink(missing_ok=True)
            _write(beside, mine)
            beside.replace(path)


def _owner(run: pathlib.Path) -> dict[str, Any] | None:
    try:
        owner = files.parsed(files.text(run / FILE_NAME))
        return {"host": str(owner["host"]), "process": int(owner["process"])}
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None  # written at this moment, or by nothing of ours


def _named(owner: dict[str, Any] | None) -> str:
    return "" if owner is None else f" (process {owner['process']} on {owner['host']})"


def _is_stale(path: pathlib.Path) -> bool:
    """By the clock of the disk that both machines write to: theirs may differ."""
    probe = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime > STALE_S
    except FileNotFoundError:
        return True  # its owner has just left
    finally:
        probe.unlink(missing_ok=True)
