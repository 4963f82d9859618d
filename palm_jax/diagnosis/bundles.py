"""A diagnosis to carry to another machine: the run's record, the states and the rows of all arms.

A bundle is a folder of the run with less in it, so that `palm-jax spikes diagnose BUNDLE --arm
NAME` works as on the run; the files in its `diagnoses` are then copied back.
"""

from __future__ import annotations

import pathlib
import shutil

import numpy as np

from palm_jax import files
from palm_jax.diagnosis.casefile import FOLDER
from palm_jax.diagnosis.diagnose import Diagnosis
from palm_jax.diagnosis.feeds import ArmSource
from palm_jax.errors import CannotDo
from palm_jax.record import folder
from palm_jax.record.folder import RunFolder
from palm_jax.replay import bundles
from palm_jax.spikes import history


def create(case: Diagnosis, out: str) -> pathlib.Path:
    """Write the bundle: a folder, or an archive if `out` ends with .tar.gz.

    Raises:
      WrongInput: `out` exists.
      CannotDo: it cannot be written.
    """
    try:
        return _create(case, out)
    except OSError as error:
        raise CannotDo(f"cannot write the bundle {out}: {error}") from error


def _create(case: Diagnosis, out: str) -> pathlib.Path:
    run, plan, course = case.run, case.plan, case.lab.course
    rows: set[int] = set()
    for arm in plan.arms:
        source = ArmSource(course.corpus, course.base, course.segment, plan, arm, np.arange)
        for step in range(arm.first, arm.stop):
            rows.update(source.ids(step)[1].tolist())
    wanted = {arm.state_step for arm in plan.arms}
    with bundles.written(out) as bundle:
        bundle.path.mkdir()
        for name in (folder.CONFIG, folder.MANIFEST):
            _copy(run.path / name, bundle.path / name)
        _copy(run.path / "logbook", bundle.path / "logbook")
        for number in range(run.last_segment() + 1):
            _copy_segment(run, bundle, number)
        for source_run, segment, _ in history.chain(run, plan.segment):
            if source_run != run:
                continue  # a branch's parents stay where they are
            saved = run.checkpoints(segment.segment)
            for step in sorted(wanted):
                if (saved / str(step)).is_dir():
                    _copy(saved / str(step), bundle.checkpoints(segment.segment) / str(step))
        _copy(case.case.path, bundle.path / FOLDER / case.case.path.name)
        held_out = set(case.lab.probe.ids)
        bundles.write_rows(bundle, course.corpus, {"train": rows, "held_out": held_out})
    return pathlib.Path(out).absolute()


def _copy_segment(run: RunFolder, bundle: RunFolder, number: int) -> None:
    there = bundle.segment(number)
    there.mkdir(parents=True)
    _copy(run.segment(number) / "segment.json", there / "segment.json")


def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
    """A file or a folder, and nothing that a link leads to."""
    files.check_all_plain(source)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)
