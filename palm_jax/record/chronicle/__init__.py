"""The run's chronicle: its logbook told in Markdown, as a person on call would keep it.

One entry for whatever is worth telling, in the order of the logbook: when, what was seen, what
was done, what it cost. The logbook is read as a stream. What stays in memory are the entries,
and the pace of the steps: one row for each flush.

Every recorded attempt of a step is either in the history that the run has now, or was lost when
a process died and the run went on from an earlier checkpoint, or was left behind when a later
segment began before it: attempts = steps made + steps redone + steps left behind.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

from palm_jax.errors import WrongInput
from palm_jax.record import folder, logbook
from palm_jax.record.chronicle import histories
from palm_jax.record.chronicle.teller import Teller

__all__ = ["Teller", "note", "render", "summary"]


def render(run_dir: str | os.PathLike[str]) -> str:
    """The chronicle of a run, in Markdown.

    Raises:
      WrongInput: the folder is no run.
      CannotDo: the logbook, or the description of a segment, is damaged.
    """
    return _read(run_dir).text(_name(run_dir))


def summary(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """The numbers under the chronicle. Those that are not finite are the strings "inf", "nan".

    `steps_redone` counts the recorded attempts that were lost with a process, and
    `steps_left_behind` those before which a later segment began. Skipped updates and losses
    that are not finite count once, however often their step was executed.

    Errors as in `render`.
    """
    return {"run": _name(run_dir), **logbook.plain(_read(run_dir).summary())}


def note(run_dir: str | os.PathLike[str], text: str) -> None:
    """Enter a person's note into the run's logbook, also while the run is going on.

    Raises:
      WrongInput: the text is empty, or the folder is no run.
      CannotDo: the disk does not take it.
    """
    _check_run(run_dir)
    if not text.strip():
        raise WrongInput("the note is empty: give its text, in quotes if it has spaces")
    folder.check_own(run_dir)
    with logbook.Logbook.open(run_dir) as book:
        book.append("note", text=text)


def _check_run(run_dir: str | os.PathLike[str]) -> None:
    if not folder.is_run(run_dir):
        raise WrongInput(f"{os.fspath(run_dir)} is not a run's folder: it has no {folder.CONFIG}")


def _name(run_dir: str | os.PathLike[str]) -> str:
    return pathlib.Path(os.path.abspath(run_dir)).name


def _read(run_dir: str | os.PathLike[str]) -> Teller:
    _check_run(run_dir)
    teller = Teller(histories.parents(folder.RunFolder(pathlib.Path(run_dir))))
    for _, records in logbook.scan_parts(run_dir):
        for found in records:
            if isinstance(found, logbook.Torn):
                teller.torn(found)
            else:
                teller.add(found)
        teller.end_part()
    teller.end()
    return teller
