"""A second home for a run: checkpoints on a fast disk that may vanish, copies on one that stays.

`checkpoint.mirror` names a folder that becomes a run's folder itself, a little later: config,
manifest, segments, the logbook, and every `checkpoint.mirror_every` steps' newest checkpoint.
Whole files and folders appear in it under their names in one rename, so that a copy that was cut
short is never taken for one. A run whose own folder is gone begins with what the mirror has.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import threading
import types
from collections.abc import Iterable, Iterator

from palm_jax import config, files
from palm_jax.errors import CannotDo, WrongInput
from palm_jax.record import folder, inventory

_NEW = ".copying"
_LOOK_S = 0.2


class Mirror:
    """Copies in the background what a run saves. Errors are raised by the next call."""

    def __init__(self, run: folder.RunFolder, settings: config.Checkpoint) -> None:
        assert settings.mirror is not None
        self._run, self._settings = run, settings
        self._there = folder.RunFolder(pathlib.Path(settings.mirror).absolute())
        self._wanted = threading.Event()
        self._is_over = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._work, name="mirror")
        self._thread.start()

    def saved(self, step: int) -> None:
        """A checkpoint is on its way to the run's folder.

        Raises:
          CannotDo: what was to be copied before could not be.
        """
        self._check()
        every = self._settings.mirror_every
        if every is None or step % every == 0:
            self._wanted.set()

    def close(self) -> None:
        """Copy what is not yet; the run's last checkpoint must be complete. Raises as `saved`."""
        self._stop()
        if self._error is None:
            with self._noting():
                self._copy()
        self._check()

    def __enter__(self) -> Mirror:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:  # what ends the run is told, and what was saved last lies in its own folder
            self._stop()

    def _stop(self) -> None:
        self._is_over.set()
        self._wanted.set()
        self._thread.join()

    def _check(self) -> None:
        if self._error is not None:
            raise CannotDo(
                f"checkpoint.mirror={self._settings.mirror} could not be written: {self._error}; "
                "make room there, name another folder, or leave it out"
            )

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._error = error

    def _work(self) -> None:
        while not self._is_over.is_set():
            self._wanted.wait()
            self._wanted.clear()
            while self._is_being_saved() and not self._is_over.wait(_LOOK_S):
                pass
            if self._is_over.is_set():
                return
            with self._noting():
                self._copy()

    def _is_being_saved(self) -> bool:
        place = self._run.checkpoints(self._run.last_segment())
        return any(place.glob("*.orbax-checkpoint-tmp*"))

    def _copy(self) -> None:
        copy(self._run, self._there, self._settings.keep_last)


def copy(run: folder.RunFolder, there: folder.RunFolder, keep_last: int) -> None:
    """Bring `there` up to date with a run.

    Of each segment's checkpoints the newest is copied, and the newest `keep_last` stay.
    """
    for number in range(run.last_segment() + 1):
        steps = inventory.steps(run.checkpoints(number))
        for step in steps[-1:]:
            _copy_folder(run.checkpoints(number) / str(step), there.checkpoints(number) / str(step))
        held = inventory.steps(there.checkpoints(number))
        for step in held[:-keep_last]:
            _remove(there.checkpoints(number) / str(step))
        _copy_files(run.segment(number).glob("*.json"), there.segment(number))
    _copy_files(sorted((run.path / "logbook").glob("*.jsonl")), there.path / "logbook")
    # The config last: a folder is a run once it has one.
    _copy_files([run.path / folder.MANIFEST, run.path / folder.CONFIG], there.path)


def bring_back(settings: config.Config, run: pathlib.Path) -> int | None:
    """Make the folder of a run that is gone from its mirror; its newest step, None: no need.

    Raises:
      WrongInput: the mirror holds a run of another config.
      CannotDo: it cannot be copied.
    """
    mirror = settings.checkpoint.mirror
    if mirror is None or folder.is_run(run) or not folder.is_run(mirror):
        return None
    there = folder.RunFolder(pathlib.Path(mirror).absolute())
    if config.fingerprint(there.config()) != config.fingerprint(settings):
        raise WrongInput(
            f"{run} is not there, and checkpoint.mirror={mirror} holds a run of another config; "
            "name that run's config, or another mirror"
        )
    try:
        _copy_folder(there.path.resolve(), run)
    except OSError as error:
        raise CannotDo(
            f"cannot bring {run} back from checkpoint.mirror={mirror}: {error}"
        ) from error
    steps = inventory.steps(there.checkpoints(there.last_segment()))
    return max(steps, default=0)


def _copy_files(paths: Iterable[pathlib.Path], into: pathlib.Path) -> None:
    into.mkdir(parents=True, exist_ok=True)
    for file in paths:
        files.check_all_plain(file)
        target = into / file.name
        # Logbook parts only grow; of what is replaced as a whole, the time tells.
        here = file.stat()
        if target.exists() and (here.st_size, here.st_mtime_ns) == (
            target.stat().st_size,
            target.stat().st_mtime_ns,
        ):
            continue
        beside = into / f".{file.name}{_NEW}"
        shutil.copy2(file, beside)
        os.replace(beside, target)


def _copy_folder(source: pathlib.Path, target: pathlib.Path) -> None:
    if target.exists() and any(target.iterdir()):
        return
    beside = target.with_name(f"{target.name}{_NEW}")
    shutil.rmtree(beside, ignore_errors=True)
    files.check_all_plain(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, beside)
    if target.exists():
        target.rmdir()
    beside.rename(target)


def _remove(path: pathlib.Path) -> None:
    beside = path.with_name(f"{path.name}{_NEW}")
    path.rename(beside)  # never half of one under its name
    shutil.rmtree(beside)
